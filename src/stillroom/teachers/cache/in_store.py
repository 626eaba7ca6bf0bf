"""A cache in a store: a local folder with the headers of all shards, and each shard once it is read.

The header of a shard lists its rows. A shard that was not downloaded is a sparse file of its full size with the header
alone, and a note says so; it is downloaded when one of its rows is read. So a run starts before its cache is here, and
downloads only what it reads.

Writers upload each shard when it is complete. A claim, a file that only one process can create, keeps two writers from
asking the teacher for the same rows. It is not a lock: a shard that two writers made has the same rows and is replaced
as a whole.
"""

from __future__ import annotations

import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stillroom.core.errors import DataError, Interrupted
from stillroom.core.files import TEMPORARY, inside, is_hidden, is_in_store, write_atomically
from stillroom.core.locks import alone
from stillroom.core.remote import HIDDEN, Store, as_url, copies_folder, key_of
from stillroom.teachers.cache.format import SUFFIX, head_length
from stillroom.teachers.cache.manifest import NAME, SHARDS

_NOTES, _CLAIMS = ".notes", f"{HIDDEN}/claims"
OURS = (".origin", "claims", _NOTES, ".lock")  # other files in the folder; earlier versions wrote the first two
_HEAD, _WHOLE = "head ", "whole "
_COPIES = "caches-2"  # earlier versions marked heads otherwise, in `caches`
_FIRST_BYTES = 1 << 16
_AT_ONCE = 8

_urls: dict[Path, str] = {}  # folders that this process opened by an address


class Origin:
    """The address that a folder's shards are downloaded from and uploaded to."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.store = Store(url)

    @staticmethod
    def of(folder: Path) -> Origin | None:
        """Return None for a local cache. Only the address the user gave counts, never a file in the folder."""
        url = _urls.get(folder.absolute())
        return Origin(folder, url) if url is not None else None

    # -- reading -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Download the manifest, and the headers of new shards."""
        with alone(self.folder):
            listed = self.store.entries()
            contents = self.store.read(NAME) if NAME in listed else None
            if contents is None:
                self.store.check_empty(listed)
            elif not (self.folder / NAME).exists() or (self.folder / NAME).read_bytes() != contents:
                for name in (SHARDS, _NOTES):  # from another cache at this address
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
                    inside(self.folder / SHARDS, note.name).unlink(missing_ok=True)  # no longer in the store
                    note.unlink(missing_ok=True)

    def fetch(self, path: Path) -> None:
        """Download a shard if only its header is here."""
        if not self._note(path).startswith(_HEAD):
            return
        try:
            with alone(self.folder):
                note = self._note(path)
                if not note.startswith(_HEAD):  # another process has downloaded it
                    return
                for leftover in path.parent.glob(f"{TEMPORARY}{path.name}-*"):  # left by a killed process
                    leftover.unlink(missing_ok=True)
                self.store.get(f"{SHARDS}/{path.name}", path)
                self._write_note(path, note.replace(_HEAD, _WHOLE))
        except DataError as error:
            raise Interrupted(
                f"a shard of the teacher's cache cannot be downloaded: {error.what}",
                where=self.store.url,
                advice=["when the store is reachable, continue: stillroom resume RUN"],
            ) from error

    def learn(self, name: str) -> bool:
        """Whether the store has a shard. Download its header if it is new."""
        path = f"{SHARDS}/{name}{SUFFIX}"
        size = self.store.size(path)
        if size is not None and not inside(self.folder, path).exists():
            self._bring_head(path, size)
        return size is not None

    def _bring_head(self, name: str, size: int, mark: str = "") -> None:
        """Download a header. A damaged one is kept as it is, so that opening the cache reports it."""
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
        """Whether the local file is the store's. A file without a mark was written here; record the mark."""
        path = inside(self.folder, name)
        if not path.exists() or path.stat().st_size != size:
            return False
        kind, _, known = (self._note(path) or _WHOLE).partition(" ")
        if not known:
            self._write_note(path, f"{kind} {mark}")
        return known in ("", mark)

    def _note(self, path: Path) -> str:
        """Read how much of a shard is here, and the store's mark. Empty for one that was written here."""
        try:
            return (self.folder / _NOTES / path.name).read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def _write_note(self, path: Path, text: str) -> None:
        (self.folder / _NOTES).mkdir(exist_ok=True)
        (self.folder / _NOTES / path.name).write_text(text, encoding="ascii")

    # -- writing -----------------------------------------------------------------------------------------

    def send(self, path: Path) -> None:
        """Upload a shard or the manifest. If several writers start a cache, the first manifest stays."""
        if path.name != NAME:
            self.store.put(f"{SHARDS}/{path.name}", path)
        elif not self.store.create(NAME, path.read_bytes()):
            write_atomically(path, self.store.read(NAME) or b"")

    def send_rest(self) -> None:
        """Upload shards that an earlier writer on this machine could not upload."""
        there = self.store.entries(SHARDS)
        for path in sorted((self.folder / SHARDS).glob(f"*{SUFFIX}")):
            if f"{SHARDS}/{path.name}" not in there and not self._note(path).startswith(_HEAD):
                self.send(path)

    def claim(self, name: str, owner: str) -> bool:
        """Claim a shard. Return False if another writer has claimed it."""
        return self.store.create(f"{_CLAIMS}/{name}", owner.encode("ascii"))

    def give_back(self, *names: str) -> None:
        self.store.remove(f"{_CLAIMS}/{name}" for name in names)

    def claimed(self) -> set[str]:
        return {name.rpartition("/")[2] for name in self.store.entries(_CLAIMS)}


def folder_of(place: str | Path) -> Path:
    """Return the local folder of a cache. For an address, update it from the store first."""
    if not is_in_store(place):
        return Path(place).expanduser()
    url = as_url(place)
    folder = inside(copies_folder(_COPIES) / key_of(url), url.rpartition("/")[2])
    folder.mkdir(parents=True, exist_ok=True)
    _urls[folder.absolute()] = url
    Origin(folder, url).refresh()
    return folder
