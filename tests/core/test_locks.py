"""Laws of locks: one owner at a time, which is named, and none that outlives its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from stillroom.core import locks
from stillroom.core.locks import LockHeld, describe_process, has_ended, hold, hold_again, is_held


@pytest.fixture(params=[0, errno.ENOSYS, errno.ENOTSUP])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system with locks, and two without."""

    def without_locks(_handle: int, _kind: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param:
        monkeypatch.setattr(fcntl, "flock", without_locks)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


@pytest.fixture
def other(path: Path, kind: None) -> Iterator[int]:
    """Another process that holds the lock until it is killed."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        kept = hold(path)  # one that nobody refers to is released
        os.write(told, b"x")
        time.sleep(600)
        kept.release()
        os._exit(0)
    os.read(ready, 1)
    yield child
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_second_process_is_told_who_holds_the_lock(path: Path, other: int) -> None:
    with pytest.raises(LockHeld) as caught:
        hold(path)
    assert caught.value.owner["pid"] == other and caught.value.owner["name"] == socket.gethostname()


@pytest.mark.usefixtures("kind")
def test_a_lock_dies_with_its_process_and_its_file_goes_with_the_next(path: Path) -> None:
    assert tiny.in_child(lambda: [hold(path), os.kill(os.getpid(), signal.SIGKILL)]) == -9
    assert is_held(path) is not True
    with hold(path) as lock:
        assert lock.holds()
    assert list(path.parent.iterdir()) == []


@pytest.mark.usefixtures("kind")
def test_a_lock_whose_folder_was_deleted_or_replaced_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = hold(folder / "run.lock")
    folder.rename(tmp_path / "moved")
    assert not lock.holds()
    folder.mkdir()
    (folder / "run.lock").touch()
    (folder / "run.lock.soft").touch()
    assert not lock.holds()
    lock.release()
    assert (folder / "run.lock").exists(), "another's file is left alone"


def test_a_process_that_waits_gets_the_lock_when_its_owner_ends(path: Path, other: int) -> None:
    found = threading.Event()

    def wait() -> None:
        with hold(path, waits=True):
            found.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not found.wait(0.2)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)  # without locks, a process that was not waited for is not dead yet
    assert found.wait(30)


def test_one_thread_may_hold_a_lock_twice_and_another_may_not(path: Path) -> None:
    outer, found = hold_again(path), []

    def take() -> None:
        try:
            hold_again(path)
        except LockHeld as error:
            found.append(error.owner["pid"])

    hold_again(path).release()
    assert outer.holds(), "the inner one releases nothing"
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    outer.release()
    assert found == [os.getpid()] and not path.exists()


def test_whether_a_lock_is_held_is_known_without_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert is_held(path) is False, "there is no lock"
    with hold(path):
        assert is_held(path) is True
    path.write_text(json.dumps(describe_process() | {"host": "elsewhere"}), encoding="utf-8")
    assert is_held(path) is None, "another machine's processes cannot be seen"
    path.write_text("{damaged", encoding="utf-8")
    assert is_held(path) is None
    hold(path).release()


def test_a_living_process_is_alive_also_after_the_clock_was_set() -> None:
    told = describe_process()
    assert has_ended(told) is False and has_ended(told | {"began": told["began"] + 1.5}) is False


def test_a_process_that_ended_is_dead_and_so_is_one_whose_number_was_given_away() -> None:
    told = describe_process()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    assert has_ended(told | {"pid": child.pid})
    assert has_ended(told | {"pid": os.getppid(), "began": 1.0}), "another process has its number"


@pytest.mark.parametrize("over", [{"host": "another machine"}, {"processes": "another container"}])
def test_a_process_that_cannot_be_seen_from_here_is_not_judged(over: dict[str, str]) -> None:
    assert has_ended(describe_process() | {"pid": 2**22 - 7} | over) is None


def test_a_folder_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - any but a lock that is held
        hold(tmp_path / "missing" / "run.lock")
    assert not isinstance(caught.value, locks.LockHeld)
