"""The event log: one strict JSON object a line.

Strict means that every JSON reader accepts it: NaN and infinity are no JSON, so a value that is not finite
is written as null and named beside it, `"loss": null, "loss_nonfinite": "nan"`. It is never written as a
number that it is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from stillroom.errors import CannotSave, DataError
from stillroom.telemetry.strict import NONFINITE, NONFINITE_WORDS, strict

SCHEMA = 1

Event = dict[str, Any]
Listener = Callable[[Event], None]

HEADER_KEYS = ("event", "schema", "time")
STEP_KEYS = (
    "step",
    "train_loss",
    "lr",
    "grad_norm",
    "verdict",
    "success_rate",
    "consecutive_nans",
    "gpu_memory_gb",
    "loss_scale",
    "tokens_per_second",
    "phase",
    "terms",
)
EVAL_KEYS = (
    "step",
    "perplexity",
    "bits_per_byte",
    "kl",
    "agreement",
    "objective",
    "terms",
    "unscored_tokens",
)
TERM_KEYS = ("raw", "weight", "scaled", "share")

# What a run writes again when it goes over the same steps a second time after a resume.
_WRITTEN_AGAIN = frozenset({"step", "eval", "checkpoint", "guard", "phase", "gradients", "router"})
_WRITTEN_ONCE = frozenset({"sample", "first_forward", "router_probe"})  # at the beginning or the end, without a step


# -- writing ---------------------------------------------------------------------------------------------


class EventLog:
    """Appends events to a file and tells listeners about each, after it is on its way to the disk.

    Opening a file that exists continues it: a last line torn by a crash goes, and so does what the continued run
    will write again. `keep_records` is the `position` of the log when the state was saved: of the records after it,
    those that come again go, whatever their step; a refused step before it stays, though its step was not applied yet.
    Without it, `keep_until_step` decides by the step alone. `dropped` counts what went.
    """

    def __init__(
        self, path: Path | str, *, keep_records: int | None = None, keep_until_step: int | None = None
    ) -> None:
        self.path = Path(path)
        self.position = 0  # records so far, those that wait for room included
        self._listeners: list[Listener] = []
        self._waiting: list[str] = []  # lines that a full disk refused, kept for when there is room
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.dropped = 0
            if self.path.exists():
                self.position, self.dropped = _mend(self.path, keep_records, keep_until_step)
            self._file: TextIO = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write(self, event: str, /, **fields: Any) -> Event:
        """Write one event; answers with the record as it stands in the file."""
        taken = [key for key in HEADER_KEYS if key in fields]
        if taken:
            raise ValueError(f"an event's own fields cannot be called {', '.join(taken)}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"event": event, "schema": SCHEMA, "time": now, **strict(fields)}
        self._waiting.append(_line(record))
        self.position += 1
        self._flush()
        self._tell(record)
        return record

    def _tell(self, record: Event) -> None:
        """A listener whose reader is gone (a closed pipe or terminal) hears no more; the run does not depend on it."""
        for listener in tuple(self._listeners):
            try:
                listener(record)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._listeners.remove(listener)
                self.write("note", text="nobody reads the console any more: the run goes on without it")

    def sync(self) -> None:
        """Bring what is written to the disk itself."""
        with contextlib.suppress(OSError):  # not every file can be: a full disk is told where a record is written
            os.fsync(self._file.fileno())

    def _flush(self) -> None:
        """Write what is waiting. A full disk costs no step: the lines wait, and a half-written one is taken back."""
        try:
            good = self._file.tell()
            self._file.write("".join(self._waiting))
            self._file.flush()
            self._waiting.clear()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _cannot_write(self.path, error) from error
            self._reopen(good)

    def _reopen(self, good: int) -> None:
        """Drop the buffer that cannot be written, and with it what was half written."""
        with contextlib.suppress(OSError):
            self._file.close()
        try:
            os.truncate(self.path, good)
            self._file = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every record written from now on."""
        self._listeners.append(listener)

    def close(self) -> None:
        if self._file.closed:
            return
        self._flush()
        self._file.close()
        if self._waiting:
            waiting = len(self._waiting)
            raise _cannot_write(self.path, OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {waiting} events lost"))

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except CannotSave:
            if error is None:  # else the first end is the one to be told
                raise


class SilentLog(EventLog):
    """The log of a process that is not the first: it writes nothing, because another writes the same."""

    def __init__(self) -> None:
        self.path = Path()
        self.position = 0
        self.dropped = 0

    def write(self, event: str, /, **fields: Any) -> Event:
        return {"event": event, **fields}

    def listen(self, listener: Listener) -> None:
        return

    def sync(self) -> None:
        return

    def close(self) -> None:
        return


def _line(record: Event) -> str:
    # Escaping beyond ASCII keeps one record on one line in every editor and terminal.
    return json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n"


def _mend(path: Path, keep_records: int | None, keep_until_step: int | None) -> tuple[int, int]:
    """Rewrite the file without what a resumed run must not keep; answers with how many records stayed and went."""
    found = scan_events(path)
    _refuse_broken(path, found)
    kept = [
        record
        for number, record in enumerate(found.records)
        if (keep_records is not None and number < keep_records)
        or not _comes_again(record, keep_until_step, is_after=keep_records is not None)
    ]
    dropped = len(found.records) - len(kept) + found.is_torn
    if dropped or not path.read_bytes().endswith(b"\n"):
        _replace(path, kept)
    return len(kept), dropped


def _comes_again(record: Event, keep_until_step: int | None, *, is_after: bool) -> bool:
    """Whether a resumed run writes this record again. `is_after`: it is known to come after the state was saved."""
    kind, step = record.get("event"), record.get("step")
    if keep_until_step is None:
        return False
    if kind in _WRITTEN_ONCE:
        return is_after
    is_later = isinstance(step, int) and step > keep_until_step
    # The record of a checkpoint follows the checkpoint, and is not written again.
    return kind in _WRITTEN_AGAIN and (is_later or (is_after and kind != "checkpoint"))


def _replace(path: Path, records: Iterable[Event]) -> None:
    """Atomic: a crash leaves the old file or the new one, never half of either."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="ascii", newline="\n") as file:
        file.writelines(_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _cannot_write(path: Path, error: OSError) -> CannotSave:
    return CannotSave(
        f"the event log cannot be written: {error.strerror or error}",
        where=str(path),
        advice=("free space on the disk, or choose another folder with --out", "then continue: stillroom resume RUN"),
    )


# -- reading ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EventScan:
    """All that can be read of a log: its records, and the numbers of the lines that cannot."""

    records: tuple[Event, ...]
    broken_lines: tuple[int, ...]  # without the torn one
    is_torn: bool  # a crash in the middle of a write leaves part of a last line


def scan_events(path: Path | str) -> EventScan:
    """Read what can be read; a caller that needs the whole truth uses `read_events`."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"the event log cannot be read: {error.strerror or error}", where=str(path)) from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    records: list[Event] = []
    broken: list[int] = []
    for number, line in numbered:
        record = _parse(line)
        if record is None:
            broken.append(number)
        else:
            records.append(record)
    is_torn = bool(broken) and broken[-1] == numbered[-1][0]
    return EventScan(tuple(records), tuple(broken[:-1] if is_torn else broken), is_torn)


def read_events(path: Path | str) -> list[Event]:
    """Every record of a log. A torn last line is passed over; any other broken line is an error."""
    found = scan_events(path)
    _refuse_broken(Path(path), found)
    return list(found.records)


def _refuse_broken(path: Path, found: EventScan) -> None:
    if found.broken_lines:
        raise DataError(
            f"line {found.broken_lines[0]} of the event log is not a JSON object",
            where=f"{path}:{found.broken_lines[0]}",
            advice=("remove that line if you edited the file by hand", "restore the file from a copy"),
        )


def _parse(line: bytes) -> Event | None:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def problems(record: Mapping[str, Any]) -> list[str]:
    """What a record lacks of the contract with users; empty when nothing does."""
    name = record.get("event")
    required = HEADER_KEYS + {"step": STEP_KEYS, "eval": EVAL_KEYS}.get(str(name), ())
    found = [f"{name}: {key} is missing" for key in required if key not in record]
    terms = record.get("terms") if name in ("step", "eval") else None
    for term, parts in (terms or {}).items():
        found += [f"{name}: terms.{term}.{key} is missing" for key in TERM_KEYS if key not in parts]
    for scope in (record, *(terms or {}).values()):
        found += _false_siblings(str(name), scope)
    return found


def _false_siblings(name: str, scope: Mapping[str, Any]) -> list[str]:
    found = []
    for key, word in scope.items():
        if key.endswith(NONFINITE) and isinstance(word, str):
            value = scope.get(key.removesuffix(NONFINITE))
            if word not in NONFINITE_WORDS or value is not None:
                found.append(f"{name}: {key} says {word!r} beside {value!r}")
    return found
