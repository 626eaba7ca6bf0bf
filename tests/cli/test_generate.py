"""Laws of text that comes out of a model: asked in the model's own form, and shown as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import pytest
import tiny
import torch
from commands import output, run
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl_templates import template

from stillroom.cli import main
from stillroom.config import load_config
from stillroom.config.schema import DataConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.data import open_eval
from stillroom.models.generate import Ability, Piece, continuation, end_ids, generate, open_writer, readable
from stillroom.models.load import model_name
from stillroom.training.distill import distill
from stillroom.training.finish import PROMPT_TOKENS, beginning

REFUSING = "{{ raise_exception('this template knows no questions') }}"


class Parrot(PreTrainedModel, GenerationMixin):
    """A model that writes the given tokens one after the other, and keeps what it was asked."""

    def __init__(self, script: list[int], ends: Any = None, positions: int = 128):
        super().__init__(LlamaConfig(vocab_size=tiny.VOCAB, max_position_embeddings=positions))
        self.table = torch.nn.Embedding(tiny.VOCAB, 1)
        self.script, self.asked = script, list[list[int]]()
        self.generation_config.eos_token_id = ends

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.asked.append(input_ids[0].tolist())
        logits = torch.zeros(1, 1, tiny.VOCAB)
        logits[0, 0, self.script[len(self.asked) - 1]] = 1.0
        return CausalLMOutputWithPast(logits=logits)


@pytest.fixture
def parrots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parrot counts its calls: it is not tried before it writes, and is given the whole text for each token."""
    monkeypatch.setattr("stillroom.models.generate.ability_of", lambda _model: Ability(False, False))


# -- the text --------------------------------------------------------------------------------------------


def test_a_continuation_keeps_its_leading_space(parrots: None) -> None:
    """Pieces of a Llama tokenizer carry their space, and lose it when they are decoded alone."""
    tokenizer = begun.llama_tokenizer()
    words = "the still room keeps spirits"
    ids = tokenizer(words)["input_ids"]
    for place in range(2, len(ids)):
        before = tokenizer.decode(ids[:place], skip_special_tokens=True)
        assert before + continuation(tokenizer, ids[:place], ids[place:]) == words
    assert tokenizer.decode(ids[2:]) == "still room keeps spirits"
    assert generate(Parrot([*ids[2:], 2]), tokenizer, ids[:2]) == " still room keeps spirits"


def test_half_a_character_is_no_text_of_its_own() -> None:
    tokenizer = begun.byte_tokenizer()
    ids = tokenizer("\u00e9a", add_special_tokens=False)["input_ids"]
    assert continuation(tokenizer, ids[:1], ids[1:]) == "\u00e9a"


def test_a_turn_ends_where_the_model_s_settings_say_and_only_at_special_tokens(parrots: None) -> None:
    tokenizer = begun.byte_tokenizer()
    turn, word = tokenizer.convert_tokens_to_ids("<|eot_id|>"), 100
    assert end_ids(Parrot([], ends=[turn, word]), tokenizer) == {2, turn}
    assert end_ids(Parrot([], ends=None), tokenizer) == {2}
    assert generate(Parrot([word, turn, word], ends=[2, turn]), tokenizer, [90], max_new_tokens=3) == tokenizer.decode(
        word
    )


def test_a_full_model_stops_and_says_so(parrots: None) -> None:
    parrot = Parrot([100] * 9, positions=6)
    told = generate(parrot, begun.byte_tokenizer(), [1, 90, 91, 92], max_new_tokens=9)
    assert len(parrot.asked) == 2 and "6 positions are full" in told
    assert max(map(len, parrot.asked)) < 6


def test_special_tokens_part_what_a_person_reads() -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3"))
    chat = [{"role": "user", "content": "the still"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert readable(tokenizer, ids) == "user\nthe still\nassistant"
    plain = tokenizer("  the still\n")["input_ids"]
    assert readable(tokenizer, plain) == "  the still\n"


# -- the command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    begun.save(path / "base", begun.byte_tokenizer())
    begun.save(path / "instruct", begun.byte_tokenizer(chat_template=template("llama3")))
    begun.save(path / "refusing", begun.byte_tokenizer(chat_template=REFUSING))
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that models are given, instead of what they would write."""
    seen: list[list[int]] = []

    def write(_model: Any, _words: Any, ids: list[list[int]], give: Any, **_: Any) -> None:
        seen.extend(ids)
        for row in range(len(ids)):
            give(Piece(row, " well", "end of text"))

    monkeypatch.setattr("stillroom.models.generate.write", write)
    return seen


def test_a_base_model_continues_the_text(folder: Path, asked: Any, capsys: Any) -> None:
    assert output(capsys, "generate", str(folder / "base"), "--prompt", "the room") == "the room well\n"
    output(capsys, "generate", str(folder / "base"), "--prompt", "the room", "--bos", "false")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    assert asked == [tokenizer("the room")["input_ids"], tokenizer("the room")["input_ids"][1:]]


def test_an_instruct_model_is_asked_with_its_template(folder: Path, asked: Any, capsys: Any) -> None:
    name = str(folder / "instruct")
    assert output(capsys, "generate", name, "--prompt", "the room") == "well\n"
    assert output(capsys, "generate", name, "--prompt", "the room", "--raw") == "the room well\n"
    tokenizer = AutoTokenizer.from_pretrained(name)
    turns = [{"role": "user", "content": "the room"}]
    # What transformers itself gives a model that is to answer this question.
    wanted = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == [wanted, tokenizer("the room")["input_ids"]]


def test_a_template_that_refuses_the_prompt_is_explained(folder: Path) -> None:
    with refused(ConfigError, "--prompt") as caught:
        open_writer(str(folder / "refusing"), torch.device("cpu")).continuations(["the room"])
    assert any("--raw" in advice for advice in caught.value.advice)


def test_a_model_that_writes_nothing_says_so(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    nothing = Piece(0, "", "end of text")
    monkeypatch.setattr("stillroom.models.generate.write", lambda *given, **_: given[3](nothing))
    code, _out, err = run(capsys, "generate", str(folder / "instruct"), "--prompt", "the")
    assert code == 0 and "wrote no word" in err


def test_an_unknown_wish_for_bos_is_refused(folder: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(folder / "base"), "--prompt", "a", "--bos", "maybe"])
    assert ended.value.code == 2 and "--bos maybe" in capsys.readouterr().err


# -- the folder of a run ---------------------------------------------------------------------------------


def test_the_folder_of_a_run_stands_for_its_student(world: Path, tmp_path: Path, capsys: Any) -> None:
    settings = tiny.settings(world, train__max_steps=2, eval__samples=0)
    run = distill(load_config(overrides=settings), tmp_path / "run", device="cpu").folder
    assert model_name(str(run)) == str(run / "student")
    by_run = output(capsys, "generate", str(run), "--prompt", "the still", "--max-new-tokens", "4")
    assert by_run == output(capsys, "generate", str(run / "student"), "--prompt", "the still", "--max-new-tokens", "4")
    words = ["--data", str(world / "train.jsonl"), "--max-batches", "2", "--json"]
    by_run, by_student = (
        json.loads(output(capsys, "eval", "--model", str(name), *words)) for name in (run, run / "student")
    )
    assert by_run["student"]["perplexity"] == by_student["student"]["perplexity"]


def test_a_run_without_a_student_is_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("{}\n")
    with refused(BrokenAtStart, "student") as broken:
        model_name(str(tmp_path))
    assert any("stillroom resume" in advice for advice in broken.value.advice)
    assert model_name("builtin:teacher") == "builtin:teacher" and model_name("org/name") == "org/name"


# -- samples of the report -------------------------------------------------------------------------------

LINES = [line for line in tiny.sentences(60, 2) if len(line) > 80]


def write(path: Path, values: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def test_a_sample_begins_where_the_question_ends(tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3"))
    turns = [("user", LINES[0]), ("assistant", LINES[1]), ("user", "the"), ("assistant", "room")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    asked = {"prompt": f"{LINES[2]} ", "completion": LINES[3]}
    rows = open_eval(write(tmp_path / "d.jsonl", [chat, asked]), tokenizer, DataConfig(chat="off")).evaluation
    prompt, answer = beginning(rows, 0)
    assert readable(tokenizer, prompt) == f"user\n{LINES[0]}\nassistant"
    assert continuation(tokenizer, prompt, answer) == LINES[1]  # and no turn after it
    prompt, answer = beginning(rows, 1)
    assert readable(tokenizer, prompt) == f"{LINES[2]} " and continuation(tokenizer, prompt, answer) == LINES[3]


@pytest.mark.parametrize("kind", ["bos", "none"])
def test_a_sample_of_plain_text_continues_its_first_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = begun.byte_tokenizer(kind)
    values = [{"text": " ".join(LINES[:4])}, {"text": "the still room keeps"}]
    rows = open_eval(write(tmp_path / "d.jsonl", values), tokenizer, DataConfig()).evaluation
    prompt, rest = beginning(rows, 0)
    assert len(prompt) == PROMPT_TOKENS and [*prompt, *rest] == rows.row(0).tolist()
    prompt, rest = beginning(rows, 1)  # shorter than that: its end is left to be written
    assert prompt and rest and tokenizer.eos_token_id not in prompt


def test_a_run_on_questions_shows_questions_and_answers(tmp_path: Path) -> None:
    tokenizer = begun.byte_tokenizer()
    begun.save(tmp_path / "teacher", tokenizer)
    begun.save(tmp_path / "student", tokenizer, seed=1)
    values = [{"question": line[:60], "answer": line[60:]} for line in LINES]
    write(tmp_path / "train.jsonl", values)
    settings = tiny.settings(tmp_path, data__max_length=96, train__max_steps=1, eval__samples=2)
    result = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    samples = [event for event in events if event["event"] == "sample"]
    answers = {f"{value['question']}\n": value["answer"] for value in values}
    assert len(samples) == 2
    for sample in samples:
        assert answers[sample["prompt"]].startswith(sample["reference"].rstrip())
        assert sample["reference"] and "<s>" not in sample["prompt"]


def test_a_model_is_left_in_the_mode_it_was_in() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config("llama")).train()
    generate(model, tiny.tokenizer(), [5], max_new_tokens=2)
    assert model.training
