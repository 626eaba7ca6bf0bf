"""Laws of the page that is written while a run is running."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from synthetic import write_run

from stillroom.config import load_config
from stillroom.report import live
from stillroom.report.live import FIRST_GUESS, MAX_SHARE, LiveReport
from stillroom.training.distill import distill


class Clock:
    """A clock that a test moves; a page takes `cost` seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "stdlib-demo", num_steps=60, until=30)


def events_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()[:-1]]


def feed(report: LiveReport, run: Path, clock: Clock | None = None, seconds: float = 0.0) -> None:
    for event in events_of(run):
        report.handle(event)
        if clock:
            clock.now += seconds


def test_the_page_is_there_during_the_run_and_loads_itself_again(run: Path) -> None:
    clock = Clock()
    report = LiveReport(run, print, clock=clock)
    feed(report, run, clock, seconds=60.0)
    page = (run / "report.html").read_text()
    assert report.num_written and 'http-equiv="refresh"' in page
    assert "The run is at step" in page and "did not finish" not in page
    report.close()
    page = (run / "report.html").read_text()
    assert 'http-equiv="refresh"' not in page and "did not finish" in page


def test_pages_that_would_cost_too_much_are_left_out_and_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    cost = 2.0

    def slow(*_: object) -> str:
        clock.now += cost
        return "page"

    monkeypatch.setattr(live, "render", slow)
    report = LiveReport(run, print, clock=clock)
    feed(report, run, clock, seconds=10.0)
    assert report.num_written >= 1 and report.num_left_out >= 1
    assert report.seconds == report.num_written * cost
    assert report.seconds <= MAX_SHARE * clock.now + cost
    assert f"of the run's time: {report.num_left_out}." in report.foot()


def test_a_short_run_is_not_slowed_at_all(run: Path) -> None:
    clock = Clock()
    clock.now = 0.5 * FIRST_GUESS
    report = LiveReport(run, print, clock=clock)
    feed(report, run)
    assert report.num_written == 0 and report.num_left_out > 0
    assert not (run / "report.html").exists()
    report.close()
    assert not (run / "report.html").exists()


def test_a_page_that_fails_is_said_once_and_stops_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(live, "render", broken)
    clock, told = Clock(), list[dict[str, Any]]()
    report = LiveReport(run, told.append, clock=clock)
    feed(report, run, clock, seconds=60.0)
    assert report.num_failed > 1 and len(told) == 1
    assert told[0]["event"] == "note" and "No space left" in told[0]["text"]


def test_events_of_another_run_are_not_drawn(run: Path) -> None:
    clock = Clock()
    report = LiveReport(run, print, clock=clock)
    report.handle({"event": "run_start", "run": "equal-tokens"})
    clock.now = 1e6
    report.handle({"event": "eval", "step": 1, "perplexity": 3.0})
    assert report.num_written == 0


def test_a_real_run_with_a_page_ends_bit_for_bit_like_one_without(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_SHARE", 1e9)
    config = load_config(overrides=tiny.settings(world, train__eval_steps=2))
    plain = distill(config, tmp_path / "plain", device="cpu").folder
    report = LiveReport(tmp_path / "live", print)
    drawn = distill(config, tmp_path / "live", device="cpu", listeners=(report.handle,)).folder
    assert report.num_written > 1
    weights = [(folder / "student" / "model.safetensors").read_bytes() for folder in (plain, drawn)]
    assert weights[0] == weights[1]
