"""Laws of stages: each begins and ends in the log, and its estimates come from counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stillroom.telemetry.events import EventLog, Listening, Stages, problems


class Clock:
    """Seconds that a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_is_announced_with_an_estimate_from_what_is_done() -> None:
    heard: list[dict[str, Any]] = []
    clock = Clock()
    stages = Stages(Listening((heard.append,)), clock=clock)
    with stages.stage("evaluating", 4) as advance:
        for _ in range(4):
            clock.now += 2.0
            advance()
    assert [event["state"] for event in heard] == ["begin", *4 * ["progress"], "end"]
    assert [(event["done"], event["eta_seconds"]) for event in heard[1:-1]] == [(1, 6.0), (2, 4.0), (3, 2.0), (4, 0.0)]
    assert "eta_seconds" not in heard[0] and heard[-1]["seconds"] == 8.0


def test_the_next_stage_of_a_name_is_expected_to_take_as_long() -> None:
    heard: list[dict[str, Any]] = []
    clock = Clock()
    stages = Stages(Listening((heard.append,)), clock=clock)
    for about in (5.0, None):
        with stages.stage("saving", about=about):
            clock.now += 3.0
    assert [event.get("eta_seconds") for event in heard if event["state"] == "begin"] == [5.0, 3.0]
    assert stages.seconds == {"saving": 3.0}


def test_progress_is_not_kept_in_the_log(tmp_path: Path) -> None:
    heard: list[str] = []
    clock = Clock()
    with EventLog(tmp_path / "events.jsonl") as log:
        log.listen(lambda event: heard.append(event["state"]))
        with Stages(log, clock=clock).stage("evaluating", 3) as advance:
            for _ in range(3):
                clock.now += 1.0
                advance()
        records = log.records()
        assert log.position == 2
    assert [record["state"] for record in records] == ["begin", "end"] and heard.count("progress") == 3
    assert not [fault for record in records for fault in problems(record)]


def test_a_stage_that_fails_has_no_end() -> None:
    heard: list[dict[str, Any]] = []
    stages = Stages(Listening((heard.append,)))
    with pytest.raises(RuntimeError), stages.stage("loading"):
        raise RuntimeError
    assert [event["state"] for event in heard] == ["begin"] and not stages.seconds
