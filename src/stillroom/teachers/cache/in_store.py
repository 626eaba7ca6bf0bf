"""A cache in a store: a folder of this machine with the heads of all shards, and each shard once it is read.

The head of a shard says which rows it answers. A shard that is not here has a file of its whole size with the head
alone, and a mark beside it; it is brought when a row of it is asked for. So a run begins before its cache is here, and
brings only what it reads.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stillroom.errors import DataError, Interrupted
from stillroom.files import TEMPORARY, inside, is_hidden, write_atomically
from stillroom.remote import alone, as_url, copies_folder, is_in_store, key_of
from stillroom.stores.files import StoreFiles, check_empty
from stillroom.teachers.cache.format import SUFFIX, head_length
from stillroom.teachers.cache.manifest import NAME, SHARDS

_HEADS, _MARKS = ".heads", ".marks"
OURS = (".origin", _HEADS, _MARKS, ".lock")  # beside the cache in its folder; earlier versions wrote the first
_FIRST_BYTES = 1 << 16
_AT_ONCE = 8


_urls: dict[Path, str] = {}  # folders that this process opened by an address


class Origin:
    """Where the shards of a folder come from and go to."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.files = StoreFiles(url)

    @staticmethod
    def of(folder: Path) -> Origin | None:
        """None for a cache that lies on this machine alone: nothing in a folder says where its shards come from."""
        url = _urls.get(folder.absolute())
        return Origin(folder, url) if url is not None else None

    # -- reading -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the manifest, and the heads of shards that are not known here."""
        with alone(self.folder):
            names = self.files.entries()
            contents = self.files.read(NAME) if NAME in names else None
            if contents is None:
                check_empty(self.files, names)
            elif not self._is_same(contents):
                self._forget()
                write_atomically(self.folder / NAME, contents)
            shards = {
                name: told for name, told in names.items() if name.startswith(f"{SHARDS}/") and not is_hidden(name)
            }
            unknown = [name for name, told in shards.items() if not self._is_known(name, *told)]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda name: self._bring_head(name, *shards[name]), unknown))
            for head in self._heads():
                if f"{SHARDS}/{head.name}" not in shards:  # removed from the store
                    inside(self.folder / SHARDS, head.name).unlink(missing_ok=True)
                    head.unlink(missing_ok=True)

    def fetch(self, path: Path) -> None:
        """Bring a shard of which the head alone is here."""
        head = self._head(path)
        if not head.exists():
            return
        try:
            with alone(self.folder):
                if not head.exists():  # another process brought it meanwhile
                    return
                for leftover in path.parent.glob(f"{TEMPORARY}{path.name}-*"):  # of a process that was killed
                    leftover.unlink(missing_ok=True)
                self.files.get(f"{SHARDS}/{path.name}", path)
                head.unlink(missing_ok=True)
        except DataError as error:
            raise Interrupted(
                f"a shard of the teacher's cache cannot be brought: {error.what}",
                where=self.files.url,
                advice=["when the store answers, go on: stillroom resume RUN"],
            ) from error

    def learn(self, name: str) -> bool:
        """Whether the store has a shard. Its head is here then."""
        path = f"{SHARDS}/{name}{SUFFIX}"
        size = self.files.size(path)
        if size is not None and not inside(self.folder, path).exists():
            self._bring_head(path, size)
        return size is not None

    def _bring_head(self, name: str, size: int, mark: str = "") -> None:
        """A torn head is put here as it is, so that whoever opens it says so."""
        begin = self.files.begin(name, _FIRST_BYTES)
        length = head_length(begin)
        if length > len(begin):
            begin = self.files.begin(name, length)
        path = inside(self.folder, name)
        for place in (self._head(path), self._mark(path), path):
            place.parent.mkdir(parents=True, exist_ok=True)
        self._head(path).touch()
        self._mark(path).write_text(mark, encoding="ascii")
        aside = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(6)}")
        aside.write_bytes(begin[: length or len(begin)])
        os.truncate(aside, size)
        aside.replace(path)

    def _is_same(self, manifest: bytes) -> bool:
        try:
            return (self.folder / NAME).read_bytes() == manifest
        except FileNotFoundError:
            return False

    def _is_known(self, name: str, size: int, mark: str) -> bool:
        """Whether a file here is the store's. One without a mark was written here, or learned of: it gets the mark."""
        path = inside(self.folder, name)
        if not path.exists() or path.stat().st_size != size:
            return False
        try:
            known = self._mark(path).read_text(encoding="ascii")
        except FileNotFoundError:
            known = ""
        if not known:
            self._mark(path).parent.mkdir(parents=True, exist_ok=True)
            self._mark(path).write_text(mark, encoding="ascii")
        return known in ("", mark)

    def _forget(self) -> None:
        """Of another cache that was at this address."""
        for name in (SHARDS, _HEADS, _MARKS):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / NAME).unlink(missing_ok=True)

    def _mark(self, path: Path) -> Path:
        return self.folder / _MARKS / path.name

    def _head(self, path: Path) -> Path:
        return self.folder / _HEADS / path.name

    def _heads(self) -> Iterable[Path]:
        folder = self.folder / _HEADS
        return list(folder.iterdir()) if folder.exists() else []

    # -- writing -----------------------------------------------------------------------------------------

    def send(self, path: Path) -> None:
        """Send a shard that was written here, or the manifest: of several that begin a cache, the first one's stays."""
        if path.name != NAME:
            self.files.put(f"{SHARDS}/{path.name}", path)
        elif not self.files.create(NAME, path.read_bytes()):
            write_atomically(path, self.files.read(NAME) or b"")

    def send_rest(self) -> None:
        """What an earlier writer of this machine wrote and could not send."""
        there = self.files.names(SHARDS)
        for path in sorted((self.folder / SHARDS).glob(f"*{SUFFIX}")):
            if f"{SHARDS}/{path.name}" not in there and not self._head(path).exists():
                self.send(path)


def folder_of(place: str | Path) -> Path:
    """The folder of this machine for a cache: itself, or the one of an address, as the store is now."""
    if not is_in_store(place):
        return Path(place).expanduser()
    url = as_url(place)
    return attached(inside(copies_folder("caches") / key_of(url), url.rpartition("/")[2]), url)


def attached(folder: Path, url: str) -> Path:
    """A folder whose cache is that of an address."""
    folder.mkdir(parents=True, exist_ok=True)
    _urls[folder.absolute()] = url
    Origin(folder, url).refresh()
    return folder
