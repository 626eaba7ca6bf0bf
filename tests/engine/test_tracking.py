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
from stillroom.engine.distill import distill
from stillroom.engine.tracking import Tracking, numbers, open_tracking


class Kept:
    """A tracker that keeps what it is told, and fails when it is told to."""

    requires_logging_directory = True
    main_process_only = True
    made: list[Kept] = []  # noqa: RUF012 - all that were made in a test

    def __init__(self, name: str = "", logging_dir: str = "", fails: set[str] | None = None) -> None:
        self.name, self.folder, self.fails = name, logging_dir, fails or set()
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.settings: dict[str, Any] = {}
        self.is_finished = False
        Kept.made.append(self)

    def start(self) -> None:
        self._may_fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int) -> None:
        self._may_fail("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self._may_fail("finish")
        self.is_finished = True

    def _may_fail(self, what: str) -> None:
        if what in self.fails:
            raise ConnectionError(f"no network for {what}")


@pytest.fixture(autouse=True)
def fresh() -> None:
    Kept.made.clear()


def run(world: Path, out: Path, monkeypatch: Any, **over: Any) -> list[dict[str, Any]]:
    import accelerate.tracking

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Kept)
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
    assert tracker.is_finished and tracker.settings["train/max_steps"] == 4 and tracker.name == "run"
    assert tracker.folder == str(tmp_path / "run" / "tracker") and tracker.main_process_only is False


@pytest.mark.parametrize("what", ["start", "log", "finish"])
def test_a_tracker_that_fails_stops_no_run_and_is_said_once(
    world: Path, tmp_path: Path, monkeypatch: Any, what: str
) -> None:
    make = Kept.__init__
    monkeypatch.setattr(Kept, "__init__", lambda self, name="", logging_dir="": make(self, name, logging_dir, {what}))
    events = run(world, tmp_path / "run", monkeypatch)
    notes = [event["text"] for event in events if event["event"] == "note" and "tensorboard failed" in event["text"]]
    assert [note for note in notes if "the run goes on" in note] == [notes[0]] and f"no network for {what}" in notes[0]
    assert sum(event["event"] == "step" for event in events) == 4
    assert ("left alone" in notes[-1]) == (what == "log")


def test_a_tracker_that_is_not_installed_is_said(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes: list[str] = []
    config = load_config(overrides=tiny.settings(world, telemetry__tracker="wandb"))
    tracking = open_tracking(config, tmp_path, notes.append)
    assert tracking is not None and len(notes) == 1 and "wandb failed and the run goes on" in notes[0]
    tracking({"event": "step", "step": 1, "train_loss": 2.0})
    tracking({"event": "run_end"})
    assert len(notes) == 1


class Loud(Kept):
    """A tracker with a project and runs in it, that prints."""

    requires_logging_directory = False

    def __init__(self, project: str, **more: Any) -> None:
        super().__init__(project)
        self.more = more

    def start(self) -> None:
        print("a line of its own")  # noqa: T201 - as trackio does


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_of_projects_is_told_the_run_and_prints_nothing_into_our_output(
    world: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, name: str
) -> None:
    import accelerate.tracking

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, name, Loud)
    config = load_config(overrides=tiny.settings(world, telemetry__tracker=name))
    (tmp_path / "run").mkdir()
    notes: list[str] = []
    assert open_tracking(config, tmp_path / "run", notes.append) is not None and not notes
    (made,) = Kept.made
    assert isinstance(made, Loud) and made.name == "stillroom" and made.more["name"] == "run"
    assert made.more.get("dir") == (str(tmp_path / "run" / "tracker") if name == "wandb" else None)
    printed = capsys.readouterr()
    assert printed.out == "" and "a line of its own" in printed.err


def test_trackio_s_run_is_ended_by_trackio_so_that_it_is_not_ended_again_at_exit(
    world: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    import accelerate.tracking

    ended: list[str] = []
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(finish=lambda: ended.append("trackio")))
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "trackio", Loud)
    config = load_config(overrides=tiny.settings(world, telemetry__tracker="trackio"))
    tracking = open_tracking(config, tmp_path, lambda _text: None)
    assert tracking is not None
    tracking({"event": "run_end"})
    assert ended == ["trackio"] and not Kept.made[0].is_finished


def test_without_one_nothing_is_made(world: Path, tmp_path: Path) -> None:
    assert open_tracking(load_config(overrides=tiny.settings(world)), tmp_path, lambda _text: None) is None


def test_failures_are_counted_and_one_is_forgiven() -> None:
    notes: list[str] = []
    kept = Kept(fails={"log"})
    tracking = Tracking("kept", lambda: kept, {"a": 1}, notes.append)
    tracking({"event": "step", "step": 1, "loss": 1.0})
    kept.fails = set()
    tracking({"event": "step", "step": 2, "loss": 1.0})
    tracking({"event": "run_end"})
    assert tracking.num_failed == 1 and kept.logged == [(2, {"train/step": 2, "train/loss": 1.0})]
    assert "did not take 1 records" in notes[-1] and kept.is_finished


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
