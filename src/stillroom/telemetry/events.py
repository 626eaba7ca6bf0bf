"""The event log: one strict JSON object a line.

Every JSON reader accepts it: NaN and infinity are not JSON, so a value that is not finite is written as null with a
sibling key, `"loss": null, "loss_nonfinite": "nan"`, and never as another number.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from stillroom.errors import CannotSave
from stillroom.telemetry.record import Event, EventScan, read_events, refuse_broken, scan_events
from stillroom.telemetry.strict import NONFINITE, NONFINITE_WORDS, strict

__all__ = [
    "EVAL_KEYS",
    "HEADER_KEYS",
    "SCHEMA",
    "STEP_KEYS",
    "TERM_KEYS",
    "Event",
    "EventLog",
    "EventScan",
    "Listener",
    "SilentLog",
    "problems",
    "read_events",
    "scan_events",
]

SCHEMA = 1

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

# Events that a run writes again if it repeats steps after a resume.
_WRITTEN_AGAIN = frozenset(
    {"step", "eval", "checkpoint", "guard", "phase", "gradients", "router", "advice", "changed_inputs"}
)
_WRITTEN_ONCE = frozenset(
    {"sample", "first_forward", "router_probe", "teacher_eval"}
)  # at the beginning or the end, without a step


# -- writing ---------------------------------------------------------------------------------------------


class EventLog:
    """Append events to a file, then call listeners with each. A listener has a copy of its own, which it may change.

    Opening a file that exists continues it: drop a last line torn by a crash, and the records that the resumed run will
    write again. `keep_records` is the `position` of the log when the state was saved: records before it stay (also a
    refused step, which was not applied); of those after it, drop the ones that will be written again, whatever their
    step. Without it, `keep_until_step` decides by the step alone. `dropped` counts the records removed.
    """

    def __init__(
        self, path: Path | str, *, keep_records: int | None = None, keep_until_step: int | None = None
    ) -> None:
        self.path = Path(path)
        self.position = 0  # records so far, including those that wait for disk space
        self._listeners: list[Listener] = []
        self._waiting: list[str] = []  # lines that a full disk refused
        self._writes = threading.RLock()  # a checkpoint's thread may write; a listener may write while it is told
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.dropped = 0
            if self.path.exists():
                self.position, self.dropped = _mend(self.path, keep_records, keep_until_step)
            self._file: TextIO = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def write(self, event: str, /, **fields: Any) -> Event:
        """Write one event; return the record as it is in the file."""
        taken = [key for key in HEADER_KEYS if key in fields]
        if taken:
            raise ValueError(f"an event's own fields cannot be called {', '.join(taken)}")
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"event": event, "schema": SCHEMA, "time": now, **strict(fields)}
        line = _line(record)
        with self._writes:
            self._waiting.append(line)
            self.position += 1
            self._flush()
            self._notify(line)
        return record

    def _notify(self, line: str) -> None:
        """Call the listeners. Remove one whose pipe or terminal is closed; the run continues."""
        for listener in tuple(self._listeners):
            try:
                listener(json.loads(line))
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self._listeners.remove(listener)
                self.write("note", text="nobody reads the console any more: the run continues without it")

    def sync(self) -> None:
        """Flush what is written to the disk."""
        with contextlib.suppress(OSError):  # not every file can be flushed; `write` reports a full disk
            os.fsync(self._file.fileno())

    def _flush(self) -> None:
        """Write the waiting lines. On a full disk they keep waiting, and a half-written line is removed."""
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
        """Discard the buffer that cannot be written, and cut the file back to its last whole line."""
        with contextlib.suppress(OSError):
            self._file.close()
        try:
            os.truncate(self.path, good)
            self._file = self.path.open("a", encoding="ascii", newline="\n")
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def records(self) -> tuple[Event, ...]:
        """What is in the file now."""
        return scan_events(self.path).records

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
            if error is None:  # else report the first error
                raise


class SilentLog(EventLog):
    """The log of every process but the first: writes nothing, because the first writes the same."""

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
    # Escape non-ASCII characters, some of which break lines in editors and terminals.
    return json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n"


def _mend(path: Path, keep_records: int | None, keep_until_step: int | None) -> tuple[int, int]:
    """Rewrite the file without the records that a resumed run writes again. Return how many were (kept, dropped)."""
    scan = scan_events(path)
    refuse_broken(path, scan)
    kept = [
        record
        for number, record in enumerate(scan.records)
        if (keep_records is not None and number < keep_records)
        or not _comes_again(record, keep_until_step, is_after=keep_records is not None)
    ]
    dropped = len(scan.records) - len(kept) + scan.is_torn
    if dropped or not path.read_bytes().endswith(b"\n"):
        _replace(path, kept)
    return len(kept), dropped


def _comes_again(record: Event, keep_until_step: int | None, *, is_after: bool) -> bool:
    """Whether a resumed run writes this record again. `is_after`: it was written after the state was saved."""
    kind, step = record.get("event"), record.get("step")
    if keep_until_step is None:
        return False
    if kind in _WRITTEN_ONCE:
        return is_after
    is_later = isinstance(step, int) and step > keep_until_step
    # The record of a checkpoint is written after the state is saved, and not again.
    return kind in _WRITTEN_AGAIN and (is_later or (is_after and kind != "checkpoint"))


def _replace(path: Path, records: Iterable[Event]) -> None:
    """Replace the file atomically: a crash leaves the old file or the new one."""
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


# -- the format ------------------------------------------------------------------------------------------


def problems(record: Mapping[str, Any]) -> list[str]:
    """How a record breaks the documented format; empty if it does not."""
    name = record.get("event")
    required = HEADER_KEYS + {"step": STEP_KEYS, "eval": EVAL_KEYS}.get(str(name), ())
    faults = [f"{name}: {key} is missing" for key in required if key not in record]
    terms = record.get("terms") if name in ("step", "eval") else None
    for term, parts in (terms or {}).items():
        faults += [f"{name}: terms.{term}.{key} is missing" for key in TERM_KEYS if key not in parts]
    for scope in (record, *(terms or {}).values()):
        faults += _false_siblings(str(name), scope)
    return faults


def _false_siblings(name: str, scope: Mapping[str, Any]) -> list[str]:
    faults = []
    for key, word in scope.items():
        if key.endswith(NONFINITE) and isinstance(word, str):
            value = scope.get(key.removesuffix(NONFINITE))
            if word not in NONFINITE_WORDS or value is not None:
                faults.append(f"{name}: {key} says {word!r}, and the value is {value!r}")
    return faults
