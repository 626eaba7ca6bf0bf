"""Laws of several writers: a dead one's shard falls to another, a living one's does not, on one machine or on many."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_cases as cases
import pytest
import tiny

from stillroom.core import locks
from stillroom.core.locks import describe_process, hold
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import open_store, write_missing

LENGTHS = [3 + (number * 7) % 17 for number in range(120)]


class Slow(cases.Matrices):
    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        time.sleep(0.004)
        return super().answer_rows(batch, specs)


class Mortal(Slow):
    """Killed by the system in the middle of its first shard, when the others have begun."""

    def __init__(self, begun: Path) -> None:
        super().__init__(batch_tokens=16)
        self._begun = begun

    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        if self.num_asked:
            while not (self._begun.parent / "asked-others").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        self._begun.touch()
        return super().answer_rows(batch, specs)


class Other(Slow):
    def answer_rows(self, batch: Any, specs: Any = ()) -> Any:
        self.mark.touch()
        return super().answer_rows(batch, specs)

    mark: Path


def here(_number: int) -> None:
    """All writers on this machine, with its locks."""


def elsewhere(number: int) -> None:
    """Each writer on a machine of its own, on a file system without locks."""

    def without_locks(_handle: int, _kind: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    fcntl.flock = without_locks  # type: ignore[assignment]
    socket.gethostname = lambda: f"machine-{number}"  # type: ignore[assignment]
    locks.host = lambda: f"machine {number}"  # type: ignore[assignment]


@pytest.mark.parametrize("place_writer", [here, elsewhere])
def test_four_writers_of_which_one_is_killed_leave_the_cache_of_one(
    tmp_path: Path, place_writer: Callable[[int], None]
) -> None:
    rows, place = cases.rows_of(LENGTHS), tmp_path / "shared"
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    open_store(place, cases.manifest())

    def write(number: int) -> None:
        place_writer(number)
        teacher: Slow = Mortal(tmp_path / "begun")
        while number and not (tmp_path / "begun").exists():
            time.sleep(0.01)
        if number:
            teacher = Other(batch_tokens=16)
            teacher.mark = tmp_path / "asked-others"
        assert write_missing(place, cases.needed(rows), teacher, patience_seconds=0.5)
        (tmp_path / f"asked-{number}").write_text(str(teacher.num_asked))

    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            os._exit(-tiny.in_child(lambda number=number: write(number)))  # type: ignore[misc]
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [signal.SIGKILL, 0, 0, 0]
    assert cases.contents(place) == sound
    assert Cache(place).has([row.key for row in cases.needed(rows)]).all()
    asked = [int((tmp_path / f"asked-{number}").read_text()) for number in (1, 2, 3)]
    assert min(asked) > 0


@pytest.mark.parametrize("host", ["another machine", None])
def test_a_shard_that_another_process_holds_is_left_to_it_while_it_may_be_alive(
    tmp_path: Path, host: str | None
) -> None:
    """What a machine that may be gone holds is written once nothing else is; what one of this machine holds, never."""
    rows = cases.rows_of([5, 6, 7])
    (shard,) = (cases.write(tmp_path / "sound", rows).folder / "shards").iterdir()
    place = tmp_path / "shared"
    open_store(place, cases.manifest())
    path = place / "shards" / f".tmp-{shard.stem}.lock"
    with hold(path):
        path.write_text(json.dumps(describe_process() | ({"host": host} if host else {})))
        begun, stops = time.monotonic(), [0.0]

        def is_stopped() -> bool:
            stops[0] = time.monotonic() - begun
            return stops[0] > 1.5

        is_done = write_missing(
            place, cases.needed(rows), cases.Matrices(), patience_seconds=0.2, is_stopped=is_stopped
        )
    assert is_done == (host is not None) and stops[0] > 0.2


def test_locks_of_written_shards_are_swept(tmp_path: Path) -> None:
    rows = cases.rows_of([5, 6, 7])
    folder = cases.write(tmp_path, cases.rows_of([4])).folder
    (shard,) = (folder / "shards").iterdir()
    (folder / "shards" / f".tmp-{shard.stem}.lock").write_text("{}")  # of a process that was killed
    assert write_missing(folder, cases.needed(rows), cases.Matrices())
    assert not list((folder / "shards").glob(".tmp-*"))


def test_a_writer_that_was_stopped_for_too_long_does_no_harm(tmp_path: Path) -> None:
    """Its claim was taken over, its shard written, and what it had laid aside removed: it ends without an error."""
    rows = cases.rows_of(LENGTHS[:20])
    sound = cases.contents(cases.write(tmp_path / "sound", rows).folder)
    place = tmp_path / "shared"
    open_store(place, cases.manifest())
    replaced = Path.replace

    def overtaken(self: Path, target: Any) -> Path:
        """Between writing aside and renaming, another writer does all the work."""
        Path.replace = replaced  # type: ignore[method-assign]
        Path(target).write_bytes(self.read_bytes())
        self.unlink()
        return replaced(self, target)

    Path.replace = overtaken  # type: ignore[method-assign]
    try:
        assert write_missing(place, cases.needed(rows), cases.Matrices())
    finally:
        Path.replace = replaced  # type: ignore[method-assign]
    assert cases.contents(place) == sound
