"""A cache in a store: a folder of this machine with the heads of all shards, and each shard once it is read.

The head of a shard says which rows it answers. A shard that is not here has a file of its whole size with the head
alone, and a note beside it; it is brought when a row of it is asked for. So a run begins before its cache is here, and
brings only what it reads.

Writers send each shard when it is written. A claim, a file that only one can create, keeps them from asking for the
same rows. It is no lock: a shard that two wrote has the same rows and is put into its place whole.
"""

from __future__ import annotations

import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stillroom.errors import DataError, Interrupted
from stillroom.files import TEMPORARY, inside, is_hidden, write_atomically
from stillroom.locks import alone
from stillroom.remote import HIDDEN, Store, as_url, copies_folder, is_in_store, key_of
from stillroom.teachers.cache.format import SUFFIX, head_length
from stillroom.teachers.cache.manifest import NAME, SHARDS

_NOTES, _CLAIMS = ".notes", f"{HIDDEN}/claims"
OURS = (".origin", "claims", _NOTES, ".lock")  # beside the cache in its folder; earlier versions wrote the first two
_HEAD, _WHOLE = "head ", "whole "
_COPIES = "caches-2"  # earlier versions marked heads otherwise, in `caches`
_FIRST_BYTES = 1 << 16
_AT_ONCE = 8

_urls: dict[Path, str] = {}  # folders that this process opened by an address


class Origin:
    """Where the shards of a folder come from and go to."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.store = Store(url)

    @staticmethod
    def of(folder: Path) -> Origin | None:
        """None for a cache that lies on this machine alone: nothing in a folder says where its shards come from."""
        url = _urls.get(folder.absolute())
        return Origin(folder, url) if url is not None else None

    # -- reading -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the manifest, and the heads of shards that are not known here."""
        with alone(self.folder):
            listed = self.store.entries()
            contents = self.store.read(NAME) if NAME in listed else None
            if contents is None:
                self.store.check_empty(listed)
            elif not (self.folder / NAME).exists() or (self.folder / NAME).read_bytes() != contents:
                for name in (SHARDS, _NOTES):  # of another cache that was at this address
                    shutil.rmtree(self.folder / name, ignore_errors=True)
                write_atomically(self.folder / NAME, contents)
            shards = {
                name: file for name, file in listed.items() if name.startswith(f"{SHARDS}/") and not is_hidden(name)
            }
            unknown = [file for name, file in shards.items() if not self._is_known(name, file.size, file.mark)]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda file: self._bring_head(file.name, file.size, file.mark), unknown))
            for note in (self.folder / _NOTES).glob(f"*{SUFFIX}"):
                if f"{SHARDS}/{note.name}" not in shards and self._note(note).startswith(_HEAD):
                    inside(self.folder / SHARDS, note.name).unlink(missing_ok=True)  # removed from the store
                    note.unlink(missing_ok=True)

    def fetch(self, path: Path) -> None:
        """Bring a shard of which the head alone is here."""
        if not self._note(path).startswith(_HEAD):
            return
        try:
            with alone(self.folder):
                note = self._note(path)
                if not note.startswith(_HEAD):  # another process brought it meanwhile
                    return
                for leftover in path.parent.glob(f"{TEMPORARY}{path.name}-*"):  # of a process that was killed
                    leftover.unlink(missing_ok=True)
                self.store.get(f"{SHARDS}/{path.name}", path)
                self._write_note(path, note.replace(_HEAD, _WHOLE))
        except DataError as error:
            raise Interrupted(
                f"a shard of the teacher's cache cannot be brought: {error.what}",
                where=self.store.url,
                advice=["when the store answers, go on: stillroom resume RUN"],
            ) from error

    def learn(self, name: str) -> bool:
        """Whether the store has a shard. Its head is here then."""
        path = f"{SHARDS}/{name}{SUFFIX}"
        size = self.store.size(path)
        if size is not None and not inside(self.folder, path).exists():
            self._bring_head(path, size)
        return size is not None

    def _bring_head(self, name: str, size: int, mark: str = "") -> None:
        """A torn head is put here as it is, so that whoever opens it says so."""
        path = inside(self.folder, name)
        begin = self.store.begin(name, _FIRST_BYTES)
        length = head_length(begin)
        if length > len(begin):
            begin = self.store.begin(name, length)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write_note(path, f"{_HEAD}{mark}")
        aside = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(6)}")
        aside.write_bytes(begin[: length or len(begin)])
        os.truncate(aside, size)
        aside.replace(path)

    def _is_known(self, name: str, size: int, mark: str) -> bool:
        """Whether a file here is the store's. One without a mark was written here, or learned of: it gets the mark."""
        path = inside(self.folder, name)
        if not path.exists() or path.stat().st_size != size:
            return False
        kind, _, known = (self._note(path) or _WHOLE).partition(" ")
        if not known:
            self._write_note(path, f"{kind} {mark}")
        return known in ("", mark)

    def _note(self, path: Path) -> str:
        """How much of a shard is here, and the store's mark of it. Empty for one that was written here."""
        try:
            return (self.folder / _NOTES / path.name).read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def _write_note(self, path: Path, text: str) -> None:
        (self.folder / _NOTES).mkdir(exist_ok=True)
        (self.folder / _NOTES / path.name).write_text(text, encoding="ascii")

    # -- writing -----------------------------------------------------------------------------------------

    def send(self, path: Path) -> None:
        """Send a shard that was written here, or the manifest: of several that begin a cache, the first one's stays."""
        if path.name != NAME:
            self.store.put(f"{SHARDS}/{path.name}", path)
        elif not self.store.create(NAME, path.read_bytes()):
            write_atomically(path, self.store.read(NAME) or b"")

    def send_rest(self) -> None:
        """Send what an earlier writer of this machine wrote and could not send."""
        there = self.store.entries(SHARDS)
        for path in sorted((self.folder / SHARDS).glob(f"*{SUFFIX}")):
            if f"{SHARDS}/{path.name}" not in there and not self._note(path).startswith(_HEAD):
                self.send(path)

    def claim(self, name: str, owner: str) -> bool:
        """Whether no other writer asks for the rows of a shard."""
        return self.store.create(f"{_CLAIMS}/{name}", owner.encode("ascii"))

    def give_back(self, *names: str) -> None:
        self.store.remove(f"{_CLAIMS}/{name}" for name in names)

    def claimed(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.store.entries(_CLAIMS)}


def folder_of(place: str | Path) -> Path:
    """The folder of this machine for a cache: itself, or the one of an address, as the store is now."""
    if not is_in_store(place):
        return Path(place).expanduser()
    url = as_url(place)
    folder = inside(copies_folder(_COPIES) / key_of(url), url.rpartition("/")[2])
    folder.mkdir(parents=True, exist_ok=True)
    _urls[folder.absolute()] = url
    Origin(folder, url).refresh()
    return folder
