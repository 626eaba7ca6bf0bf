"""Laws of trackers: they get every number, and nothing they do stops a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.telemetry import trackers
from stillroom.telemetry.trackers import Tracking, numbers, open_tracking
from stillroom.training.distill import distill


class Kept:
    """A tracker that keeps what it is told, and fails when it is told to."""

    made: list[Kept] = []  # noqa: RUF012 - all that were made in a test
    fails: set[str] = set()  # noqa: RUF012

    def __init__(self, folder: Path = Path(), settings: dict[str, Any] | None = None) -> None:
        self._may_fail("start")
        self.folder, self.settings = folder, settings or {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.is_finished = False
        Kept.made.append(self)

    def log(self, values: dict[str, Any], step: int) -> None:
        self._may_fail("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self._may_fail("finish")
        self.is_finished = True

    def _may_fail(self, what: str) -> None:
        if what in Kept.fails:
            raise ConnectionError(f"no network for {what}")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    Kept.made.clear()
    monkeypatch.setattr(Kept, "fails", set())


def run(world: Path, out: Path, monkeypatch: Any, **over: Any) -> list[dict[str, Any]]:
    monkeypatch.setattr(trackers, "TensorBoard", Kept)
    settings = tiny.settings(world, train__max_steps=4, eval__samples=0, telemetry__tracker="tensorboard", **over)
    made = distill(load_config(overrides=settings), out, device="cpu")
    return [json.loads(line) for line in (made.folder / "events.jsonl").read_text().splitlines()]


def test_a_tracker_gets_every_step_and_evaluation(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    events = run(world, tmp_path / "run", monkeypatch)
    (tracker,) = Kept.made
    steps = [event for event in events if event["event"] == "step"]
    told = [(step, values) for step, values in tracker.logged if "train/train_loss" in values]
    assert [step for step, _values in told] == [event["step"] for event in steps]
    assert [values["train/train_loss"] for _step, values in told] == [event["train_loss"] for event in steps]
    assert all("train/terms/kd/raw" in values for _step, values in told)
    assert any("eval/perplexity" in values for _step, values in tracker.logged)
    assert tracker.is_finished and tracker.settings["train/max_steps"] == 4
    assert tracker.folder == tmp_path / "run" / "tracker" / "run"


@pytest.mark.parametrize("what", ["start", "log", "finish"])
def test_a_tracker_that_fails_stops_no_run_and_is_said_once(
    world: Path, tmp_path: Path, monkeypatch: Any, what: str
) -> None:
    monkeypatch.setattr(Kept, "fails", {what})
    events = run(world, tmp_path / "run", monkeypatch)
    notes = [event["text"] for event in events if event["event"] == "note" and "tensorboard failed" in event["text"]]
    assert sum(f"no network for {what}" in note for note in notes) == 1
    assert sum(event["event"] == "step" for event in events) == 4
    assert len(notes) == (2 if what == "log" else 1)  # the second: it is left alone


def test_a_tracker_that_is_not_installed_is_said(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes: list[str] = []
    config = load_config(overrides=tiny.settings(world, telemetry__tracker="wandb"))
    tracking = open_tracking(config, tmp_path, notes.append)
    assert tracking is not None and tracking.num_failed == 1 and len(notes) == 1
    tracking({"event": "step", "step": 1, "train_loss": 2.0})
    tracking({"event": "run_end"})
    assert len(notes) == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_of_projects_is_told_the_run_and_prints_nothing_into_our_output(
    world: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, name: str
) -> None:
    """A run is ended by the library's own function: trackio would end it again at exit otherwise."""
    given: dict[str, Any] = {}
    ended: list[str] = []

    def init(**options: Any) -> Kept:
        print("a line of its own")  # noqa: T201 - as trackio does
        given.update(options)
        return Kept()

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, finish=lambda: ended.append(name)))
    config = load_config(overrides=tiny.settings(world, telemetry__tracker=name))
    (tmp_path / "run").mkdir()
    notes: list[str] = []
    tracking = open_tracking(config, tmp_path / "run", notes.append)
    assert tracking is not None and not notes
    assert given["project"] == "stillroom" and given["name"] == "run" and "train/max_steps" in given["config"]
    assert given.get("dir") == (str(tmp_path / "run" / "tracker") if name == "wandb" else None)
    tracking({"event": "step", "step": 1, "loss": 1.0})
    tracking({"event": "run_end"})
    assert ended == [name] and Kept.made[0].logged == [(1, {"train/step": 1, "train/loss": 1.0})]
    printed = capsys.readouterr()
    assert printed.out == "" and "a line of its own" in printed.err


def test_without_one_nothing_is_made(world: Path, tmp_path: Path) -> None:
    assert open_tracking(load_config(overrides=tiny.settings(world)), tmp_path, lambda _text: None) is None


def test_failures_are_counted_and_one_is_forgiven() -> None:
    notes: list[str] = []
    kept, Kept.fails = Kept(), {"log"}
    tracking = Tracking("kept", lambda: kept, notes.append)
    tracking({"event": "step", "step": 1, "loss": 1.0})
    Kept.fails = set()
    tracking({"event": "step", "step": 2, "loss": 1.0})
    tracking({"event": "run_end"})
    assert tracking.num_failed == 1 and kept.logged == [(2, {"train/step": 2, "train/loss": 1.0})]
    assert len(notes) == 2 and kept.is_finished  # the failure, and the count at the end


def test_only_numbers_are_handed_on() -> None:
    record = {"a": 1, "b": None, "c": True, "d": "text", "e": {"f": 2.5, "g": [1]}}
    assert dict(numbers(record, "train")) == {"train/a": 1, "train/e/f": 2.5}
    assert dict(numbers(record, "", keeps_text=True)) == {"a": 1, "c": True, "d": "text", "e/f": 2.5}


def test_tensorboard_itself_reads_what_was_told(world: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = tiny.settings(world, train__max_steps=4, eval__samples=0, telemetry__tracker="tensorboard")
    made = distill(load_config(overrides=settings), tmp_path / "run", device="cpu")
    events = [json.loads(line) for line in (made.folder / "events.jsonl").read_text().splitlines()]
    assert not any("tensorboard" in str(event.get("text")) for event in events)
    files = EventAccumulator(str(made.folder / "tracker" / "run"))
    files.Reload()
    losses = [event["train_loss"] for event in events if event["event"] == "step"]
    assert [scalar.value for scalar in files.Scalars("train/train_loss")] == pytest.approx(losses)
