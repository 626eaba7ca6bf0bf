"""Read what a run left in its folder: the event log, whole or while it grows, and the JSON files next to it.

This is the only reader of `events.jsonl`. A log may end in a torn line after a crash, and may come from a stranger: a
line that is no record is counted and left out, and values of the wrong type read as missing ones. A view must not end
a run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from stillroom.core.errors import DataError
from stillroom.core.files import strict, sum_of_file, write_atomically
from stillroom.telemetry.wording import Fields, as_number, clean, items, reading, section

Event = dict[str, Any]

LOG, SUMMARY, CONFIG, EVALUATED = "events.jsonl", "summary.json", "config.json", "eval.json"
FINISHED = frozenset({"done", "finished", "completed"})
BASELINES = ("baseline", "baseline_equal_compute")

_CHUNK = 1 << 20
_MAX_LINE = 64 << 20  # bytes; a longer line is counted as broken
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # what some editors put at the start of a file


# -- the event log ---------------------------------------------------------------------------------------


class Follower:
    """The records of a log, in order, each once, without holding the file: `new_events` again reads what was added.

    A resumed run replaces its log by a shorter one; the follower then begins again and counts it in `num_restarts`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.num_restarts = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._line = 0  # lines read so far
        self._last_line = 0  # the number of the last one that is not blank
        self._rest = b""  # what stands after the last line end
        self._broken: list[int] = []
        self._file_id: tuple[int, int] | None = None

    @property
    def broken_lines(self) -> list[int]:
        """The numbers of lines that are no records, without the torn one."""
        return self._broken[:-1] if self._is_last_line_broken else self._broken

    @property
    def is_torn(self) -> bool:
        """Whether the last line is incomplete, as a crash in the middle of a write leaves it."""
        return bool(self._rest.strip()) or self._is_last_line_broken

    @property
    def _is_last_line_broken(self) -> bool:
        return not self._rest.strip() and bool(self._broken) and self._broken[-1] == self._last_line

    def new_events(self) -> Iterator[Event]:
        """The records written since the last call; nothing while the file is not there."""
        try:
            with self.path.open("rb") as file:
                if self._is_another(file):
                    self._begin()
                    self.num_restarts += 1
                status = os.fstat(file.fileno())
                self._file_id = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                yield from self._records(file)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _cannot_read(self.path, error) from error

    def last_event(self) -> Event | None:
        """The last line of a file that nobody writes any more, where it is whole but for its end."""
        record = _parsed(self._rest)
        if record is not None:
            self._rest = b""
        return record

    def _is_another(self, file: BinaryIO) -> bool:
        status = os.fstat(file.fileno())
        is_replaced = self._file_id is not None and self._file_id != (status.st_dev, status.st_ino)
        return is_replaced or status.st_size < self._offset

    def _records(self, file: BinaryIO) -> Iterator[Event]:
        while chunk := file.read(_CHUNK):
            self._offset += len(chunk)
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                self._rest = b"x"  # no record; the number of its line is counted at its end
            for line in whole:
                self._line += 1
                if not line.strip():
                    continue
                self._last_line = self._line
                record = _parsed(line)
                if record is None:
                    self._broken.append(self._line)
                else:
                    yield record


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # made once: json.loads would make one for each line


def _parsed(line: bytes) -> Event | None:
    try:
        record = _DECODER.decode(line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def _cannot_read(path: Path, error: OSError) -> DataError:
    return DataError(f"the event log cannot be read: {error.strerror or error}", where=str(path))


@dataclass(frozen=True)
class EventScan:
    """The readable records of a log, and the numbers of the lines that cannot be read."""

    records: tuple[Event, ...]
    broken_lines: tuple[int, ...]  # without the torn one
    is_torn: bool


def scan_events(path: Path | str) -> EventScan:
    """Read what can be read. `read_events` raises for a broken line."""
    follower = Follower(path)
    records = list(follower.new_events())
    if not records and not follower.path.exists():
        raise _cannot_read(follower.path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    last = follower.last_event()
    records += [last] if last is not None else []
    return EventScan(tuple(records), tuple(follower.broken_lines), follower.is_torn)


def read_events(path: Path | str) -> list[Event]:
    """Every record of a log. Ignore a torn last line; raise for any other broken line."""
    scan = scan_events(path)
    refuse_broken(path, scan)
    return list(scan.records)


def refuse_broken(path: Path | str, scan: EventScan) -> None:
    if scan.broken_lines:
        raise DataError(
            f"line {scan.broken_lines[0]} of the event log is not a JSON object with an event",
            where=f"{path}:{scan.broken_lines[0]}",
            advice=("remove that line if you edited the file by hand", "restore the file from a copy"),
        )


def log_events(path: Path, missing: list[str]) -> Iterator[Event]:
    """The records of a log that may be damaged. Sentences about what is lacking are added to `missing` at the end."""
    if not path.exists():
        missing.append(f"{path.name} is not there, so there are no curves.")
        return
    follower = Follower(path)
    try:
        yield from follower.new_events()
    except DataError as error:
        missing.append(f"{path.name} cannot be read: {clean(error.what)}.")
    last = follower.last_event()
    if last is not None:
        yield last
    if follower.is_torn:
        missing.append(f"The last line of {path.name} is torn, as a crash in the middle of a write leaves it.")
    broken = follower.broken_lines
    if broken:
        lines = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        missing.append(f"{path.name} has {len(broken)} broken lines that are left out: {lines}.")


def has_step(event: Fields) -> bool:
    return type(event.get("step")) is int


# -- a run -----------------------------------------------------------------------------------------------


class RunReading:
    """What can be said of a run from its folder, however much of its log is held."""

    summary: Fields

    @property
    def start(self) -> Fields:
        raise NotImplementedError

    @property
    def end(self) -> Fields:
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
        return int(as_number(section(self.start, "schedule").get("optimizer_steps")) or 0)

    def result(self, row: str) -> Fields:
        """A row of the summary. Without a summary, the first or last evaluation of the student."""
        result = section(self.summary, row)
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
    config: Fields = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    summary: Fields = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @staticmethod
    def load(run_dir: Path) -> LoggedRun:
        missing: list[str] = []
        events = tuple(log_events(run_dir / LOG, missing))
        summary = read_object(run_dir / SUMMARY, missing)
        config = read_object(run_dir / CONFIG, missing)
        start = LoggedRun("", events=events).start
        return LoggedRun(run_name(run_dir, start), run_settings(config, start), events, summary, tuple(missing))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.get("event") == kind]

    @cached_property
    def start(self) -> Fields:
        """The last start: a resumed run may be on another machine."""
        starts = self.of("run_start")
        return starts[-1] if starts else {}

    @property
    def end(self) -> Fields:
        """How the run ended, unless it was resumed after that."""
        for event in reversed(self.events):
            if event.get("event") == "run_end":
                return event
            if event.get("event") in ("resume", "step"):
                return {}
        return {}

    @cached_property
    def kept_steps(self) -> list[Event]:
        """The applied steps, in order, without those that a rollback undid: a later one has no larger number."""
        kept: list[Event] = []
        for event in reversed(self.of("step")):
            if _is_kept(event) and (not kept or event["step"] < kept[-1]["step"]):
                kept.append(event)
        return kept[::-1]

    @cached_property
    def evals(self) -> list[Event]:
        """The last evaluation of each step, in order, without those that gave no number."""
        evals = {event["step"]: event for event in self.of("eval") if has_step(event)}
        return [evals[step] for step in sorted(evals) if as_number(evals[step].get("perplexity")) is not None]


def _is_kept(event: Event) -> bool:
    return has_step(event) and event.get("verdict", "keep") == "keep"


def run_name(run_dir: Path, start: Fields) -> str:
    return clean(start.get("run") or run_dir.resolve().name)


def run_settings(config: Fields, start: Fields) -> Fields:
    """The configuration, from the run's file or, without one, from its start."""
    return section(config, "config") or config or section(start, "config")


def read_object(path: Path, missing: list[str]) -> Fields:
    """A JSON object of a run's folder; empty, with a sentence in `missing`, if it is not there or damaged."""
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


# -- figures of `stillroom eval` -------------------------------------------------------------------------

_STUDENT = "student"
_MEASURED = ("*.safetensors", "config.json", "tokenizer.json")  # what decides the figures
_SUM = "student_sha256"
_CHANGED = (
    "The student has changed since it was measured: these are figures of an earlier one. `stillroom eval` takes them "
    "again."
)
_UNKNOWN = "The student's files are not in the folder, so it cannot be said whether these figures are still its own."


@dataclass(frozen=True)
class Evaluated:
    """A record of `stillroom eval`, empty if there is none, and why its figures may not be those of the student.

    Figures belong to the files that were measured, so the record holds their sha256. Whoever shows it compares the sum
    with the student that is there now.
    """

    record: Fields = field(default_factory=dict)
    doubt: str = ""


def student_sum(run: Path) -> str:
    """sha256 over the files of a run's student that decide its figures; empty if it has no weights."""
    folder = run / _STUDENT
    files = sorted(path for pattern in _MEASURED for path in folder.glob(pattern))
    if not any(path.suffix == ".safetensors" for path in files):
        return ""
    whole = hashlib.sha256()
    try:
        for path in files:
            whole.update(f"{path.name} {sum_of_file(path).sha256}\n".encode())
    except OSError:  # replaced while it was read
        return ""
    return whole.hexdigest()


def write_evaluation(run: Path, measured: str, result: Fields) -> Path:
    """Replace the run's record by a result. `measured` is the student's sum from before it was loaded.

    A student that was replaced in between has another sum, so the figures are then shown as those of an earlier one.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = strict({"schema": 1, "time": now, _SUM: measured, **result})
    path = run / EVALUATED
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False).encode("utf-8"))
    return path


def read_evaluation(run: Path, missing: list[str]) -> Evaluated:
    """The run's record. One that is damaged is told in `missing`; a run without one is nothing to tell."""
    path = run / EVALUATED
    if not path.exists():
        return Evaluated()
    record = read_object(path, missing)
    if not section(record, "student"):
        return Evaluated()
    now = student_sum(run)
    return Evaluated(record, "" if now and now == record.get(_SUM) else _CHANGED if now else _UNKNOWN)


def evaluation_notes(record: Fields) -> list[str]:
    """The notes on the models and the text, each once."""
    owners = [record, *(section(record, role) for role in ("student", "teacher"))]
    return list(dict.fromkeys(str(note) for owner in owners for note in items(owner, "notes")))
