"""Laws that hold for every objective in a whole step: how the rows are dealt out does not matter, and evaluation
scores them as training does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import objective_runs
import pytest
import torch
from objective_runs import CASES, WITHIN_A_BATCH, Seen, make_run
from process_jobs import group

from stillroom.telemetry import EventLog
from stillroom.training.evaluate import evaluate
from stillroom.training.run import RunState
from stillroom.training.step import attempt

every_case = pytest.mark.parametrize("over", CASES.values(), ids=CASES.keys())


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "events.jsonl") as opened:
        yield opened


def assert_same(one: Seen, other: Seen) -> None:
    assert other.loss == pytest.approx(one.loss, rel=1e-6)
    assert other.norm == pytest.approx(one.norm, rel=1e-6)
    assert other.terms == pytest.approx(one.terms, rel=1e-6)
    # A sum of FP32 numbers in another order: held together by the size of the whole, not by that of each entry.
    assert float((one.gradient - other.gradient).norm() / one.gradient.norm()) < 1e-6


@every_case
def test_eight_micro_batches_of_one_equal_one_batch_of_eight(world: Path, log: EventLog, over: dict[str, Any]) -> None:
    one = make_run(world, log, {**over, "train.batch_size": 8})
    many = make_run(world, log, {**over, "train.batch_size": 1, "train.gradient_accumulation_steps": 8})
    lengths = {batch.num_scored for batch in many.loader.window(0)}
    assert len(lengths) > 1, "the rows must be ragged for the law to say anything"
    assert_same(Seen.of(one), Seen.of(many))


@pytest.mark.parametrize("over", [*CASES.values(), *WITHIN_A_BATCH.values()], ids=[*CASES, *WITHIN_A_BATCH])
def test_eval_equals_train_on_the_same_batch(world: Path, log: EventLog, over: dict[str, Any]) -> None:
    run = make_run(world, log, {**over, "train.gradient_accumulation_steps": 2})
    window = run.loader.window(0)
    evidence, loss_weights = attempt(run, RunState(), window)
    found = evaluate(
        run.student, window, precision=run.precision, teacher=run.teacher, mix=run.mix, loss_weights=loss_weights
    )
    assert found.objective == pytest.approx(evidence.loss, rel=1e-6)
    assert {name: term.raw for name, term in found.terms.items()} == pytest.approx(dict(evidence.terms), rel=1e-6)


def test_two_processes_equal_one_with_twice_the_accumulation(world: Path, log: EventLog, tmp_path: Path) -> None:
    out = tmp_path / "seen.pt"
    group(2, lambda: objective_runs.main(world, out))
    found = torch.load(out)
    for name, over in {**CASES, **WITHIN_A_BATCH}.items():
        alone = Seen.of(make_run(world, log, {**over, "train.gradient_accumulation_steps": 2}))
        assert_same(alone, Seen(**found[name]))
