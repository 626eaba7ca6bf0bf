"""Laws of what a report keeps of a log: little, and nothing that matters is lost."""

from __future__ import annotations

import numpy as np
import pytest

from stillroom.report.figures import all_figures
from stillroom.report.history import MAX_GUARD_ROWS, MAX_OTHERS, MAX_SAMPLES, MAX_SERIES, History, RunRecord, Steps


def step(number: int, **fields: object) -> dict[str, object]:
    return {"event": "step", "step": number, "verdict": "keep", **fields}


def test_steps_undone_by_a_rollback_do_not_count() -> None:
    history = History.of(step(number, train_loss=float(number)) for number in (1, 2, 3, 4, 2, 3))
    xs, ys = history.steps.curve("train_loss")
    assert xs.tolist() == [1, 2, 3] and ys.tolist() == [1.0, 2.0, 3.0]
    assert len(history.steps) == 3 and history.steps.last == 3


def test_values_that_some_steps_lack_keep_their_steps() -> None:
    history = History.of(
        [step(1, lr=0.1), step(2), step(3, lr=0.3), step(4, lr=None), step(5, lr="x"), step(6, lr=1e999)]
    )
    xs, ys = history.steps.curve("lr")
    assert xs.tolist() == [1, 3] and ys.tolist() == [0.1, 0.3]


def test_phases_are_stretches_of_steps() -> None:
    phases = ["a", "a", "b", "b", "a"]
    history = History.of(step(number + 1, phase=name) for number, name in enumerate(phases))
    assert history.steps.phases() == [("a", 1.0, 2.0), ("b", 3.0, 4.0), ("a", 5.0, 5.0)]


def test_every_refused_attempt_is_kept_and_few_guard_records() -> None:
    events: list[dict[str, object]] = []
    for number in range(10_000):
        events.append({"event": "step", "step": number, "verdict": "skip", "grad_norm": None})
        events.append({"event": "guard", "step": number, "action": "skip", "evidence": {"grad_norm": 2.0}})
    history = History.of(events)
    assert len(history.refused) == 10_000 and np.isnan(history.refused.norms).all()
    assert len(history.guards) == MAX_GUARD_ROWS and history.num_guards == 10_000
    assert [event["step"] for event in history.guards[:2]] == [0, 1] and history.guards[-1]["step"] == 9_999


def test_names_without_end_are_bounded_and_counted() -> None:
    steps = Steps()
    for number in range(MAX_SERIES):
        steps.add({"step": number, "terms": {f"term{number}": {"raw": 1.0, "scaled": 1.0, "share": 1.0}}})
    assert len(steps.terms()) * 3 <= MAX_SERIES + 3
    assert steps.num_left_out > 0


@pytest.mark.parametrize("number", [10**30, -(10**30)])
def test_a_step_that_no_machine_counts_is_left_out(number: int) -> None:
    kinds = ("eval", "guard", "gradients", "router")
    others = [{"event": kind, "step": number, "perplexity": 2.0, "terms": {}} for kind in kinds]
    history = History.of([step(1, lr=0.1), step(number, lr=0.2), *others])
    assert history.steps.curve("lr")[1].tolist() == [0.1] and history.steps.num_left_out == 1 + len(others)
    assert all_figures(RunRecord("run", history=history))


def test_records_of_one_kind_without_end_are_bounded_and_counted() -> None:
    history = History.of({"event": "gradients", "step": number} for number in range(MAX_OTHERS + 7))
    assert len(history.of_kind("gradients")) == MAX_OTHERS and history.num_others_left_out == 7
    assert History.of({"event": f"kind{number}"} for number in range(100)).of_kind("kind0") == []


def test_the_last_samples_are_kept_once_each_and_the_others_counted() -> None:
    prompts = [f"prompt {number}" for number in range(MAX_SAMPLES + 3)]
    history = History.of({"event": "sample", "prompt": prompt} for prompt in [*prompts, prompts[-1]])
    assert [event["prompt"] for event in history.samples] == prompts[3:]
    assert history.num_samples_left_out == 3


def test_a_run_that_went_on_after_its_end_has_no_end() -> None:
    end = {"event": "run_end", "status": "stopped"}
    assert History.of([step(1), end]).end == end
    assert History.of([step(1), end, {"event": "resume", "step": 1}]).end == {}
