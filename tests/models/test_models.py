"""Laws of models as the engine sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom import builtin
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import IGNORED, Batch, Needs
from stillroom.models import (
    Student,
    agree_on_vocabulary,
    find,
    head_error,
    load_teacher,
    load_tokenizer,
    vocabulary_hash,
)
from stillroom.models.anatomy import anatomy_of, head_of, layers_of
from stillroom.models.generate import generate
from stillroom.models.student import attend_causally

FAMILIES = [
    "llama", "gpt2", "qwen3", "qwen3_moe", "mixtral", "olmoe", "gemma2", "granite", "phi", "opt", "gpt_neox",
]  # fmt: skip


def model_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(tiny.config(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from zero biases and unit gains, so that each part shows
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch_of(length: int, padding: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, tiny.VOCAB, (2, length + padding), generator=generator)
    targets = ids.roll(-1, dims=1).clone()
    targets[:, -1] = IGNORED
    if padding:
        ids[1, length:] = 1
        targets[1, length - 1 :] = IGNORED
    return Batch(ids, torch.ones_like(ids), targets, torch.zeros_like(ids), ("a", "b"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_described_head_gives_the_model_s_own_logits(family: str) -> None:
    assert head_error(model_of(family), torch.arange(12).unsqueeze(0)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_matter(family: str) -> None:
    """Whatever stands in the padding, scored positions answer the same: attention is causal."""
    student = Student(model_of(family), vocab_size=tiny.VOCAB, is_described=True)
    batch = batch_of(10, padding=4)
    other = replace(batch, input_ids=torch.where(batch.input_ids == 1, 7, batch.input_ids))
    with torch.no_grad():
        one = student.observe(batch, Needs()).hidden
        two = student.observe(other, Needs()).hidden
    assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_maskless_causal_attention_changes_nothing(family: str) -> None:
    model = model_of(family)
    ids = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        before = model(ids).logits
        switched = attend_causally(model)
        after = model(ids).logits
    assert switched == (family != "gemma2"), "sliding windows keep their masks"
    assert torch.allclose(before, after, atol=1e-5)


def test_taps_give_what_was_asked_for_and_nothing_else() -> None:
    student = Student(model_of("llama"), vocab_size=tiny.VOCAB, is_described=True)
    batch = batch_of(10, padding=0)
    with torch.no_grad():
        view = student.observe(batch, Needs(hidden_layers=frozenset({1})))
        plain = student.observe(batch, Needs())
        own = student.model.base_model(batch.input_ids, output_hidden_states=True).hidden_states
    assert set(view.taps) == {"hidden.1"} and not plain.taps
    assert view.taps["hidden.1"].shape == own[2].shape
    assert not any(
        "keep" in repr(hook) for module in layers_of(student.model) for hook in module._forward_hooks.values()
    )


def test_a_head_of_another_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    original = type(model).forward

    def odd(self: torch.nn.Module, *args: object, **options: object) -> object:
        output = original(self, *args, **options)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(type(model), "forward", odd)
    assert head_error(model, torch.arange(12).unsqueeze(0)) > 0.1


def test_padded_vocabularies_agree_on_the_smaller_head() -> None:
    words = tiny.tokenizer()
    assert agree_on_vocabulary(words, words, 384, 352) == 352
    with refused(ConfigError, "teacher.model, student.model", "319", "300"):
        agree_on_vocabulary(words, words, 384, 300)


def test_vocabularies_are_compared_by_content() -> None:
    one, same, other = tiny.tokenizer(), tiny.tokenizer(), tiny.tokenizer(300)
    assert vocabulary_hash(one) == vocabulary_hash(same) != vocabulary_hash(other)


def test_generation_is_greedy_at_zero_and_repeatable_above() -> None:
    model, words = model_of("llama"), tiny.tokenizer()
    before = torch.get_rng_state()
    assert generate(model, words, words("the still")["input_ids"], max_new_tokens=5) == generate(
        model, words, words("the still")["input_ids"], max_new_tokens=5
    )
    warm = [
        generate(model, words, words("the still")["input_ids"], max_new_tokens=5, temperature=1.0, seed=3)
        for _ in range(2)
    ]
    assert warm[0] == warm[1]
    assert torch.equal(before, torch.get_rng_state()), "looking does not move the run's random state"


def test_generation_from_a_broken_model_says_so() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))  # type: ignore[operator]
    assert "not finite" in generate(model, tiny.tokenizer(), [5], max_new_tokens=3)


@pytest.mark.parametrize("name", ["builtin:teachr", "builtin:"])
def test_an_unknown_builtin_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError):
        find(name)


def test_the_builtin_teachers_share_one_tokenizer() -> None:
    """So that either can teach the builtin student."""
    tokenizers = [load_tokenizer(TeacherConfig(), f"builtin:{name}") for name in ("teacher", "moe-teacher")]
    assert vocabulary_hash(tokenizers[0]) == vocabulary_hash(tokenizers[1])


def test_the_builtin_mixture_spreads_its_choices_in_every_layer() -> None:
    """On held-out text, each layer's choices are as many as more than four experts in even use would make.

    Not all eight: the family balances its experts over all layers together, and some are hardly used in some layers.
    """
    config = TeacherConfig(model="builtin:moe-teacher")
    model, words = load_teacher(config, torch.float32)[0], load_tokenizer(config, config.model)
    held_out = [found for found in builtin.modules() if builtin.split_of(found.group) == "eval"]
    texts = [words(found.text[:2000])["input_ids"][:128] for found in held_out if len(found.text) > 2000]
    with torch.no_grad():
        logits = model(torch.tensor(texts[:16]), output_router_logits=True).router_logits
    assert len(logits) == anatomy_of(model).num_layers
    for of_layer in logits:
        chosen = of_layer.topk(model.config.num_experts_per_tok, dim=-1).indices
        shares = torch.bincount(chosen.flatten(), minlength=of_layer.shape[-1]) / chosen.numel()
        assert torch.special.entr(shares).sum().exp() > 4


def test_a_path_that_is_no_folder_is_broken_at_start(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(BrokenAtStart):
        find(str(tmp_path / "model.bin"))


def test_tied_weights_are_counted_once() -> None:
    config = tiny.config("llama")
    config.tie_word_embeddings = True
    tied = anatomy_of(AutoModelForCausalLM.from_config(config))
    free = anatomy_of(AutoModelForCausalLM.from_config(tiny.config("llama")))
    assert tied.is_tied and not free.is_tied
    assert free.num_parameters - tied.num_parameters == tiny.VOCAB * 32
    assert head_of(AutoModelForCausalLM.from_config(config)).weight.shape[0] == tiny.VOCAB
