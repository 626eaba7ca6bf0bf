"""Read a run's folder, and note what a crash left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stillroom.errors import DataError
from stillroom.telemetry.events import Event, scan_events
from stillroom.telemetry.reading import reading
from stillroom.telemetry.wording import as_number, clean

FINISHED = frozenset({"done", "finished", "completed"})
BASELINES = ("baseline", "baseline_equal_compute")


class RunReading:
    """What anyone who read a run's folder can say of it. Who reads gives what is declared here."""

    summary: Mapping[str, Any]

    @property
    def start(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @property
    def end(self) -> Mapping[str, Any]:
        raise NotImplementedError

    @property
    def evals(self) -> list[Event]:
        raise NotImplementedError

    @property
    def is_finished(self) -> bool:
        status = clean(self.summary.get("status") or self.end.get("status"))
        return status in FINISHED or self.end.get("exit_code") == 0

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


@dataclass(frozen=True)
class LoggedRun(RunReading):
    """One run with all its events, read from its folder. `missing` are sentences about what is not there."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> LoggedRun:
        missing: list[str] = []
        events = _read_log(run_dir / "events.jsonl", missing)
        summary = read_object(run_dir / "summary.json", missing)
        config = read_object(run_dir / "config.json", missing)
        run = LoggedRun(run_dir.resolve().name, config, events, summary, tuple(missing))
        name = run.start.get("run")
        settings = mapping(config, "config") or config or mapping(run.start, "config")
        return LoggedRun(clean(name or run.name), settings, events, summary, tuple(missing))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def start(self) -> Mapping[str, Any]:
        """The last start: a resumed run may be on another machine."""
        starts = self.of("run_start")
        return starts[-1] if starts else {}

    @property
    def end(self) -> Mapping[str, Any]:
        """How the run ended, unless it was resumed after that."""
        for event in reversed(self.events):
            if event.get("event") == "run_end":
                return event
            if event.get("event") in ("resume", "step"):
                return {}
        return {}

    @cached_property
    def kept_steps(self) -> list[Event]:
        """The applied steps, in order; after a rollback the later attempt counts."""
        kept = {event["step"]: event for event in self.of("step") if _is_kept(event)}
        return [kept[step] for step in sorted(kept)]

    @cached_property
    def refused_steps(self) -> list[Event]:
        """Refused attempts: step records, and guard events of steps without a record."""
        steps = [event for event in self.of("step") if _has_step(event) and not _is_kept(event)]
        recorded = {event["step"] for event in steps}
        guards = [event for event in self.of("guard") if _has_step(event) and event["step"] not in recorded]
        guarded = [{**mapping(event, "evidence"), **event} for event in guards]
        return sorted(steps + guarded, key=lambda event: int(event["step"]))

    @cached_property
    def evals(self) -> list[Event]:
        """The last evaluation of each step, in order, without those that gave no number."""
        evals = {event["step"]: event for event in self.of("eval") if _has_step(event)}
        return [evals[step] for step in sorted(evals) if as_number(evals[step].get("perplexity")) is not None]


def mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _has_step(event: Event) -> bool:
    return isinstance(event.get("step"), int)


def _is_kept(event: Event) -> bool:
    return _has_step(event) and event.get("verdict", "keep") == "keep"


def _read_log(path: Path, missing: list[str]) -> tuple[Event, ...]:
    try:
        scan = scan_events(path)
    except DataError:
        missing.append(f"{path.name} is not there, so there are no curves.")
        return ()
    if scan.is_torn:
        missing.append(f"The last line of {path.name} is torn, as a crash in the middle of a write leaves it.")
    if scan.broken_lines:
        lines = ", ".join(map(str, scan.broken_lines[:5])) + (", ..." if len(scan.broken_lines) > 5 else "")
        missing.append(f"{path.name} has {len(scan.broken_lines)} broken lines that are left out: {lines}.")
    return scan.records


def read_object(path: Path, missing: list[str]) -> Mapping[str, Any]:
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
