"""The law that the student-aware guide lacked: a batch costs in evaluation what it costs in training.

The guide saw 15.5 in training and 95.9 in evaluation because curriculum weights and the subset of tokens were applied
in one and not in the other. Here both are one `score`, and these tests hold them together in every phase, with every
sparse mode, whatever the accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from stillroom.config import load_config
from stillroom.core.types import LossWeights
from stillroom.losses.head import products
from stillroom.losses.head.products import WideMultiplier
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.evaluate import Evaluation, evaluate
from stillroom.training.models import load_models
from stillroom.training.run import Run, RunState
from stillroom.training.step import attempt

NUM_STEPS = 100
CURRICULUM: dict[str, Any] = {
    "objectives__kd__weight": {"start": 0.7, "end": 0.2, "begin": 0.3, "until": 0.8},
    "objectives__kd__temperature": {"start": 4.0, "end": 1.0},
    "objectives__ce__weight": {"start": 0.0, "end": 0.8, "begin": 0.3, "until": 0.6, "shape": "cosine"},
    "curriculum__phases": [
        {"name": "logits", "until": 0.3},
        {"name": "both", "until": 0.6},
        {"name": "labels", "until": 1.0},
    ],
    "train__max_steps": NUM_STEPS,
    "data__packing": "rows",  # rows of all lengths, so that the counts of micro-batches differ
}
PLACES = {"logits": 10, "border": 30, "both": 45, "labels": 75, "end": NUM_STEPS}


@pytest.fixture
def make(world: Path, tmp_path: Path) -> Iterator[Any]:
    logs = []

    def build(**over: Any) -> Run:
        config = load_config(overrides=tiny.settings(world, **{**CURRICULUM, **over}))
        device = find_device("cpu")
        logs.append(EventLog(tmp_path / f"{len(logs)}.jsonl"))
        run = build_run(config, tmp_path, logs[-1], device=device, models=load_models(config, device))
        run.student.train()
        return run

    yield build
    for log in logs:
        log.close()


def evaluated(run: Run, loss_weights: LossWeights, window: Any) -> Evaluation:
    return evaluate(
        run.student, window, precision=run.precision, teacher=run.teacher, mix=run.mix, loss_weights=loss_weights
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("top_k", [0, 8, tiny.VOCAB])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_eval_equals_train_on_the_same_batch_in_every_phase(
    make: Any, place: str, top_k: int, accumulation: int
) -> None:
    run = make(objectives__kd__top_k=top_k, train__gradient_accumulation_steps=accumulation)
    window = run.loader.window(0)
    evidence, loss_weights = attempt(run, RunState(applied=PLACES[place]), window)
    found = evaluated(run, loss_weights, window)
    assert found.objective == pytest.approx(evidence.loss, rel=1e-6)
    assert set(found.terms) == set(evidence.terms)
    for name, value in evidence.terms.items():
        assert found.terms[name].raw == pytest.approx(value, rel=1e-6), name
        assert found.terms[name].weight == loss_weights.weights[name]
    assert sum(term.scaled for term in found.terms.values()) == pytest.approx(evidence.loss, rel=1e-6)
    # Evaluation may cut the same rows into other batches.
    assert evaluated(run, loss_weights, run.loader.window(0)[::-1]).objective == pytest.approx(evidence.loss, rel=1e-6)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-master"])
def test_eval_equals_train_for_every_divergence_and_precision(make: Any, divergence: str, precision: str) -> None:
    run = make(objectives__kd__divergence=divergence, precision__mode=precision, train__gradient_accumulation_steps=2)
    window = run.loader.window(1)
    evidence, loss_weights = attempt(run, RunState(applied=45), window)
    assert evaluated(run, loss_weights, window).objective == pytest.approx(evidence.loss, rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "fp16-split"])
def test_eval_equals_train_where_the_head_multiplies_half_operands(
    make: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card: half operands, FP32 results, in both or in neither."""
    asked: list[torch.dtype] = []
    real = products._multiply

    def recorded(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        asked.append(left.dtype)
        real(left, right, out)

    monkeypatch.setattr(products, "multiplies_half", lambda device: True)
    monkeypatch.setattr(products, "_multiply", recorded)
    run = make(precision__mode=precision, train__gradient_accumulation_steps=2)
    window = run.loader.window(1)
    evidence, loss_weights = attempt(run, RunState(applied=45), window)
    assert set(asked) == {torch.bfloat16 if precision == "bf16-mixed" else torch.float16}
    assert evaluated(run, loss_weights, window).objective == pytest.approx(evidence.loss, rel=1e-6)


@pytest.mark.parametrize("clamp", [{"guard__loss_clamp": 3.0}, {"guard__logit_clamp": 1.0}])
def test_eval_equals_train_under_the_guides_clamps(make: Any, clamp: dict[str, float]) -> None:
    run = make(**clamp, train__gradient_accumulation_steps=4)
    window = run.loader.window(0)
    evidence, loss_weights = attempt(run, RunState(applied=10), window)
    assert evaluated(run, loss_weights, window).objective == pytest.approx(evidence.loss, rel=1e-6)


def test_the_law_would_notice_an_evaluation_without_the_curriculum(make: Any) -> None:
    """What the guide did: all tokens and full weights in evaluation, the phase's own in training."""
    run = make(objectives__kd__top_k=8)
    window = run.loader.window(0)
    evidence, loss_weights = attempt(run, RunState(applied=10), window)
    without = LossWeights(
        loss_weights.phase, {"kd": 1.0, "ce": 1.0}, {**loss_weights.settings, "kd.temperature": 1.0, "kd.top_k": 0.0}
    )
    wrong = evaluated(run, without, window).objective
    assert wrong is not None and abs(wrong / evidence.loss - 1.0) > 1.0


def test_yardsticks_do_not_move_with_the_lesson(make: Any) -> None:
    run = make(objectives__kd__top_k=8)
    window = run.loader.window(0)
    early, late = (evaluated(run, run.loss_weights(RunState(applied=applied)), window) for applied in (10, 75))
    assert early.objective != late.objective
    assert early.ledger.values() == late.ledger.values()


def test_a_half_head_is_cast_once_for_all_chunks_of_a_batch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(precision__mode="fp16-master")
    window = run.loader.window(0)[:1]
    before = evaluate(run.student, window, precision=run.precision, teacher=run.teacher)
    casts: list[tuple[int, ...]] = []
    cast = WideMultiplier.operand

    def count(self: WideMultiplier, tensor: torch.Tensor) -> torch.Tensor:
        casts.append(tuple(tensor.shape))
        return cast(self, tensor)

    monkeypatch.setattr(WideMultiplier, "operand", count)
    monkeypatch.setattr("stillroom.training.evaluate._CHUNK", 3)
    found = evaluate(run.student, window, precision=run.precision, teacher=run.teacher)
    assert found.nll == pytest.approx(before.nll, rel=1e-6)
    assert found.kl == pytest.approx(before.kl, rel=1e-5)
    assert len([shape for shape in casts if shape[0] == tiny.VOCAB]) == 2, "the student's head and the teacher's"
