"""The clamps of the older guides: reachable, counted, and never without a word about what they cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.core.types import DenseSignal, HeadWeights, StudentView
from stillroom.losses.head.loss import score_head
from stillroom.losses.mix import Clamps, perplexity_floor
from stillroom.telemetry import read_events
from stillroom.training.distill import distill


@pytest.mark.parametrize(
    ("clamp", "vocabulary", "floor"),
    [(2.5, 50_257, 339.6), (3.0, 50_257, 125.6), (5.0, 50_257, 3.28), (2.5, 151_936, 1024.7), (2.5, 1_024, 7.9)],
)
def test_the_floor_of_a_clamp_is_the_measured_one(clamp: float, vocabulary: int, floor: float) -> None:
    assert perplexity_floor(clamp, vocabulary) == pytest.approx(floor, rel=5e-3)


@given(st.floats(0.1, 20), st.integers(2, 10**6))
def test_no_logits_within_the_clamp_go_below_the_floor(clamp: float, vocabulary: int) -> None:
    best = math.log(math.exp(clamp) + (vocabulary - 1) * math.exp(-clamp)) - clamp
    assert math.log(perplexity_floor(clamp, vocabulary)) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_the_guide_s_own_pair_is_refused() -> None:
    with refused(ConfigError, "guard.logit_clamp, guard.loss_clamp"):
        Clamps(2.5, 5.0).check(50_257)
    assert len(Clamps(2.5, 6.0).check(1_024)) == 2
    assert Clamps().check(50_257) == []


def test_clamped_logits_have_no_gradient_and_are_counted() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(7, 4)
    targets = torch.tensor([0, 1, 2, 3, 4])
    scored = score_head(
        StudentView(hidden, HeadWeights(weight, clamp=1.0)),
        None,
        targets,
        kd_weight=0.0,
        ce_weight=1.0,
        divergence=None,
    )
    scored.loss.backward()
    twin = hidden.detach().clone().requires_grad_()
    logits = (twin @ weight.T).clamp(-1, 1)
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    assert torch.allclose(hidden.grad, twin.grad, atol=1e-6)
    share = ((hidden.detach() @ weight.T).abs() >= 1).float().mean()
    assert float(scored.counters["clamped_fraction_sum"]) / 5 == pytest.approx(float(share), abs=1e-6)


def test_an_identity_head_scores_like_the_head_it_stands_for() -> None:
    """A model whose head cannot be described answers with logits: same loss, same gradient."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4), torch.randn(11, 4)
    teacher, targets = DenseSignal(torch.randn(6, 3), HeadWeights(torch.randn(11, 3))), torch.arange(6)
    from stillroom.losses import divergences

    options = {"kd_weight": 0.5, "ce_weight": 0.5, "divergence": divergences.make("forward_kl"), "temperature": 2.0}
    one = hidden.clone().requires_grad_()
    described = score_head(StudentView(one, HeadWeights(weight)), teacher, targets, **options)
    described.loss.backward()
    two = hidden.clone().requires_grad_()
    logits = two @ weight.T
    plain_teacher = DenseSignal(teacher.hidden @ teacher.head.weight.T, HeadWeights(torch.empty(0), vocab_size=11))
    given_logits = score_head(
        StudentView(logits, HeadWeights(torch.empty(0), vocab_size=11)), plain_teacher, targets, **options
    )
    given_logits.loss.backward()
    assert torch.allclose(described.loss.detach(), given_logits.loss.detach(), rtol=1e-6)
    assert torch.allclose(one.grad, two.grad, atol=1e-6)


def test_a_run_with_clamps_says_and_counts_them(world: Path, tmp_path: Path) -> None:
    over = {"guard.logit_clamp": 0.5, "guard.loss_clamp": 6.0, "objectives.ce.weight": 1.0}
    distill(load_config(overrides={**tiny.settings(world), **over}), tmp_path / "run", device="cpu")
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert any("no perplexity below" in e["text"] for e in events if e["event"] == "note")
    steps = [e for e in events if e["event"] == "step"]
    assert all("clamped_fraction" in e and "clamped_losses" in e for e in steps)
