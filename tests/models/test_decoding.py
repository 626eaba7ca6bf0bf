"""Laws of writing token by token: the tokens of transformers itself, whatever is cached and padded."""

from __future__ import annotations

from typing import Any

import begun
import families
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM
from trl_templates import template

from stillroom.models.attention import attend_causally
from stillroom.models.decoding import Ability, ability_of, state_of
from stillroom.models.generate import generate, generate_all, stream

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
    ("mamba", {}, False),
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
    assert len(notes) == (not pads) and all("one after the other" in note for note in notes)


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
    assert len(notes) == 1 and "computes the whole text again for each token" in notes[0]


def test_a_model_that_returns_no_cache_is_known() -> None:
    answer = type("Answer", (), {"logits": None, "past_key_values": None})()
    assert state_of(answer) == {}
    assert ability_of(families.build("recurrent_gemma")) == Ability(
        False, False, "RecurrentGemmaForCausalLM computes the whole text again for each token: it returns no cache"
    )


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
    assert notes == ["generation settings of the model that are not used: no_repeat_ngram_size"]


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
