"""Files behind a URL (s3://, gs://, hf://, memory://, file://): copied to this machine by fsspec, and read from there.

A copy is used again while the store says the same of the file: size, and checksum or time. It is put into its place
whole, after its size was compared. Whatever is written to a store is written by the room `stores`; `refuse_url` names
what cannot be.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stillroom.errors import AddressUnusable, ConfigError, StillroomError
from stillroom.files import TEMPORARY, inside, is_hidden, reason_of

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash is left of two where a URL was taken for a path
_TRIES, _PAUSE = 5, 0.2  # seconds, doubled
_AT_ONCE = 8  # files that are copied together
# Packages whose errors are not OSErrors and mean that a store could not be asked.
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "huggingface_hub", "httpx", "httpcore", "requests")
_MARKS = ("ETag", "etag", "md5Hash", "md5", "checksum", "sha256", "version_id", "generation", "last_commit",
          "LastModified", "last_modified", "mtime", "updated", "created")  # fmt: skip


def is_url(spec: object) -> bool:
    return bool(_URL.match(str(spec)))


def as_url(place: object) -> str:
    """The address, also of one that was taken for a path and lost a slash. Without a slash at its end."""
    scheme, _, rest = str(place).partition(":/")
    is_path = scheme in ("file", "local") or ":///" in str(place)
    return f"{scheme}:///{rest.strip('/')}" if is_path else f"{scheme}://{rest.strip('/')}"


def is_below(address: str, allowed: str | None) -> bool:
    """Whether an address is an allowed one or lies below it. Names that lead up again lie below nothing."""
    if not allowed or {"..", "."} & {*address.split("/")}:
        return False
    return as_url(address) == as_url(allowed) or as_url(address).startswith(f"{as_url(allowed)}/")


def is_in_store(place: object) -> bool:
    """Whether a place is the address of a store and no folder of this machine that is called so."""
    return is_url(place) and not Path(str(place)).exists()


def refuse_url(place: object, what: str, where: str) -> None:
    """Raise for a folder that is to be written to, lies in a store, and cannot."""
    if is_in_store(place):
        scheme = str(place).split(":", 1)[0]
        raise ConfigError(
            f"{what} cannot be written to {scheme}: it needs files that are replaced at once and locks that end with "
            "their owner, and a store has neither",
            where=where,
            advice=["write it to a disk of this machine, and copy the finished folder to the store"],
        )


def copies_folder(name: str = "copies") -> Path:
    """Where copies are kept: in the user's cache folder, as XDG has it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stillroom" / name


def key_of(url: str) -> str:
    """A name for the files of an address on this machine."""
    return hashlib.blake2b(url.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store. `mark` changes when the file does, as far as the store says."""

    path: str  # in its store
    name: str  # below the folder that was asked for
    size: int
    mark: str


class Store:
    """One file system of fsspec, and a place in it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError(
                "the address of a store holds a name or a password",
                advice=["stores read their keys from the environment, or from files of their own"],
            )
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self.files, self.path = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"{parts.scheme}:// needs a package that is not installed: {reason_of(error)}",
                advice=["install it: pip install 'stillroom[s3]' for s3://, 'stillroom[gcs]' for gs://"],
            ) from error
        except ValueError as error:
            raise ConfigError(f"{parts.scheme}:// is no kind of store: {reason_of(error)}") from error

    def listed(self) -> list[RemoteFile]:
        """The file, or the files that a glob or a folder stands for, by name. Hidden ones are left out."""
        try:
            found = again(self._find, self.url)
        except ValueError as error:  # such as an address without a bucket
            raise AddressUnusable(
                f"{self.url} cannot be listed: {reason_of(error)}", advice=["check the address: s3://BUCKET/PATH"]
            ) from error
        if not found:
            raise AddressUnusable(
                f"{self.url} does not exist, or is empty", advice=["check the address, and who may read it"]
            )
        root = self._root(list(found))
        files = [
            RemoteFile(path, path[len(root) :].lstrip("/"), int(info.get("size") or 0), mark_of(info))
            for path, info in sorted(found.items())
        ]
        return [one for one in files if not is_hidden(one.name)]

    def _find(self) -> dict[str, Any]:
        self.files.invalidate_cache()
        if any(sign in self.path for sign in "*?["):
            found = self.files.glob(self.path, detail=True)
            return {path: info for path, info in found.items() if info.get("type") != "directory"}
        if self.files.isfile(self.path):
            return {self.path: self.files.info(self.path)}
        found = self.files.find(self.path, detail=True)
        return dict(found)

    def _root(self, paths: Sequence[str]) -> str:
        """What stands before every name: the folder that was asked for, or that of a file."""
        path = str(self.path)
        if list(paths) == [path]:
            return path.rpartition("/")[0]
        before = re.split(r"[*?\[]", path)
        return before[0].rpartition("/")[0] if len(before) > 1 else before[0].rstrip("/")

    def copy(self, file: RemoteFile, into: Path) -> None:
        """Copy a file, and put it into its place once it has the size that the store says."""
        aside = into.with_name(f"{TEMPORARY}{into.name}-{secrets.token_hex(6)}")

        def get() -> None:
            self.files.get_file(file.path, str(aside))
            if (size := aside.stat().st_size) != file.size:
                raise OSError(f"{size:,} bytes came of {file.size:,}")

        try:
            again(get, f"{self.url} ({file.name})")
            aside.replace(into)
        finally:
            aside.unlink(missing_ok=True)


def mark_of(info: dict[str, Any]) -> str:
    told = "".join(f"{name}={info[name]};" for name in _MARKS if info.get(name) is not None)
    return hashlib.blake2b(f"{info.get('size')};{told}".encode(), digest_size=12).hexdigest()


def is_trouble(error: BaseException) -> bool:
    """Whether an error says that a store could not be asked, and not that something here is wrong."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def again(
    work: Callable[[], Any],
    what: str,
    *,
    is_read: bool = True,
    end: type[StillroomError] = AddressUnusable,
    where: str = "",
) -> Any:
    """Do some work with a store that may fail for a moment. What is not there, or not allowed, is not tried again."""
    done = "read" if is_read else "written"
    for number in range(_TRIES):
        try:
            return work()
        except Exception as error:
            if not is_trouble(error):
                raise
            if isinstance(error, FileNotFoundError):
                reason = "does not exist" if is_read else f"cannot be written: {reason_of(error)}"
                raise end(f"{what} {reason}", where=where, advice=["check the address"]) from error
            if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
                reason = f"may not be {done}: {reason_of(error)}"
                raise end(f"{what} {reason}", where=where, advice=["check the store's keys"]) from error
            if number == _TRIES - 1:
                reason = f"cannot be {done}, in {_TRIES} tries: {reason_of(error)}"
                raise end(f"{what} {reason}", where=where, advice=["check the connection"]) from error
            time.sleep(_PAUSE * 2**number)
    raise AssertionError


def _all(_name: str) -> bool:
    return True


def local_copy(url: str, *, wanted: Callable[[str], bool] = _all, name: str = "") -> Path:
    """The folder with copies of a URL's files, as they are now. A file alone lies in it by its name.

    Processes of this machine wait for each other, so a file is copied once. `wanted` says which files are copied;
    `name` is that of a folder within, for files that are shown with the name of their folder.
    """
    store = Store(url)
    folder = copies_folder() / key_of(url)
    folder = inside(folder, name) if name else folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):
            files = store.listed()
            _remove_others(folder, {one.name for one in files})
            missing = [one for one in files if wanted(one.name) and not _is_same(folder, one)]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda one: _bring(store, one, folder), missing))
    except OSError as error:
        raise AddressUnusable(
            f"{url} cannot be copied to this machine: {reason_of(error)}",
            where=str(folder),
            advice=["free some space, or name another disk with XDG_CACHE_HOME"],
        ) from error
    return folder


def _bring(store: Store, file: RemoteFile, folder: Path) -> None:
    path, mark = inside(folder, file.name), _mark_path(folder, file.name)
    for place in (path, mark):
        place.parent.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    store.copy(file, path)
    mark.write_text(file.mark, encoding="ascii")


def _is_same(folder: Path, file: RemoteFile) -> bool:
    try:
        is_whole = inside(folder, file.name).stat().st_size == file.size
        return is_whole and _mark_path(folder, file.name).read_text(encoding="ascii") == file.mark
    except OSError:
        return False


def _mark_path(folder: Path, name: str) -> Path:
    return inside(folder / ".marks", f"{name}.mark")


def _remove_others(folder: Path, names: set[str]) -> None:
    """Files that are no longer in the store would be read as data."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".") and name not in names:
            path.unlink(missing_ok=True)
    for path in folder.rglob(f"{TEMPORARY}*"):  # of a process that was killed: only one copies at a time
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time, where the disk has locks."""
    with (folder / ".lock").open("a") as file:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
