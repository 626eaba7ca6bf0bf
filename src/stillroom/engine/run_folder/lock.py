"""One owner for a run's folder: a lock on a file in it, which the system releases when the process ends.

The lock is flock's, which works on NFS under Linux too. On a file system without locks, check whether the process
named in the file is alive, which finds processes of this machine only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from stillroom.errors import ConfigError

try:
    import fcntl
except ImportError:  # not a Unix: check for the process instead
    fcntl = None  # type: ignore[assignment]

NAME = "run.lock"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_TRIES = 20

# Folders this process owns, with the thread. One thread may take a folder twice: the demo and the run in it.
_owned: dict[Path, tuple[int, FolderLock]] = {}
_guard = threading.Lock()


class FolderLock:
    """Ownership of a folder, from `take` to `release`."""

    def __init__(self, path: Path, handle: int, is_outer: bool = True) -> None:
        self.path = path
        self.is_outer = is_outer
        self._handle = handle

    def holds(self) -> bool:
        """Whether the lock file is still the one that was locked: not deleted, not created again."""
        try:
            return os.path.samestat(os.fstat(self._handle), self.path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Release the folder and remove the lock file."""
        if not self.is_outer:
            return
        with _guard:
            if _owned.pop(self.path, None) is None:
                return  # released already
        if self.holds():
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._handle)


def take(folder: Path) -> FolderLock:
    """Own a folder, or raise with the name of its owner. OSError where the file cannot be created."""
    path = folder.resolve() / NAME
    with _guard:
        if path in _owned:
            thread, lock = _owned[path]
            if thread != threading.get_ident():
                raise _taken(folder, _describe())
            return FolderLock(path, lock._handle, is_outer=False)
        lock = _open(folder, path)
        _owned[path] = (threading.get_ident(), lock)
        return lock


def is_held(folder: Path) -> bool | None:
    """Whether the process that the lock file names is alive; None where this machine cannot say. Takes no lock."""
    try:
        handle = os.open(folder / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        owner = _read(handle)
    finally:
        os.close(handle)
    if owner.get("host") != socket.gethostname():
        return None
    return _is_alive(owner)


def _open(folder: Path, path: Path) -> FolderLock:
    for _ in range(_TRIES):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(folder, handle)
        except BaseException:
            os.close(handle)
            raise
        lock = FolderLock(path, handle)
        if lock.holds():
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, json.dumps(_describe()).encode("utf-8"))
            return lock
        os.close(handle)  # its owner released it between open and lock
    raise _taken(folder, {})


def _lock(folder: Path, handle: int) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _HELD:
                raise _taken(folder, _read(handle)) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
    owner = _read(handle)
    if owner and _is_alive(owner):
        raise _taken(folder, owner)


def _describe() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds"),
    }


def _read(handle: int) -> dict[str, Any]:
    """The owner that the file names; empty where the file is empty or damaged."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        owner = json.loads(os.read(handle, 4096))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_alive(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    try:
        started = psutil.Process(int(owner.get("pid", -1))).create_time()
    except (psutil.Error, ValueError, TypeError):
        return False
    return datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds") == owner.get("started")


def _taken(folder: Path, owner: dict[str, Any]) -> ConfigError:
    who = "another process"
    if owner:
        who = f"process {owner.get('pid')} on {owner.get('host')}, started {owner.get('started')},"
    return ConfigError(
        f"{who} is training in {folder}",
        where="--out",
        advice=[
            "wait for it to end, or stop it: it saves, and the run can be resumed",
            "or choose another folder with --out",
        ],
    )
