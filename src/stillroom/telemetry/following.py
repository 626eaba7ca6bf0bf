"""Read an event log while it grows: whole lines only, each once, without holding the file.

A resumed run replaces its log by a shorter one; the follower then begins again and says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stillroom.errors import DataError
from stillroom.telemetry.events import Event

_CHUNK = 1 << 20
_MAX_LINE = 64 << 20  # bytes; a longer one is no record of ours and is counted as broken


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)  # made once: json.loads would make one for each line


class Follower:
    """The records of a log, in order. `broken_lines` are the numbers of lines that are no records."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.num_restarts = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._line = 0
        self._rest = b""
        self._file_id: tuple[int, int] | None = None
        self.broken_lines: list[int] = []

    @property
    def is_torn(self) -> bool:
        """Whether the file ends in a line without an end, as a crash in the middle of a write leaves it."""
        return bool(self._rest.strip())

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
                yield from self._lines(file)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"the event log cannot be read: {error.strerror or error}", where=str(self.path)) from error

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

    def _lines(self, file: BinaryIO) -> Iterator[Event]:
        while chunk := file.read(_CHUNK):
            self._offset += len(chunk)
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                self._rest = b"x"  # no record; the number of its line is counted at its end
            for line in whole:
                self._line += 1
                if not line.strip():
                    continue
                record = _parsed(line)
                if record is None:
                    self.broken_lines.append(self._line)
                else:
                    yield record


def _parsed(line: bytes) -> Event | None:
    try:
        record = _DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
