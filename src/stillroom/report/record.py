"""Read a run's folder, and note what a crash left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stillroom.errors import DataError
from stillroom.report.history import History
from stillroom.report.steps import Steps
from stillroom.telemetry.evaluation_record import Evaluated, read_evaluation
from stillroom.telemetry.events import Event
from stillroom.telemetry.following import Follower
from stillroom.telemetry.run_record import BASELINES, FINISHED, RunReading, mapping, read_object
from stillroom.telemetry.wording import clean

__all__ = ["BASELINES", "FINISHED", "TOKENS", "RunRecord", "mapping", "read_log"]

TOKENS = "tokens.json"


@dataclass(frozen=True)
class RunRecord(RunReading):
    """One run for a page, its steps as columns. `missing` are sentences about what its folder lacks."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    tokens: Mapping[str, Any] = field(default_factory=dict)  # both models on held-out text, token by token
    folder: Path | None = None
    is_running: bool = False  # the page is written by the run itself, which goes on
    evaluated: Evaluated = field(default_factory=Evaluated)  # what `stillroom eval` measured of the student

    @staticmethod
    def load(run_dir: Path) -> RunRecord:
        missing: list[str] = []
        return RunRecord.of_folder(run_dir, read_log(run_dir / "events.jsonl", missing), missing)

    @staticmethod
    def of_folder(
        run_dir: Path, history: History, missing: list[str] | None = None, *, is_running: bool = False
    ) -> RunRecord:
        """A run whose log is read already. One that goes on has no summary yet, and one of before does not count."""
        notes = missing if missing is not None else []
        summary = {} if is_running else read_object(run_dir / "summary.json", notes)
        config = read_object(run_dir / "config.json", notes)
        tokens = {} if is_running else read_object(run_dir / TOKENS, [])
        evaluated = Evaluated() if is_running else read_evaluation(run_dir, notes)
        name = history.start.get("run") or run_dir.resolve().name
        settings = mapping(config, "config") or config or mapping(history.start, "config")
        return RunRecord(clean(name), settings, history, summary, tuple(notes), tokens, run_dir, is_running, evaluated)

    @property
    def start(self) -> Mapping[str, Any]:
        return self.history.start

    @property
    def end(self) -> Mapping[str, Any]:
        """How the run ended, unless it was resumed after that."""
        return self.history.end

    @property
    def steps(self) -> Steps:
        """The applied steps."""
        return self.history.steps

    @cached_property
    def refused(self) -> list[tuple[float, float, str]]:
        """(step, gradient norm, verdict) of refused attempts: step records, and guard events of steps without one."""
        marks, guards = self.history.refused, self.history.guarded
        refused = list(zip(marks.steps.tolist(), marks.norms.tolist(), marks.words(), strict=True))
        recorded = {step for step, _, _ in refused}
        guarded = zip(guards.steps.tolist(), guards.norms.tolist(), guards.words(), strict=True)
        return sorted(refused + [mark for mark in guarded if mark[0] not in recorded], key=lambda mark: mark[0])

    @cached_property
    def evals(self) -> list[Event]:
        return self.history.evals


def read_log(path: Path, missing: list[str]) -> History:
    history, follower = History(), Follower(path)
    if not path.exists():
        missing.append(f"{path.name} is not there, so there are no curves.")
        return history
    try:
        for event in follower.new_events():
            history.add(event)
    except DataError as error:
        missing.append(f"{path.name} cannot be read: {clean(error.what)}.")
    last = follower.last_event()
    if last is not None:
        history.add(last)
    if follower.is_torn:
        missing.append(f"The last line of {path.name} is torn, as a crash in the middle of a write leaves it.")
    if follower.broken_lines:
        lines = follower.broken_lines
        shown = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
        missing.append(f"{path.name} has {len(lines)} broken lines that are left out: {shown}.")
    if history.steps.num_left_out:
        missing.append(f"{history.steps.num_left_out:,} values of {path.name} are left out: too many names, too large.")
    return history
