"""Every causal family of transformers is either scored right or refused by name."""

from __future__ import annotations

import math
from typing import Any

import families
import pytest
import tiny
import torch
from torch.nn import functional as F

from stillroom.core.errors import BrokenAtStart
from stillroom.core.types import IGNORED, Batch
from stillroom.models import try_model
from stillroom.models.anatomy import layers_if_any
from stillroom.precision import resolve
from stillroom.training.evaluate import evaluate

# Plain, capped, scaled and biased heads; heads with a part of their own; mixtures; recurrences; masks of their own.
SAMPLE = [
    "llama", "recurrent_gemma", "gemma3_text", "cohere", "gptj", "modernbert-decoder", "llama4_text", "deepseek_v3",
    "mamba", "doge", "bloom", "hrm_text", "opt",
]  # fmt: skip
ENCODERS = ["bert", "xlm-roberta", "electra", "xlnet"]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, tiny.VOCAB, (4, 16), generator=generator)
    targets = ids.roll(-1, dims=1).clone()
    targets[:, -1] = IGNORED
    names = tuple("abcd")
    whole = Batch(ids, torch.ones_like(ids), targets, torch.ones_like(ids), names)
    return [whole]


@torch.no_grad()
def own_nll(model: Any, batch: Batch) -> float:
    """The loss by the model's own logits and torch's own cross-entropy."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits.double()
    return float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED))


def scored_or_refused(family: str) -> str:
    """`scored`, or the reason of a refusal; any other error, and any other loss than the model's own, fails."""
    model = families.build(family)
    [batch] = batches()
    expected = own_nll(model, batch)
    for role in ("teacher", "student"):
        try:
            found = try_model(model, tiny.tokenizer(), name=family, role=role)
        except BrokenAtStart as error:
            return str(error)
        measured = evaluate(found.as_student(), [batch], precision=resolve("fp32", torch.device("cpu")))
        assert math.isclose(measured.nll, expected, rel_tol=1e-4), f"{family} as {role}: {found.notes}"
    return "scored"


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_scored_by_its_own_logits(family: str) -> None:
    assert scored_or_refused(family) == "scored"


@pytest.mark.parametrize("family", ENCODERS)
def test_a_family_that_sees_its_targets_is_refused(family: str) -> None:
    told = scored_or_refused(family)
    assert f"{family} is not causal" in told and "try: " in told


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "electra"])
def test_an_encoder_that_was_made_to_decode_is_scored(family: str) -> None:
    model = families.build(family, is_decoder=True)
    found = try_model(model, tiny.tokenizer(), name=family, role="student")
    [batch] = batches()
    measured = evaluate(found.as_student(), [batch], precision=resolve("fp32", torch.device("cpu")))
    assert not found.is_described
    assert math.isclose(measured.nll, own_nll(model, batch), rel_tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.ALL)
def test_every_family_is_scored_right_or_refused_by_name(family: str) -> None:
    try:
        families.build(family)
    except Exception as error:  # noqa: BLE001, what cannot be built small is no business of ours
        pytest.skip(f"not built: {type(error).__name__}: {' '.join(str(error).split())[:80]}")
    told = scored_or_refused(family)
    assert told == "scored" or (family in told and "try: " in told)


def test_layers_of_a_model_that_sees_are_those_of_its_decoder() -> None:
    model = families.build("gemma3", vision_config={**families.SMALL_EYE, "num_hidden_layers": 2})
    assert {type(layer).__name__ for layer in layers_if_any(model)} == {"Gemma3DecoderLayer"}
