"""Read a run's folder, and note what a crash left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stillroom.errors import DataError
from stillroom.report.history import History
from stillroom.report.steps import Steps
from stillroom.telemetry.events import Event
from stillroom.telemetry.following import Follower
from stillroom.telemetry.reading import reading
from stillroom.telemetry.wording import as_number, clean

FINISHED = frozenset({"done", "finished", "completed"})
TOKENS = "tokens.json"
BASELINES = ("baseline", "baseline_equal_compute")


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder. `missing` are sentences about what is not there."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    tokens: Mapping[str, Any] = field(default_factory=dict)  # both models on held-out text, token by token
    folder: Path | None = None
    is_running: bool = False  # the page is written by the run itself, which goes on

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
        summary = {} if is_running else _read_object(run_dir / "summary.json", notes)
        config = _read_object(run_dir / "config.json", notes)
        tokens = {} if is_running else _read_object(run_dir / TOKENS, [])
        name = history.start.get("run") or run_dir.resolve().name
        settings = mapping(config, "config") or config or mapping(history.start, "config")
        return RunRecord(clean(name), settings, history, summary, tuple(notes), tokens, run_dir, is_running)

    @property
    def start(self) -> Mapping[str, Any]:
        return self.history.start

    @property
    def end(self) -> Mapping[str, Any]:
        """How the run ended, unless it was resumed after that."""
        return self.history.end

    @property
    def is_finished(self) -> bool:
        status = clean(self.summary.get("status") or self.end.get("status"))
        return status in FINISHED or self.end.get("exit_code") == 0

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

    @property
    def num_steps_planned(self) -> int:
        return int(as_number(mapping(self.start, "schedule").get("optimizer_steps")) or 0)

    def result(self, row: str) -> Mapping[str, Any]:
        """A row of the summary. Without a summary, the first or last evaluation of the student."""
        result = mapping(self.summary, row)
        if result or self.summary:
            return result
        evals = self.evals
        if row == "student" and evals:
            return evals[-1]
        if row == "student_before" and len(evals) > 1 and evals[0]["step"] == 0:
            return evals[0]
        return {}

    def perplexity(self, row: str) -> float | None:
        return reading(self.result(row), "perplexity")


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


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


def _read_object(path: Path, missing: list[str]) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError:
        missing.append(f"{path.name} is not there.")
        return {}
    except (ValueError, RecursionError):
        missing.append(f"{path.name} cannot be read: it is not JSON.")
        return {}
    if not isinstance(value, dict):
        missing.append(f"{path.name} does not hold an object.")
        return {}
    return value
