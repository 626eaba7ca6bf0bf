"""Laws of generated text: the tokens of transformers itself, whatever is cached, padded, drawn or streamed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import begun
import families
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from trl_templates import template

from stillroom.core.errors import ConfigError
from stillroom.data.chat import chat_ids, turn_end_ids
from stillroom.data.records import Turn
from stillroom.models import generate as module
from stillroom.models.generate import (
    Conversation,
    Piece,
    Sampling,
    TextStream,
    Writer,
    ability_of,
    continuation,
    draw,
    generate,
    generate_all,
    stream,
    until,
)
from stillroom.models.student import NAME, attend_causally

WINDOW = {"sliding_window": 4}
# name, what is set, whether prompts are padded in one batch
FAMILIES = [
    ("llama", {}, True),
    ("gpt2", {}, True),
    ("qwen2", {}, True),
    ("qwen3", {}, True),
    ("mixtral", {}, True),
    ("gemma2", WINDOW, True),
    ("gemma3_text", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, True),
    ("mamba", {}, True),
    ("recurrent_gemma", {}, False),
    ("rwkv", {}, False),
]
NEW = 12


class Plain:
    """A tokenizer whose tokens are numbers, so that what is written can be compared as tokens."""

    eos_token_id, bos_token_id, all_special_ids = None, None, ()

    def __len__(self) -> int:
        return tiny.VOCAB

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{number} " for number in ids)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 300, (length,), generator=generator).tolist() for length in lengths]


def theirs(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """What transformers writes, by itself and greedily."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def ours(model: Any, asked: list[list[int]], **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, **options}
    return [[int(word) for word in text.split()] for text in generate_all(model, Plain(), asked, **options)]


@pytest.mark.parametrize(("family", "settings", "pads"), FAMILIES, ids=[name for name, *_ in FAMILIES])
def test_greedy_tokens_are_those_of_transformers(family: str, settings: dict[str, Any], pads: bool) -> None:
    model = families.build(family, **settings)
    model.generation_config.eos_token_id = None
    asked = prompts(6, 2, 9)
    wanted = [theirs(model, prompt) for prompt in asked]
    attend_causally(model)  # as every loaded model does where it can
    notes: list[str] = []
    assert ours(model, asked, note=notes.append) == wanted
    assert [ours(model, [prompt])[0] for prompt in asked] == wanted
    assert ability_of(model).caches and ability_of(model).pads == pads
    assert len(notes) == (not pads)


def test_a_batch_gives_what_transformers_gives_for_the_batch() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    asked = prompts(5, 8)
    padded = torch.tensor([[1] * 3 + asked[0], asked[1]])
    mask = torch.tensor([[0] * 3 + [1] * 5, [1] * 8])
    wanted = model.generate(padded, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=1)
    assert ours(model, asked) == wanted[:, 8:].tolist()


def test_a_model_without_a_usable_cache_is_computed_again_and_says_so() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    asked = prompts(6, 3)
    wanted = [theirs(model, prompt) for prompt in asked]
    forward = model.forward

    def forgetful(*args: Any, **options: Any) -> Any:
        options.pop("past_key_values", None)
        return forward(*args, **options)

    model.forward = forgetful  # what was cached is lost: each token is answered as if it were the first
    notes: list[str] = []
    assert ours(model, asked, note=notes.append) == wanted
    assert ability_of(model).caches is False
    assert len(notes) == 1


def test_the_trial_leaves_the_random_state_and_the_weights_alone() -> None:
    model = families.build("llama").train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    ours(model, prompts(3), temperature=1.0)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_positions_of_a_model_are_never_exceeded(family: str) -> None:
    """A long row ends where the positions are full; the shorter one beside it goes on to its own end."""
    model = AutoModelForCausalLM.from_config(families.config(family, max_position_embeddings=16)).eval()
    model.generation_config.eos_token_id = None
    asked = prompts(10, 4)
    pieces = list(stream(model, Plain(), asked, max_new_tokens=40))
    assert [sum(1 for piece in pieces if piece.row == row and piece.text) for row in (0, 1)] == [6, 12]
    ends = [piece.ended for piece in pieces if piece.ended]
    assert ends == ["the model's 16 positions are full"] * 2
    assert generate(model, Plain(), prompts(16)[0]) == " [stopped: the model's 16 positions are full]"


def test_each_row_ends_at_its_own_stop_token() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    asked = prompts(6, 3)
    free = ours(model, asked)
    stop = free[0][4]
    wanted = [row[: row.index(stop)] if stop in row else row for row in free]
    assert wanted[0] != free[0]
    assert ours(model, asked, stops={stop}) == wanted


def test_a_published_repetition_penalty_is_applied_and_other_settings_are_named() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    asked = prompts(6)
    plain = theirs(model, asked[0])
    model.generation_config.repetition_penalty = 1.8
    wanted = theirs(model, asked[0])
    assert wanted != plain and ours(model, asked) == [wanted]
    notes: list[str] = []
    model.generation_config.no_repeat_ngram_size = 2
    ours(model, asked, note=notes.append)
    assert len(notes) == 1 and "no_repeat_ngram_size" in notes[0]


def test_a_penalty_does_not_see_the_padding() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    model.generation_config.repetition_penalty = 1.8
    asked = prompts(3, 11, 7)
    assert ours(model, asked) == [ours(model, [prompt])[0] for prompt in asked]


def test_settings_that_come_with_a_model_do_not_choose_how_it_is_run() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    wanted = ours(model, prompts(6))
    strange = GenerationConfig(
        num_beams=3, do_sample=True, temperature=0.1, stop_strings=["a"], prompt_lookup_num_tokens=2
    )
    model.generation_config = strange
    assert ours(model, prompts(6)) == wanted and model.generation_config is strange


def test_padding_is_seen_by_no_row_and_the_attention_is_as_it_was() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    attend_causally(model)
    asked = prompts(3, 11)
    assert ours(model, asked) == [ours(model, [prompt])[0] for prompt in asked]
    assert model.config._attn_implementation == NAME


def test_a_class_without_generation_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        generate(torch.nn.Linear(2, 2), Plain(), [1])
    assert refused.value.advice


def test_a_chat_is_answered_as_transformers_answers_it() -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3"))
    turn = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    model = families.build("llama")
    model.generation_config.eos_token_id = [2, turn]
    turns = [{"role": "user", "content": "the still room"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    wanted = tokenizer.decode(theirs(model, ids), skip_special_tokens=True)
    assert generate(model, tokenizer, ids, max_new_tokens=NEW) == wanted and wanted


def test_a_row_with_broken_logits_ends_and_the_other_goes_on() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    asked = prompts(4, 4)
    wanted = ours(model, asked)[1]
    head, calls = model.lm_head, []

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            output[0] = float("nan")
        return output

    ability_of(model)
    handle = head.register_forward_hook(spoil)
    texts = generate_all(model, Plain(), asked, max_new_tokens=NEW)
    handle.remove()
    assert "logits are not finite" in texts[0] and [int(word) for word in texts[1].split()] == wanted


# -- choosing a token ------------------------------------------------------------------------------------


def draws(scores: torch.Tensor, sampling: Sampling, count: int = 50) -> list[list[int]]:
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in scores]
    return [draw(scores, sampling, generators).squeeze(1).tolist() for _ in range(count)]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7), Sampling(1.3, top_p=0.8)])
def test_tokens_are_drawn_from_the_distribution_of_transformers(sampling: Sampling) -> None:
    """Chi-square of 4,000 draws over a vocabulary of 8, against temperature and nucleus as written out here."""
    scores = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    probs, ids = torch.softmax(scores[0].double() / sampling.temperature, -1).sort(descending=True)
    kept = probs.cumsum(0) - probs < sampling.top_p
    expected = 4_000 * probs[kept] / probs[kept].sum()
    drawn = torch.tensor(draws(scores, sampling, 4_000)).flatten()
    seen = torch.bincount(drawn, minlength=8)[ids].double()
    assert seen[~kept].sum() == 0
    assert ((seen[kept] - expected) ** 2 / expected).sum() < 26.1  # 99.95 % of chi-square with 8 degrees


def test_a_seed_repeats_and_another_seed_differs() -> None:
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    assert draws(scores, Sampling(1.0, seed=3)) == draws(scores, Sampling(1.0, seed=3))
    assert draws(scores, Sampling(1.0, seed=3)) != draws(scores, Sampling(1.0, seed=4))


def test_a_row_gets_what_it_gets_alone() -> None:
    model = families.build("llama")
    model.generation_config.eos_token_id = None
    options = {"temperature": 1.2, "top_p": 0.9, "seed": 3}
    asked = prompts(6, 2, 9)
    together = ours(model, asked, **options)
    assert together == [ours(model, [prompt], **options)[0] for prompt in asked]
    assert together != ours(model, asked)


def test_a_tiny_temperature_takes_the_most_probable_token() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert set(map(tuple, draws(scores, Sampling(1e-40)))) == {(1,)}
    assert {chosen for (chosen,) in draws(scores, Sampling(1.0, top_p=0.01))} == {1}


def test_large_half_precision_logits_are_drawn_in_fp32() -> None:
    scores = torch.full((1, 5), -6e4, dtype=torch.float16)
    scores[0, 2] = 6e4
    assert {chosen for (chosen,) in draws(scores, Sampling(0.5))} == {2}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(**wrong)
    assert refused.value.advice and refused.value.where


# -- text in pieces --------------------------------------------------------------------------------------

TOKENIZERS = {"byte": begun.byte_tokenizer, "llama": begun.llama_tokenizer}
TEXT = "the still room \u00e9t\u00e9 \u20ac \U0001f600 keeps  spirits, and waters"


def pieces(tokenizer: Any, before: list[int], after: list[int]) -> list[str]:
    text = TextStream(tokenizer, before)
    return [*(text.add(token) for token in after), text.rest()]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_joined_are_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer(TEXT)["input_ids"]
    for place in range(1, len(ids)):
        assert "".join(pieces(tokenizer, ids[:place], ids[place:])) == continuation(tokenizer, ids[:place], ids[place:])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_pieces_of_any_tokens_joined_are_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    rng = random.Random(0)
    for _ in range(40):
        ids = [rng.randrange(len(tokenizer)) for _ in range(40)]
        place = rng.randrange(1, 30)
        assert "".join(pieces(tokenizer, ids[:place], ids[place:])) == continuation(tokenizer, ids[:place], ids[place:])


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    tokenizer = begun.byte_tokenizer()
    ids = tokenizer("a\u20acb", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    assert pieces(tokenizer, ids[:1], ids[1:]) == ["", "", "\u20ac", "b", ""]
    assert pieces(tokenizer, ids[:1], ids[1:3]) == ["", "", "\ufffd"]


def test_the_first_piece_after_special_tokens_keeps_its_space() -> None:
    tokenizer = begun.llama_tokenizer()
    ids = tokenizer("the still room")["input_ids"]
    prompt = [*ids[:2], *[2] * 20]  # a template may end in many special tokens
    assert "".join(pieces(tokenizer, prompt, ids[2:])) == continuation(tokenizer, prompt, ids[2:]) == " still room"


def test_what_is_streamed_is_what_is_generated() -> None:
    tokenizer, model = begun.byte_tokenizer(), families.build("llama")
    options = {"max_new_tokens": 30, "temperature": 1.5, "seed": 5}
    texts = [tokenizer(text)["input_ids"] for text in ("the still", "how slowly it must drip", "")]
    streamed = [""] * 3
    for piece in stream(model, tokenizer, texts, **options):
        streamed[piece.row] += piece.text
        assert piece.ended or not piece.text.endswith("\ufffd")
    assert streamed == [generate(model, tokenizer, text, **options) for text in texts]
    assert len(set(streamed)) == 3


def test_a_stream_that_is_left_stops_writing() -> None:
    tokenizer, model = begun.byte_tokenizer(), families.build("llama").train()
    pieces = stream(model, tokenizer, [[90]], max_new_tokens=100)
    next(pieces)
    pieces.close()
    assert model.training and not [thread for thread in threading.enumerate() if thread.name == "generate"]


def test_an_error_of_the_model_reaches_who_reads_the_stream() -> None:
    model = families.build("llama")
    ability_of(model)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the card is gone")

    model.forward = fail
    with pytest.raises(RuntimeError):
        list(stream(model, begun.byte_tokenizer(), [[90]]))


# -- conversations ---------------------------------------------------------------------------------------


@pytest.fixture
def chatty() -> Writer:
    return Writer(families.build("llama"), begun.byte_tokenizer(chat_template=template("llama3")))


def test_the_history_is_what_the_template_prints(chatty: Writer) -> None:
    talked = Conversation(chatty, system="be brief")
    asked: list[list[int]] = []
    write = chatty.stream
    object.__setattr__(chatty, "stream", lambda ids, **options: asked.extend(ids) or write(ids, **options))
    first = "".join(talked.ask("the still", max_new_tokens=6))
    "".join(talked.ask("and the room", max_new_tokens=6))
    turns = [("system", "be brief"), ("user", "the still"), ("assistant", first.strip()), ("user", "and the room")]
    messages = [{"role": role, "content": content} for role, content in turns]
    wanted = chatty.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked[1] == wanted
    talked.reset()
    "".join(talked.ask("and the room", max_new_tokens=6))
    assert asked[2] == chatty.tokenizer.apply_chat_template(
        [messages[0], messages[-1]], add_generation_prompt=True, return_dict=True
    )["input_ids"]  # fmt: skip


def test_the_same_seed_is_the_same_conversation(chatty: Writer) -> None:
    def told(seed: int) -> list[str]:
        talked = Conversation(chatty)
        options = {"max_new_tokens": 12, "temperature": 1.5, "seed": seed}
        return ["".join(talked.ask(question, **options)) for question in ("the", "the", "room")]

    assert told(3) == told(3) != told(4)


def test_an_answer_that_is_left_is_kept_as_far_as_it_was_read(chatty: Writer) -> None:
    talked = Conversation(chatty)
    pieces = talked.ask("the still", max_new_tokens=20)
    read = next(piece for piece in pieces if piece.strip())
    pieces.close()  # as Ctrl-C would
    assert [turn.role for turn in talked.turns] == ["user", "assistant"]
    assert talked.turns[1].content == read.strip() and not chatty.network.training


@pytest.mark.parametrize(("name", "mark"), [("llama3", "<|eot_id|>"), ("none", None)])
def test_the_end_of_a_turn_is_found_in_the_template(name: str, mark: str | None) -> None:
    tokenizer = begun.byte_tokenizer(chat_template=template("llama3") if name == "llama3" else None)
    assert turn_end_ids(tokenizer) == ({tokenizer.convert_tokens_to_ids(mark)} if mark else set())
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert turn_end_ids(tokenizer) == set()  # a line break is no special token
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert turn_end_ids(tokenizer) == set()


def test_without_a_template_turns_are_lines_and_the_model_does_not_ask_itself(monkeypatch: Any) -> None:
    tokenizer = begun.byte_tokenizer()
    writer = Writer(families.build("llama"), tokenizer)
    ids = chat_ids(tokenizer, [Turn("user", "the"), Turn("assistant", "room"), Turn("user", "still")])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user: the\nassistant: room\nuser: still\nassistant:"

    def write(*_: Any, **__: Any) -> Iterator[Piece]:
        for text in (" well\nus", "e it\nuse", "r: and", " more"):
            yield Piece(0, text)

    monkeypatch.setattr(module, "stream", write)
    talked = Conversation(writer)
    assert "".join(talked.ask("the")) == "well\nuse it" and talked.ended == "end of text"


@pytest.mark.parametrize("pieces", [["abc", "def"], ["a", "b", "c", "d"], ["abc<", "stop"], [], ["a<st", "o"]])
def test_text_without_the_mark_is_given_whole(pieces: list[str]) -> None:
    assert "".join(text for text, _is_over in until(iter(pieces), "<stop>")) == "".join(pieces)


def test_text_ends_at_a_mark_in_any_pieces() -> None:
    whole = "ab<<stop>cd"
    for first in range(len(whole)):
        for second in range(first, len(whole)):
            pieces = [whole[:first], whole[first:second], whole[second:]]
            assert "".join(text for text, _is_over in until(iter(pieces), "<stop>")) == "ab<"


def test_a_template_that_refuses_the_conversation_is_explained() -> None:
    tokenizer = begun.byte_tokenizer(chat_template="{{ raise_exception('no system here') }}")
    with pytest.raises(ConfigError) as refused:
        chat_ids(tokenizer, [Turn("user", "a")])
    assert "no system here" in refused.value.what and refused.value.advice
