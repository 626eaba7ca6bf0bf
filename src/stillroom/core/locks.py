"""Locks between processes: a locked file that names its owner.

The lock is flock's, by way of `filelock`: it ends with its process, however that ends, and works on NFS under Linux. On
a file system without flock, filelock's SoftFileLock is used: a file that only one process can create. It is removed if
it names a process of this machine that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

RUN_LOCK = "run.lock"  # in a run's folder: held by the process that trains there
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_SOFT = ".soft"  # suffix of the SoftFileLock
_SOFT_SECONDS = 600.0  # wait at most so long for it: its owner may be on a machine that is gone
_SAME_SECONDS = 5.0  # start times shift when the system clock is set


class LockHeld(BlockingIOError):
    """Another process holds a lock. `owner` is its description; empty if it cannot be read."""

    def __init__(self, path: Path, owner: Mapping[str, Any]) -> None:
        super().__init__(errno.EWOULDBLOCK, f"{describe_owner(owner)} holds {path.name}", str(path))
        self.owner = owner


class Lock:
    """A held lock, from `hold` to `release`."""

    def __init__(self, path: Path, lock: BaseFileLock, *, is_outer: bool = True) -> None:
        self.path, self._lock, self._is_outer = path, lock, is_outer
        self._file = Path(lock.lock_file)
        self._identity = _identity(self._file)

    def holds(self) -> bool:
        """Whether the lock file is still the one that was locked: neither deleted nor replaced."""
        return self._identity is not None and _identity(self._file) == self._identity

    def release(self) -> None:
        """Release the lock and remove its file. filelock makes a waiting process create a new one."""
        if not self._is_outer or not self._lock.is_locked:
            return
        with _guard:
            _reentrant.pop(self.path, None)
        # A SoftFileLock removes its own file; without flock, the file at `path` has no meaning.
        if self.holds():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._lock.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


# Locks that a thread may take again, by path: the demo owns its folder, and so does the run in it.
_reentrant: dict[Path, tuple[int, Lock]] = {}
_guard = threading.RLock()


def hold(path: Path, *, waits: bool = False) -> Lock:
    """Create and lock a file. If it is locked, wait (`waits`) or raise LockHeld."""
    return Lock(path, _acquired(path, waits=waits))


def hold_again(path: Path) -> Lock:
    """Lock a file that this thread may hold already. Only the outermost lock releases it."""
    path = path.resolve()
    with _guard:
        if path in _reentrant:
            thread, outer = _reentrant[path]
            if thread != threading.get_ident():
                raise LockHeld(path, describe_process())
            return Lock(path, outer._lock, is_outer=False)
        lock = hold(path)
        _reentrant[path] = (threading.get_ident(), lock)
        return lock


def is_held(path: Path) -> bool | None:
    """Whether the process that a lock names is alive; None if that is unknown here. Takes no lock."""
    if not path.exists() and not _soft_path(path).exists():
        return False
    is_ended = has_ended(owner_of(path))
    return None if is_ended is None else not is_ended


def _acquired(path: Path, *, waits: bool) -> BaseFileLock:
    path.parent.stat()  # raise for a deleted folder, which filelock would create
    lock: BaseFileLock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=-1 if waits else 0)
    except Timeout:
        raise LockHeld(path, owner_of(path)) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        lock = SoftFileLock(_soft_path(path), thread_local=False)
        try:
            lock.acquire(timeout=_SOFT_SECONDS if waits else 0)
        except Timeout:
            raise LockHeld(path, owner_of(path)) from None
    if not isinstance(lock, SoftFileLock):  # which has written its owner
        path.write_text(json.dumps(describe_process()), encoding="ascii")
    return lock


def _soft_path(path: Path) -> Path:
    return path.with_name(f"{path.name}{_SOFT}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -- who a process is ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def host() -> str:
    """Identify this machine until its next boot. Host names are not unique: containers share them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def describe_process() -> dict[str, Any]:
    """Describe this process, for a lock file."""
    began = _began(os.getpid())
    return {
        "host": host(),
        "name": socket.gethostname(),
        "processes": _namespace(),
        "pid": os.getpid(),
        "started": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "began": began,
    }


def describe_owner(owner: Mapping[str, Any]) -> str:
    """Format an owner for a message."""
    if not owner:
        return "another process"
    started = f", started {owner['started']}," if "started" in owner else ""
    return f"process {owner.get('pid')} on {owner.get('name')}{started}"


def has_ended(owner: Mapping[str, Any]) -> bool | None:
    """Whether a described process has ended; None if it is on another machine or in another container."""
    if owner.get("host") != host() or owner.get("processes") != _namespace():
        return None
    try:
        return abs(_began(int(owner["pid"])) - float(owner["began"])) > _SAME_SECONDS
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return True
    except psutil.Error:
        return None


def owner_of(path: Path) -> dict[str, Any]:
    """Read the owner from a lock file. Empty if there is none or it is damaged."""
    for file in (path, _soft_path(path)):
        with contextlib.suppress(OSError, ValueError):
            text = file.read_text(encoding="utf-8")[:4096]
            if not text.startswith("{"):  # written by SoftFileLock: pid and host name, one per line
                pid, name = text.splitlines()[:2]
                return {"pid": int(pid), "name": name}
            return dict(json.loads(text))
    return {}


def _began(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def _namespace() -> str:
    """Identify the PID namespace: a container sees only its own processes."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock one of our folders; other processes wait."""
    with hold(folder / ".lock", waits=True):
        yield
