"""Who writes which shard: claims of processes on one machine or on many, which end when their owner does.

A claim is a file that names its owner, who renews its modification time. One that was not renewed for a while falls to
whoever looks at it, by that process's own clock: no clock and no process id of another machine is relied on. On one
machine the system's locks tell at once: a lock on one byte of a file is released when its process ends, however it
ends. Where a file system has no locks, or grants them on each machine for itself, claims are what there is.

A writer that was stopped for longer than a claim lasts, and goes on, writes a shard that another wrote meanwhile. That
is waste and no harm: it has the same bytes and is put into its place whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.files import TEMPORARY
from stillroom.stores.owner import host

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

LOCK, CLAIMS = "writers.lock", "claims"
LEASE_SECONDS = 180.0  # network file systems show another machine's changes after up to 60
_RENEWALS = 6  # in the time that a claim lasts
_TRIES = 20

_owners: set[str] = set()  # of this process


class Claims:
    """The claims of one writer. `waiting` is for the manifest, `trying` for a shard."""

    wait_seconds = 0.5  # for what others claimed

    def __init__(self, folder: Path, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.owner = secrets.token_hex(8)
        self._folder, self._lease_seconds = folder, lease_seconds
        self._handle = -1
        self._has_locks = fcntl is not None
        self._held: set[Path] = set()
        self._seen: dict[str, tuple[tuple[str, int], float]] = {}  # claims of others: (owner, renewed), since when
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None

    def __enter__(self) -> Claims:
        self._handle = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        _owners.add(self.owner)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
        with contextlib.suppress(OSError):  # not empty while others write
            (self._folder / CLAIMS).rmdir()
        _owners.discard(self.owner)
        os.close(self._handle)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this process alone has the manifest, where there are locks."""
        self._lock(0, waits=True)
        try:
            yield
        finally:
            self._unlock(0)

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[bool]:
        """Whether the shard of this name is ours inside."""
        place = 1 + int(name[:14], 16)
        if not self._lock(place, waits=False):
            yield False
            return
        path = self._folder / CLAIMS / name
        try:
            is_mine = self._claim(path)
            try:
                yield is_mine
            finally:
                if is_mine:
                    self._let_go(path)
        finally:
            self._unlock(place)

    def sweep(self, written: set[str]) -> None:
        """Remove claims of shards that are written: their owners ended before they could."""
        for path in self._listed():
            if path.name in written:
                path.unlink(missing_ok=True)

    def _listed(self) -> list[Path]:
        try:
            return list((self._folder / CLAIMS).iterdir())
        except OSError:
            return []

    def committed(self, path: Path) -> None:
        """A file was put into its place on this machine."""

    # -- claims ------------------------------------------------------------------------------------------

    def _claim(self, path: Path) -> bool:
        told = json.dumps({"owner": self.owner, "host": host(), "name": socket.gethostname(), "pid": os.getpid()})
        try:
            _create(path, told)
        except FileExistsError:
            if not self._is_abandoned(path):
                return False
            path.write_text(told, encoding="utf-8")
            if _read(path).get("owner") != self.owner:  # another took it in the same moment
                return False
        except OSError:  # a folder that cannot be written: the shard will tell, with advice
            return True
        self._held.add(path)
        self._renew()
        return True

    def _is_abandoned(self, path: Path) -> bool:
        """Whether a claim's owner ended: seen by the lock on this machine, else by a claim that is not renewed."""
        try:
            renewed, told = path.stat().st_mtime_ns, _read(path)
        except FileNotFoundError:  # given back in this moment: the next round finds it free, or the shard written
            return False
        owner = str(told.get("owner", ""))
        if owner in _owners:
            return False
        if self._has_locks and told.get("host") == host():
            return True  # we have the lock that it would have
        mark, now = (owner, renewed), time.monotonic()
        known = self._seen.get(path.name)
        if known is None or known[0] != mark:
            self._seen[path.name] = (mark, now)
            return False
        return now - known[1] >= self._lease_seconds

    def _let_go(self, path: Path) -> None:
        self._held.discard(path)
        with contextlib.suppress(OSError):
            if _read(path).get("owner") == self.owner:
                path.unlink()

    def _renew(self) -> None:
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._keep_renewing, name="stillroom-claims", daemon=True)
            self._renewing.start()

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._lease_seconds / _RENEWALS):
            for path in list(self._held):
                with contextlib.suppress(OSError):  # taken over, because this process was stopped for too long
                    os.utime(path)

    # -- locks -------------------------------------------------------------------------------------------

    def _lock(self, place: int, *, waits: bool) -> bool:
        if not self._has_locks:
            return True
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, place)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            self._has_locks = False
        return True

    def _unlock(self, place: int) -> None:
        if self._has_locks:
            fcntl.lockf(self._handle, fcntl.LOCK_UN, 1, place)

    def remove_leftovers(self, folder: Path, name: str) -> None:
        """What a writer of this very file left behind when it was killed. Only its owner may: see `trying`."""
        for path in folder.glob(f"{TEMPORARY}{name}-*"):
            path.unlink(missing_ok=True)


def _create(path: Path, told: str) -> None:
    """Raise FileExistsError where there is a claim. Another writer may remove the empty folder at any moment."""
    for _ in range(_TRIES):
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError), path.open("x", encoding="utf-8") as file:
            file.write(told)
            return
    raise FileNotFoundError(path)


def _read(path: Path) -> dict[str, Any]:
    """What a claim says; nothing where its owner ended while writing it."""
    try:
        told = json.loads(path.read_bytes())
    except (ValueError, FileNotFoundError):
        return {}
    return told if isinstance(told, dict) else {}
