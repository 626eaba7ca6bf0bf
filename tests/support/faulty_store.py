"""A store on this disk with faults: fsspec's local file system under the scheme faulty://."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyStore(LocalFileSystem):  # type: ignore[misc]
    """Faults are those of the class, so that every instance in a process has them."""

    protocol = "faulty"
    cachable = False
    is_away = False  # nothing is answered
    is_refused = False  # nothing may be written
    changed: list[str] = []  # noqa: RUF012 - ends of names whose bytes change on the way
    fail_every = 0  # of files that are sent, each n-th fails,
    recovers_after = 10**9  # until so many were sent
    torn: list[str] = []  # noqa: RUF012 - ends of names whose next sending is cut, and seems to succeed
    ignores_exclusive = False  # as stores do that do not know If-None-Match
    late: set[str] = set()  # noqa: RUF012 - ends of names that a listing does not show yet
    sent: list[str] = []  # noqa: RUF012 - names in the order in which they were sent

    def _ask(self) -> None:
        if FaultyStore.is_away:
            raise OSError("the connection was reset")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._ask()
        super().makedirs(path, exist_ok=exist_ok)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._ask()
        FaultyStore.sent.append(rpath)
        is_over = len(FaultyStore.sent) > FaultyStore.recovers_after
        if FaultyStore.fail_every and not is_over and len(FaultyStore.sent) % FaultyStore.fail_every == 0:
            raise OSError("503 slow down")
        if FaultyStore.is_refused:
            raise PermissionError(13, "access denied")
        if rpath.endswith(tuple(FaultyStore.changed)):
            Path(self._strip_protocol(rpath)).write_bytes(b"x" * Path(lpath).stat().st_size)
            return
        for end in FaultyStore.torn:
            if rpath.endswith(end):
                FaultyStore.torn.remove(end)
                Path(self._strip_protocol(rpath)).write_bytes(Path(lpath).read_bytes()[:-3])
                return
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._ask()
        super().pipe_file(path, value, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._ask()
        if FaultyStore.ignores_exclusive:
            mode = mode.replace("x", "w")
        return super().open(path, mode, **options)

    def find(self, path: str, **options: Any) -> Any:
        self._ask()
        found = super().find(path, **options)
        return {name: info for name, info in found.items() if not name.endswith(tuple(FaultyStore.late))}

    def info(self, path: str, **options: Any) -> Any:
        self._ask()
        return super().info(path, **options)

    def rm_file(self, path: str) -> None:
        self._ask()
        super().rm_file(path)


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """The store without faults, which a test sets; none are left behind."""

    def reset() -> None:
        FaultyStore.is_away, FaultyStore.fail_every, FaultyStore.ignores_exclusive = False, 0, False
        FaultyStore.torn, FaultyStore.late, FaultyStore.sent, FaultyStore.changed = [], set(), [], []
        FaultyStore.is_refused, FaultyStore.recovers_after = False, 10**9

    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    reset()
    try:
        yield FaultyStore
    finally:
        reset()
