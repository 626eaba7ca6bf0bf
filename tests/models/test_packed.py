"""Laws of packed rows: a text answers in a row with others as it answers alone, or the family is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import pytest
import tiny
import torch
from packed_texts import LENGTHS, batch_of, texts
from refusals import refused
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, Needs
from stillroom.models import try_model
from stillroom.models.student import NAME, block_mask, packing_error, positions_of, sequences_of, show_attention
from stillroom.training.models import check_packing

# The attention each of them uses here: ours without a mask, sdpa with masks of its own, and eager.
CAN = {"llama": NAME, "deepseek_v3": NAME, "opt": NAME, "gemma3_text": "sdpa", "llama4_text": "sdpa", "gptj": "eager"}
CANNOT = ["mamba", "bloom", "recurrent_gemma"]


def nll(student: Any, batch: Batch, needs: Needs = Needs()) -> torch.Tensor:  # noqa: B008 - frozen
    view = student.observe(batch, needs)
    logits = view.hidden if view.head.is_identity else view.hidden @ view.head.weight.T
    return F.cross_entropy(logits.double(), batch.scored_targets, reduction="sum")


@pytest.mark.parametrize("family", CAN)
@torch.no_grad()
def test_packed_texts_have_the_loss_of_each_alone(family: str) -> None:
    loaded = try_model(families.build(family), tiny.tokenizer(), name=family, role="student")
    assert loaded.network.config.get_text_config()._attn_implementation == CAN[family]
    student = loaded.as_student()
    packed = batch_of(texts())
    alone = sum(nll(student, replace(batch_of([[text]]), segments=None)) for row in texts() for text in row)
    assert packed.num_scored == sum(map(sum, LENGTHS))
    torch.testing.assert_close(nll(student, packed), alone, rtol=1e-5, atol=1e-5)
    joined = student.observe(replace(packed, segments=None), Needs()).hidden
    change = (joined - student.observe(packed, Needs()).hidden).abs().max() / joined.std()
    assert float(change) > 1e-2, "without borders the texts do change each other"
    assert max(packing_error(loaded.network)) < 1e-5


@torch.no_grad()
def test_open_attention_keeps_to_the_texts_too() -> None:
    loaded = try_model(families.build("llama"), tiny.tokenizer(), name="llama", role="student")
    show_attention(loaded.network)
    student, packed = loaded.as_student(), batch_of(texts())
    view = student.observe(packed, Needs(attention_layers=frozenset({0})))
    [maps] = [tap for name, tap in view.taps.items() if name.startswith("attention")]
    assert float((maps * ~block_mask(packed.segments)).abs().max()) == 0.0  # type: ignore[arg-type]
    alone = sum(nll(student, replace(batch_of([[text]]), segments=None)) for row in texts() for text in row)
    opened = nll(student, packed, Needs(attention_layers=frozenset({0})))
    torch.testing.assert_close(opened, alone, rtol=1e-5, atol=1e-5)


def test_gradients_of_packed_texts_are_those_of_each_alone_with_checkpointing_too() -> None:
    gradients = []
    for is_packed, is_checkpointed in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        loaded = try_model(families.build("llama"), tiny.tokenizer(), name="llama", role="student")
        if is_checkpointed:
            loaded.network.gradient_checkpointing_enable()
            loaded.network.train()
        student = loaded.as_student()
        batches = [batch_of(texts())]
        if not is_packed:
            batches = [replace(batch_of([[text]]), segments=None) for row in texts() for text in row]
        for batch in batches:
            nll(student, batch).backward()
        gradients.append({name: weight.grad for name, weight in loaded.network.named_parameters()})
    for name, expected in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CANNOT)
def test_a_family_whose_texts_leak_is_found(family: str) -> None:
    loaded = try_model(families.build(family), tiny.tokenizer(), name=family, role="student")
    assert packing_error(loaded.network)[0] > 1e-2


def test_positions_and_sequences_begin_anew_with_each_text() -> None:
    packed = batch_of(texts())
    assert packed.segments is not None
    assert positions_of(packed.segments)[0].tolist() == [*range(9), 0, *range(6)]
    index, count = sequences_of(packed)
    assert len(index.unique()) == 5 and int(index.max()) < count
    plain = replace(packed, segments=None)
    assert sequences_of(plain)[1] == 2 and len(sequences_of(plain)[0].unique()) == 2


def test_parts_and_keys_of_a_packed_batch_keep_the_borders() -> None:
    packed = batch_of(texts())
    assert [part.segments.tolist() for part in packed.parts(2)] == [[row] for row in packed.segments.tolist()]  # type: ignore[union-attr]
    assert packed.keys != replace(packed, segments=None).keys


@pytest.mark.parametrize("leak", [False, True])
def test_rounding_of_bf16_is_no_leak_and_a_leak_in_bf16_is_refused(leak: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty layers round by more than two do, so what is allowed is measured with the model that is asked."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 30, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=tiny.VOCAB, initializer_range=0.15, **sizes)
    network = LlamaForCausalLM(config).to(torch.bfloat16)
    loaded = try_model(network, tiny.tokenizer(), name="deep", role="teacher")

    def open_mask(segments: torch.Tensor) -> torch.Tensor:
        mask = block_mask(segments)
        mask[..., -1, 0] = True  # the last text sees a token of the first
        return mask

    if leak:
        monkeypatch.setattr("stillroom.models.student.block_mask", open_mask)
        with refused(ConfigError, "data.packing", "teacher"):
            check_packing("teacher", loaded)
    else:
        check_packing("teacher", loaded)
        error, rounding = packing_error(loaded.network)
        assert 0.05 < error <= 2 * rounding, "rounding of more than two layers have"
