"""Claims of writers over one store: leases of shards, where the store creates a file only if there is none.

Where it does not, one writer at a time owns the whole cache, as far as it can tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from stillroom.stores.files import HIDDEN
from stillroom.stores.lease import LEASE_SECONDS as STORE_LEASE_SECONDS
from stillroom.stores.lease import Lease, Seen
from stillroom.teachers.cache.claims import LEASE_SECONDS, Claims
from stillroom.teachers.cache.in_store import Origin


class StoreClaims(Claims):
    """Claims on this machine and in the store. `folders` are those of one pass: the first one's claims count."""

    wait_seconds = 5.0

    def __init__(self, origins: Sequence[Origin], *, lease_seconds: float) -> None:
        super().__init__(origins[0].folder, lease_seconds=lease_seconds)
        self._origins = {origin.folder: origin for origin in origins}
        self._files = origins[0].files
        self._seen_there: dict[str, Seen] = {}
        self._whole: Lease | None = None

    def __enter__(self) -> StoreClaims:
        if not self._files.creates:
            self._whole = Lease(self._files).take()
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._whole is not None:
            self._whole.release()

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[bool]:
        with super().trying(name) as is_mine, contextlib.ExitStack() as stack:
            if is_mine and not self._is_there(name) and self._whole is None:
                seconds = min(self._lease_seconds, STORE_LEASE_SECONDS)
                lease = Lease(self._files, under=f"{HIDDEN}/claims/{name}", seconds=seconds)
                is_mine = lease.attempt(self._seen_there.setdefault(name, {}))
                if is_mine:
                    stack.callback(lease.release)
            yield is_mine and not self._is_there(name)

    def _is_there(self, name: str) -> bool:
        is_there = [origin.learn(name) for origin in self._origins.values()]  # the heads of all of them are wanted
        return all(is_there)

    def sweep(self, written: set[str]) -> None:
        super().sweep(written)
        claims = self._files.names(f"{HIDDEN}/claims")
        self._files.remove(name for name in claims if name.split("/")[2] in written)

    def committed(self, path: Path) -> None:
        folder = path.parent if path.parent in self._origins else path.parent.parent
        self._origins[folder].send(path)


def claims_of(folder: Path, beside: Sequence[Path] = (), *, lease_seconds: float = LEASE_SECONDS) -> Claims:
    """The claims of a writer: on this machine alone, or also in the store that the folders come from."""
    origins = [origin for origin in map(Origin.of, (folder, *beside)) if origin is not None]
    return StoreClaims(origins, lease_seconds=lease_seconds) if origins else Claims(folder, lease_seconds=lease_seconds)
