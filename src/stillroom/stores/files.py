"""The files below one address of a store: each written whole, compared after it, and again where the store fails.

An object store replaces an object at once, and has no folders, no renaming and no locks. What it may have is creating
an object only where there is none (S3: If-None-Match), which is what `create` asks for.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.errors import AddressUnusable, CannotSave, ConfigError
from stillroom.files import create_atomically, write_atomically
from stillroom.remote import Store, again, is_trouble, mark_of

HIDDEN = ".stillroom"  # what the mirror and the lease keep beside the files of a folder
_READ_BACK = 1 << 20  # bytes up to which a file without a checksum of the store is read again
_PLAIN_MD5 = re.compile(r'^"?([0-9a-f]{32})"?$')
_CREATES = {"s3", "s3a", "gs", "gcs"}  # file systems that create an object only where there is none


@dataclass(frozen=True)
class Sums:
    """What is known of a file's contents."""

    num_bytes: int
    sha256: str
    md5: str = ""

    @staticmethod
    def of(path: Path) -> Sums:
        sha256, md5, num_bytes = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                sha256.update(chunk)
                md5.update(chunk)
                num_bytes += len(chunk)
        return Sums(num_bytes, sha256.hexdigest(), md5.hexdigest())


class StoreFiles:
    """Names are relative to the address. Every method tries again; an error is a StillroomError with advice."""

    def __init__(self, url: str) -> None:
        store = Store(url)
        self.url = url
        self._files, self._root = store.files, str(store.path).rstrip("/")
        self._creates: bool | None = None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # -- reading -----------------------------------------------------------------------------------------

    def names(self, under: str = "") -> dict[str, int]:
        """Sizes of all files by name, hidden ones too; of those in a folder where `under` names one."""
        return {name: size for name, (size, _mark) in self.entries(under).items()}

    def entries(self, under: str = "") -> dict[str, tuple[int, str]]:
        """The same with a mark that changes when the file does, as far as the store says."""

        def find() -> dict[str, tuple[int, str]]:
            self._files.invalidate_cache()
            try:
                found = self._files.find(self._path(under).rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root) + 1
            return {
                path[start:]: (int(info.get("size") or 0), mark_of(info))
                for path, info in found.items()
                if len(path) >= start
            }

        return dict(again(find, self.url))

    def size(self, name: str) -> int | None:
        """Asks for the file itself, because a listing may be late."""

        def ask() -> int | None:
            self._files.invalidate_cache()
            try:
                return int(self._files.info(self._path(name)).get("size") or 0)
            except FileNotFoundError:
                return None

        found: int | None = again(ask, f"{self.url}/{name}")
        return found

    def read(self, name: str) -> bytes | None:
        """The contents of a small file; None where there is none."""

        def cat() -> bytes | None:
            self._files.invalidate_cache()
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

        found: bytes | None = again(cat, f"{self.url}/{name}")
        return found

    def begin(self, name: str, num_bytes: int) -> bytes:
        """The first bytes of a file."""
        path = self._path(name)
        return bytes(again(lambda: self._files.cat_file(path, start=0, end=num_bytes), f"{self.url}/{name}"))

    def get(self, name: str, into: Path) -> None:
        """Copy a file here, whole: it has the size that the store says."""
        size = self.size(name)
        if size is None:
            raise AddressUnusable(f"{self.url}/{name} does not exist")
        into.parent.mkdir(parents=True, exist_ok=True)
        aside = into.with_name(f".tmp-{into.name}-{secrets.token_hex(6)}")

        def bring() -> None:
            self._files.get_file(self._path(name), str(aside))
            if (came := aside.stat().st_size) != size:
                raise OSError(f"{came:,} bytes came of {size:,}")

        try:
            again(bring, f"{self.url}/{name}")
            aside.replace(into)
        finally:
            aside.unlink(missing_ok=True)

    # -- writing -----------------------------------------------------------------------------------------

    def put(self, name: str, path: Path) -> Sums:
        """Send a file, and compare what is there: its size, and its checksum where the store has one."""
        sums = Sums.of(path)

        def send() -> None:
            self._make_folder(name)
            self._files.put_file(str(path), self._path(name))
            self._compare(name, sums, lambda: path.read_bytes())

        self._again(send, name)
        return sums

    def write(self, name: str, contents: bytes) -> None:
        sums = Sums(len(contents), "", hashlib.md5(contents, usedforsecurity=False).hexdigest())

        def send() -> None:
            self._make_folder(name)
            if self.is_disk:
                write_atomically(Path(self._path(name)), contents, mark=secrets.token_hex(6))
            else:
                self._files.pipe_file(self._path(name), contents)
            self._compare(name, sums, lambda: contents)

        self._again(send, name)

    def create(self, name: str, contents: bytes) -> bool:
        """Whether the file was created: False where there is one. `contents` are of this process alone."""

        def send() -> bool:
            self._make_folder(name)
            try:
                self._create(name, contents)
            except Exception as error:
                if not is_trouble(error) or (there := self.read(name)) is None:
                    raise
                return there == contents  # its answer may have been lost
            return True

        return bool(self._again(send, name))

    def _create(self, name: str, contents: bytes) -> None:
        if not self.creates:
            if self.size(name) is not None:
                raise FileExistsError(name)
            self._files.pipe_file(self._path(name), contents)
        elif self.is_disk:
            create_atomically(Path(self._path(name)), contents)
        elif self._is_of_fsspec():
            with self._files.open(self._path(name), "xb") as file:
                file.write(contents)
        else:
            self._files.pipe_file(self._path(name), contents, mode="create")

    def remove(self, names: Iterable[str]) -> None:
        for name in names:

            def drop(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):  # removed by an earlier try
                    self._files.rm_file(self._path(name))

            self._again(drop, name)

    def _again(self, work: Callable[[], Any], name: str) -> Any:
        return again(work, f"{self.url}/{name}", is_read=False, end=CannotSave)

    def _make_folder(self, name: str) -> None:
        """Where folders are real. An object store has none."""
        if self._is_of_fsspec():
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _compare(self, name: str, sums: Sums, contents: Callable[[], bytes]) -> None:
        self._files.invalidate_cache()
        info = self._files.info(self._path(name))
        if (size := int(info.get("size") or 0)) != sums.num_bytes:
            raise OSError(f"{size:,} bytes are there of {sums.num_bytes:,}")
        there = _md5_of(info)
        if there:
            if there != sums.md5:
                raise OSError(f"its MD5 is {there} there and {sums.md5} here")
        elif size <= _READ_BACK and self._files.cat_file(self._path(name)) != contents():
            raise OSError("it reads back as something else")

    # -- what the store can ------------------------------------------------------------------------------

    @property
    def is_disk(self) -> bool:
        """Whether it is a disk of this machine: files are put aside and renamed there, as everywhere on a disk."""
        from fsspec.implementations.local import LocalFileSystem

        return type(self._files) is LocalFileSystem

    def _is_of_fsspec(self) -> bool:
        """fsspec's own disk and memory, which have folders and open a file that must not be there."""
        from fsspec.implementations.local import LocalFileSystem
        from fsspec.implementations.memory import MemoryFileSystem

        return isinstance(self._files, LocalFileSystem | MemoryFileSystem)

    @property
    def creates(self) -> bool:
        """Whether the store creates a file only where there is none. Tried once: some stores ignore the condition."""
        if self._creates is None:
            protocol = self._files.protocol
            kinds = {protocol} if isinstance(protocol, str) else set(protocol)
            self._creates = bool(kinds & _CREATES) or self._is_of_fsspec()
            if self._creates:
                name = f"{HIDDEN}/try-{secrets.token_hex(8)}"
                self._creates = self.create(name, b"one") and not self.create(name, b"two")
                self.remove([name])
        return self._creates


def _md5_of(info: dict[str, Any]) -> str:
    """The MD5 of a file that the store tells; nothing where it tells none. A file sent in parts has another ETag."""
    found = _PLAIN_MD5.match(str(info.get("ETag") or info.get("etag") or ""))
    if found and not info.get("SSEKMSKeyId"):
        return found.group(1)
    try:
        return base64.b64decode(info["md5Hash"], validate=True).hex() if info.get("md5Hash") else ""
    except ValueError:
        return ""


def check_empty(files: StoreFiles, names: Iterable[str]) -> None:
    """Raise where an address holds files that are not ours."""
    others = sorted(name for name in names if not name.startswith(f"{HIDDEN}/"))
    if others:
        raise ConfigError(
            f"{files.url} is not empty and holds nothing of ours: {', '.join(others[:3])}",
            where="--out",
            advice=["choose another address with --out", "nothing in it was touched"],
        )
