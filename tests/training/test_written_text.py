"""Laws of `stillroom write`: seeds, resumption to the same bytes, what is kept, and a file that is plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import begun
import families
import pytest
import tiny
import torch
from commands import run as run_command
from refusals import refused
from trl_templates import template

from stillroom import load_config
from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError, DataError, Interrupted
from stillroom.data import open_data
from stillroom.models import load_tokenizer
from stillroom.training import write as module
from stillroom.training.distill import distill
from stillroom.training.write import write_text


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, each with the answer that the tiny teacher was trained on."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": " ".join(line.split()[:3]), "completion": line.split()[3]} for line in tiny.sentences(9, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chatty") / "model"
    families.build("llama").save_pretrained(path)
    begun.byte_tokenizer(chat_template=template("llama3")).save_pretrained(path)
    return path


def settings(model: Path, data: Path | None, **over: Any) -> Any:
    base: dict[str, Any] = {"teacher.model": str(model), "write.max_new_tokens": 8, "write.batch_size": 4}
    base |= {"write.prompts": str(data)} if data else {}
    return load_config(overrides={**base, **{f"write.{key}": value for key, value in over.items()}})


def written(model: Path, data: Path | None, out: Path, **over: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    result = write_text(settings(model, data, **over), out, device="cpu")
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()], result


# -- what is written -------------------------------------------------------------------------------------


def test_samples_differ_runs_agree_and_the_unit_does_not_matter(world: Path, questions: Path, tmp_path: Path) -> None:
    model = world / "teacher"
    rows, result = written(model, questions, tmp_path / "a.jsonl", samples=2, temperature=2.0)
    again, _ = written(model, questions, tmp_path / "b.jsonl", samples=2, temperature=2.0)
    wider, _ = written(model, questions, tmp_path / "c.jsonl", samples=2, temperature=2.0, batch_size=18)
    assert rows == again and [row["ids"] for row in rows] == [row["ids"] for row in wider]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    pairs = [tuple(row["ids"]) for row in rows[:2]]
    assert len(set(pairs)) == 2 and len(rows) == result["rows"] == 18
    assert result["kept_share"] == 1.0 and result["tokens_per_second"] > 0
    assert result["tokens"] == sum(len(row["ids"]) for row in rows)


def test_log_probs_and_ids_are_those_of_the_model(world: Path, questions: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rows, _ = written(world / "teacher", questions, tmp_path / "a.jsonl", temperature=0.0, max_prompts=3)
    network = AutoModelForCausalLM.from_pretrained(world / "teacher").eval()
    for row in rows:
        whole = torch.tensor([row["prompt_ids"] + row["ids"]])
        with torch.no_grad():
            log_probs = torch.log_softmax(network(whole).logits[0, len(row["prompt_ids"]) - 1 : -1], -1)
        taken = log_probs.gather(1, whole[0, len(row["prompt_ids"]) :, None]).mean()
        assert row["log_prob"] == pytest.approx(float(taken), abs=1e-5)
        assert log_probs.argmax(-1).tolist() == row["ids"]


def test_the_origin_says_who_wrote_it_with_which_weights_and_how(world: Path, questions: Path, tmp_path: Path) -> None:
    written(world / "teacher", questions, tmp_path / "a.jsonl")
    about = json.loads((tmp_path / "a.jsonl.origin").read_text())
    assert about["writer"]["model"] == str(world / "teacher") and about["writer"]["weights"]
    assert about["settings"]["temperature"] == 1.0 and about["counters"]["asked"] == about["counters"]["kept"] == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.origin"]


def test_a_run_writes_as_its_student(shared_run: Any, questions: Path, tmp_path: Path) -> None:
    folder = shared_run().folder
    rows, _ = written(folder, questions, tmp_path / "run.jsonl", temperature=0.0)
    direct, _ = written(folder / "student", questions, tmp_path / "student.jsonl", temperature=0.0)
    assert rows == direct


# -- data as any other -----------------------------------------------------------------------------------


def test_ids_written_are_ids_trained(world: Path, questions: Path, tmp_path: Path) -> None:
    """At temperature 3 the tokens are such as no tokenizer would choose, and most texts are cut at their length."""
    out = tmp_path / "a.jsonl"
    rows, _ = written(world / "teacher", questions, out, temperature=3.0)
    config = load_config(overrides={"teacher.model": str(world / "teacher")})
    tokenizer = load_tokenizer(config.teacher, config.teacher.model)
    corpus = open_data(DataConfig(train=str(out), max_length=64, eval_share=0.2), tokenizer)
    found = set()
    for side in (corpus.train, corpus.evaluation):
        for index in range(len(side)):
            prompt, answer = side.question(index)
            found.add((tuple(prompt), tuple(answer)))
    assert found == {(tuple(row["prompt_ids"]), tuple(row["ids"])) for row in rows}
    assert any(tokenizer(row["completion"], add_special_tokens=False)["input_ids"] != row["ids"] for row in rows)
    assert any("was written by" in note for note in corpus.notes)


def test_a_student_is_distilled_on_it(world: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    written(world / "teacher", questions, out, samples=4, temperature=1.5)
    config = load_config(overrides=tiny.settings(world, data__train=str(out), train__max_steps=2))
    done = distill(config, tmp_path / "run", device="cpu")
    assert done.summary["status"] == "done"


# -- chats -----------------------------------------------------------------------------------------------


def test_prompts_are_asked_by_the_chat_template(chatty: Path, questions: Path, tmp_path: Path) -> None:
    rows, _ = written(chatty, questions, tmp_path / "a.jsonl")
    tokenizer = load_tokenizer(load_config().teacher, str(chatty))
    for row in rows:
        asked = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        assert row["prompt_ids"] == tokenizer(asked, add_special_tokens=False)["input_ids"]
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
    raw, _ = written(chatty, questions, tmp_path / "raw.jsonl", raw=True)
    assert {"prompt", "completion"} <= raw[0].keys()


def test_a_conversation_is_continued_at_its_last_answer(chatty: Path, tmp_path: Path) -> None:
    turns = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages[:2]}) + "\n")
    rows, _ = written(chatty, data, tmp_path / "a.jsonl")
    assert [row["messages"][:-1] for row in rows] == [messages[:4], messages[:2]]


def test_without_prompts_the_model_writes_the_questions_too(chatty: Path, tmp_path: Path) -> None:
    more = {"start": "template", "max_prompts": 96, "max_new_tokens": 40, "batch_size": 32}
    rows, result = written(chatty, None, tmp_path / "a.jsonl", **more)
    counters = result["counters"]
    refusals = sum(count for name, count in counters.items() if name.endswith("_question"))
    assert counters["asked"] + refusals == 96 and rows
    assert len({row["messages"][0]["content"] for row in rows}) > 1


def test_documents_are_continued_from_their_beginnings(world: Path, tmp_path: Path) -> None:
    more = {"start": "documents", "start_tokens": 3, "max_prompts": 5}
    rows, _ = written(world / "teacher", world / "train.jsonl", tmp_path / "a.jsonl", **more)
    texts = [json.loads(line)["text"] for line in (world / "train.jsonl").read_text().splitlines()[:5]]
    assert all(text.startswith(row["prompt"]) for text, row in zip(texts, rows, strict=True))
    assert all(len(row["prompt_ids"]) == 3 for row in rows)


# -- what is kept ----------------------------------------------------------------------------------------


def test_texts_without_prompts_are_refused_with_the_setting_that_reads_them(world: Path, tmp_path: Path) -> None:
    """The advice listed {"text"} as a shape that is read, which these records have."""
    texts = world / "train.jsonl"
    with refused(DataError, "", "write.start=documents") as caught:
        written(world / "teacher", texts, tmp_path / "d.jsonl")
    assert not any('{"text"}' in advice for advice in caught.value.advice)


def test_a_checker_keeps_drops_and_ranks(world: Path, questions: Path, tmp_path: Path) -> None:
    more = {"samples": 6, "temperature": 1.5, "checker": r"regex:^\s*(\w+)", "max_new_tokens": 4}
    everything, told = written(world / "teacher", questions, tmp_path / "all.jsonl", **more)
    right, _ = written(world / "teacher", questions, tmp_path / "right.jsonl", **more, keep="right")
    best, _ = written(world / "teacher", questions, tmp_path / "best.jsonl", **more, keep="best")
    assert 0 < len(right) < len(everything) and all(row["score"] == 1.0 for row in right)
    assert told["counters"]["right"] >= len(right), "repeated answers are counted, and kept once"
    assert right == [row for row in everything if row["score"] == 1.0]
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in everything:
        by_prompt.setdefault(row["prompt"], []).append(row)
    wanted = [max(rows, key=lambda row: (row["score"], row["log_prob"])) for rows in by_prompt.values()]
    assert [row["ids"] for row in best] == [row["ids"] for row in wanted]


def test_repeated_answers_and_prompts_are_kept_once_and_counted(world: Path, questions: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text(questions.read_text() * 2)
    rows, result = written(world / "teacher", twice, tmp_path / "a.jsonl", samples=8, temperature=0.3, max_new_tokens=2)
    assert result["prompts"] == 9 and result["counters"]["dropped_repeated"] > 0
    assert len({(row["prompt"], row["completion"]) for row in rows}) == len(rows)
    assert result["counters"]["kept"] + result["counters"]["dropped_repeated"] == result["counters"]["asked"] == 72


def test_nothing_kept_is_an_error_with_the_counts(world: Path, questions: Path, tmp_path: Path) -> None:
    with refused(DataError, "a.jsonl", "dropped_wrong"):
        written(world / "teacher", questions, tmp_path / "a.jsonl", checker="json", keep="right")


# -- killed and continued --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["before the lines", "before the progress", "after the progress", "before the end"])
def test_a_command_killed_anywhere_ends_with_the_same_bytes(
    world: Path, questions: Path, tmp_path: Path, monkeypatch: Any, place: str
) -> None:
    more = {"samples": 2, "temperature": 1.5, "checker": "exact"}
    whole, told = written(world / "teacher", questions, tmp_path / "whole.jsonl", **more)

    class Killed(BaseException):
        pass

    real_add, real_atomic, count = module.Output.add, module.write_atomically, iter(range(100))

    def add(self: Any, *words: Any) -> None:
        number = next(count)
        if number == 1 and place == "before the lines":
            raise Killed
        real_add(self, *words)
        if number == 1 and place == "after the progress":
            raise Killed

    def atomic(path: Path, contents: bytes) -> None:
        if next(count) == 3 and place == "before the progress":
            raise Killed
        real_atomic(path, contents)

    def end(_self: Any, _about: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if place == "before the progress":
            patch.setattr(module, "write_atomically", atomic)
        elif place == "before the end":
            patch.setattr(module.Output, "end", end)
        else:
            patch.setattr(module.Output, "add", add)
        with pytest.raises(Killed):
            written(world / "teacher", questions, tmp_path / "cut.jsonl", **more)
    assert not (tmp_path / "cut.jsonl").exists() and (tmp_path / "cut.jsonl.partial").exists()
    known, notes = json.loads((tmp_path / "cut.jsonl.progress").read_text()), list[str]()
    config = settings(world / "teacher", questions, **more)
    again = write_text(config, tmp_path / "cut.jsonl", device="cpu", tell=notes.append)
    asked, kept = (known["counters"].get(name, 0) for name in ("asked", "kept"))
    assert f"continues after {asked} answers, {kept} of them kept" in notes and asked >= 4
    rows = [json.loads(line) for line in (tmp_path / "cut.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert again["counters"] == told["counters"] and rows == whole
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".partial", ".progress", ".lock")]


def test_a_finished_file_is_not_written_again_and_another_is_not_overwritten(
    world: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a.jsonl"
    written(world / "teacher", questions, out)
    before = out.read_bytes()
    _, again = written(world / "teacher", questions, out)
    assert again["already_finished"] and out.read_bytes() == before
    for model, over in ((world / "teacher", {"seed": 1}), (world / "student", {})):
        with refused(ConfigError, "a.jsonl"):
            written(model, questions, out, **over)
    assert out.read_bytes() == before


def test_a_damaged_part_is_refused(world: Path, questions: Path, tmp_path: Path) -> None:
    config, out = settings(world / "teacher", questions), tmp_path / "a.jsonl"
    with pytest.raises(Interrupted):
        write_text(config, out, device="cpu", max_minutes=1e-9)
    partial, progress = tmp_path / "a.jsonl.partial", tmp_path / "a.jsonl.progress"
    known = {"plan": "", "units": 1, "bytes": 3, "seconds": 1.0, "counters": {}, "refusals": [], "sha256": "0"}
    partial.write_bytes(b"abc")
    progress.write_text(json.dumps(known))
    with refused(ConfigError, "a.jsonl"):
        write_text(config, out, device="cpu")
    real = module.Output(out, {})
    source = module.open_source(config, "cpu")
    prompts, vocabulary = module._prompts(config, module.Tally()), module.vocabulary_hash(source.tokenizer)
    plan = module._plan(config, source, prompts, vocabulary)
    progress.write_text(json.dumps(known | {"plan": module.Output(out, plan).mark}))
    assert real.mark != module.Output(out, plan).mark
    with refused(DataError, "a.jsonl.partial", "a.jsonl.progress"):
        write_text(config, out, device="cpu")


# -- refusals and the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "over",
    [
        {"write.keep": "right"},
        {"write.start": "template"},
        {"write.start": "template", "write.max_prompts": 3, "write.raw": True},
        {"write.samples": 2, "write.temperature": 0.0},
        {"write.checker": "none_such"},
        {"write.top_p": 0.0},
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(over: dict[str, Any]) -> None:
    with refused(ConfigError):
        load_config(overrides=over)


def test_what_cannot_be_written_is_refused(world: Path, questions: Path, tmp_path: Path) -> None:
    with refused(ConfigError, "write.start"):
        written(world / "teacher", None, tmp_path / "a.jsonl", start="template", max_prompts=2)
    with refused(ConfigError, "--out"):
        written(world / "teacher", questions, tmp_path / "a.txt")
    without = tmp_path / "without.jsonl"
    without.write_text('{"prompt": "the still"}\n')
    with refused(DataError, "write.checker", "exact"):
        written(world / "teacher", without, tmp_path / "a.jsonl", checker="exact")
    with refused(DataError):
        written(world / "teacher", world / "train.jsonl", tmp_path / "a.jsonl")


def following(config: Path, file: Path, *student: str) -> list[str]:
    return ["stillroom", "distill", str(config), *student, "--data", str(file)]


def test_the_command_that_is_offered_names_what_a_run_needs(
    world: Path, questions: Path, tmp_path: Path, capsys: Any
) -> None:
    config, file = tmp_path / "whole.toml", tmp_path / "a.jsonl"
    models = "".join(f'[{role}]\nmodel = "{world / role}"\n' for role in ("teacher", "student"))
    config.write_text(f'{models}[write]\nprompts = "{questions}"\nmax_new_tokens = 4\n[train]\nmax_steps = 2\n')
    _code, out, _err = run_command(capsys, "write", str(config), "--out", str(file), "--device", "cpu")
    offered = out.splitlines()[-1].split()[3:]
    assert offered == following(config, file)
    code, _out, err = run_command(capsys, *offered[1:], "--out", str(tmp_path / "run"), "--device", "cpu")
    assert code != 2, err


def test_the_command_tells_the_cost_and_ends_with_0(world: Path, questions: Path, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "write.toml"
    model = f'[teacher]\nmodel = "{world / "teacher"}"\n'
    config.write_text(f'{model}[write]\nprompts = "{questions}"\nmax_new_tokens = 4\n')
    code, out, _err = run_command(capsys, "write", str(config), "--out", str(tmp_path / "a.jsonl"), "--device", "cpu")
    assert code == 0 and "tokens/s" in out and "100.0% of the answers" in out
    assert out.splitlines()[-1].split()[3:] == following(config, tmp_path / "a.jsonl", "--student", "STUDENT")
    code, out, _err = run_command(capsys, "write", str(config), "--out", str(tmp_path / "b.jsonl"), "--json")
    assert code == 0 and json.loads(out)["rows"] == 9
    code, _out, err = run_command(capsys, "write", str(config))
    assert code == 2 and "--out" in err
