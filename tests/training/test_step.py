"""Laws of the one step, on a run built but not started."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stillroom.training.faults import Injector
from stillroom.training.recover import check_state, take_snapshot
from stillroom.training.run import RunState, weights_of
from stillroom.training.step import attempt, train_step


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-split"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_reads_from_the_device_once(make_run: Any, count_reads: Any, precision: str, accumulation: int) -> None:
    run = make_run(precision__mode=precision, train__gradient_accumulation_steps=accumulation)
    state = RunState()
    train_step(run, state, run.loader.window(0))
    reads = count_reads()
    outcome = train_step(run, state, run.loader.window(1))
    assert outcome.verdict.action == "keep"
    assert reads == ["tolist"]


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"])
@pytest.mark.parametrize("over", [{}, {"precision__moments": "int8", "train__optimizer": "muon"}])
def test_a_skipped_step_changes_neither_weights_nor_moments(
    make_run: Any, precision: str, over: dict[str, str]
) -> None:
    run = make_run(precision__mode=precision, guard__max_retries=0, **over)
    state = RunState()
    for index in range(3):
        train_step(run, state, run.loader.window(index))
    before = {
        name: tensor.clone() for name, tensor in {**weights_of(run.student.model), **run.optimizer.tensors()}.items()
    }
    run = replace(run, hooks=Injector("nan_grad@4"))
    outcome = train_step(run, state, run.loader.window(3))
    assert outcome.verdict.action == "skip"
    after = {**weights_of(run.student.model), **run.optimizer.tensors()}
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    assert state.applied == 3 and state.cursor == 4


@pytest.mark.parametrize("precision", ["fp32", "fp16-master", "fp16-split"])
def test_accumulated_gradients_equal_those_of_one_batch(make_run: Any, precision: str) -> None:
    """Eight micro-batches of one and one of eight give the same gradient, in FP16 to FP16's rounding."""
    one = make_run(precision__mode=precision, train__batch_size=8)
    many = make_run(precision__mode=precision, train__batch_size=1, train__gradient_accumulation_steps=8)
    attempt(one, RunState(), one.loader.window(0))
    attempt(many, RunState(), many.loader.window(0))
    tolerance = 1e-5 if precision == "fp32" else 2e-3
    for (name, a), (_same, b) in zip(one.optimizer.named_gradients(), many.optimizer.named_gradients(), strict=True):
        scale = float(a.float().abs().max())
        assert torch.allclose(a.float(), b.float(), atol=tolerance * scale, rtol=0), name


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("top_k", [0, 8])
def test_eight_micro_batches_of_one_equal_one_of_eight_on_ragged_rows(
    make_run: Any, divergence: str, top_k: int
) -> None:
    """To a millionth, in loss, terms and gradient, though every row has another number of targets."""
    over = {
        "data__packing": "rows",
        "objectives__kd__divergence": divergence,
        "objectives__kd__top_k": top_k,
        "objectives__kd__temperature": 2.0,
        "objectives__kd__weight": 0.7,
        "objectives__ce__weight": 0.3,
    }
    one = make_run(train__batch_size=8, **over)
    many = make_run(train__batch_size=1, train__gradient_accumulation_steps=8, **over)
    assert len({batch.num_scored for batch in many.loader.window(0)}) > 3
    whole, _ = attempt(one, RunState(), one.loader.window(0))
    parts, _ = attempt(many, RunState(), many.loader.window(0))
    assert parts.num_targets == whole.num_targets
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.terms == pytest.approx(dict(whole.terms), rel=1e-6)
    gradients = [[g.double().flatten() for _, g in run.optimizer.named_gradients()] for run in (one, many)]
    a, b = torch.cat(gradients[0]), torch.cat(gradients[1])
    assert float((a - b).norm() / a.norm()) < 1e-6


def test_half_gradients_are_summed_in_fp32(make_run: Any) -> None:
    run = make_run(precision__mode="fp16-split", train__gradient_accumulation_steps=2)
    attempt(run, RunState(), run.loader.window(0))
    assert all(gradient.dtype == torch.float32 for _name, gradient in run.optimizer.named_gradients())


def test_updates_that_do_not_arrive_are_seen(make_run: Any) -> None:
    run = make_run(telemetry__log_steps=1, train__learning_rate=1e-12)
    state = RunState()
    train_step(run, state, run.loader.window(0))
    outcome = train_step(run, state, run.loader.window(1))
    assert outcome.evidence.samples["noop_update_fraction"] > 0.9


def test_the_best_case_loses_no_update(make_run: Any) -> None:
    run = make_run(telemetry__log_steps=1, precision__mode="fp16-split", train__learning_rate=1e-3)
    state = RunState()
    train_step(run, state, run.loader.window(0))
    outcome = train_step(run, state, run.loader.window(1))
    assert outcome.evidence.samples["noop_update_fraction"] < 0.05


@pytest.mark.parametrize("trains_tokens", [True, False])
def test_the_canary_says_nothing_while_no_term_looks_at_tokens(make_run: Any, trains_tokens: bool) -> None:
    """A stretch on hidden states alone may make the student say anything; the next one begins from there."""
    later = {"start": 0.0, "end": 1.0, "begin": 0.5, "until": 1.0}
    weight = 1.0 if trains_tokens else later
    run = make_run(objectives__kd__weight=weight, objectives__ce__weight=0.0, objectives__feature__weight=1.0)
    state = RunState()
    take_snapshot(run, state)
    outcome = train_step(run, state, run.loader.window(0))
    state.canary_reference = state.canary_best = 0.1  # far below what an untrained student reaches
    seen = check_state(run, state, outcome.evidence)
    assert (seen is None) == trains_tokens
    if seen is not None:
        assert state.canary_reference == state.canary_best == seen.canary_loss > 1.0
