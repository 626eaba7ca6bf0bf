"""A run says each finding once, also when it is resumed, and keeps a bounded record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stillroom.telemetry import EventLog, read_events
from stillroom.training.loop import Adviser, advice_of

START: dict[str, Any] = {
    "config": {},
    "schedule": {"optimizer_steps": 40, "warmup_steps": 2},
    "data": {"overlapping_records": 5, "eval_documents": 10},
}
STEP: dict[str, Any] = {"verdict": "keep", "train_loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "terms": {}}


def said(path: Path) -> list[tuple[str, int]]:
    return [(event["cause"], event["step"]) for event in read_events(path) if event["event"] == "advice"]


def evaluate(log: EventLog, step: int) -> None:
    log.write("step", step=step, **STEP)
    log.write("eval", step=step, perplexity=9.0, terms={})


def test_a_finding_is_said_at_the_first_evaluation_and_not_again(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        Adviser(log)
        log.write("run_start", **START)
        log.write("eval", step=0, perplexity=9.0, terms={})
        for step in range(1, 4):
            evaluate(log, step)
    assert said(tmp_path / "events.jsonl") == [("leaking_data", 1)]


def test_a_resumed_run_does_not_repeat_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        Adviser(log)
        log.write("run_start", **START)
        evaluate(log, 1)
    with EventLog(path) as log:
        Adviser(log)
        evaluate(log, 2)
    assert said(path) == [("leaking_data", 1)]


def test_advice_about_steps_that_a_resumed_run_takes_again_is_dropped_with_them(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        Adviser(log)
        log.write("run_start", **START)
        saved = log.position
        evaluate(log, 1)
    with EventLog(path, keep_records=saved, keep_until_step=0) as log:
        Adviser(log)
        evaluate(log, 1)
    assert said(path) == [("leaking_data", 1)]


def test_an_adviser_keeps_a_bounded_number_of_steps(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        adviser = Adviser(log)
        for step in range(1, 1200):
            log.write("step", step=step, **STEP)
        assert len(adviser._steps) == 1000 and adviser._others == []


def test_the_end_says_how_little_was_gained_where_nothing_graver_is_found() -> None:
    text = "the student hardly moved"
    assert [one["evidence"] for one in advice_of((), {}, [text])] == [text]
    grave = ({"event": "run_start", **START},)
    assert [one["cause"] for one in advice_of(grave, {}, [text])] == ["leaking_data"]
