"""Download files behind an address (s3://, gs://, hf://, memory://, file://) and upload runs to one, by fsspec.

Download: a local copy is reused while the store reports the same size and checksum or time. A new copy replaces the
old one only after its size was compared.

Upload: a run works in a local folder, which is sent after each checkpoint and at the end (`Sender`). A manifest is sent
after the files it lists; the commit, a manifest of the whole run, is sent last. An object store has no folders, no
rename and no locks. Most can create an object only if it does not exist (S3: If-None-Match): one such object names the
process that may write (`Owner`). A repository of the Hub has commits instead of both: core/hub.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from stillroom.core.errors import AddressUnusable, CannotSave, ConfigError, OutsideName, StillroomError
from stillroom.core.files import (
    TEMPORARY,
    FileSum,
    Manifest,
    Stored,
    inside,
    is_hidden,
    is_in_store,
    reason_of,
    sum_of_file,
    write_atomically,
)
from stillroom.core.locks import RUN_LOCK, alone, describe_owner, describe_process, has_ended

HIDDEN = ".stillroom"  # folder for our own files at an address: owner and last commit
OWNER, COMMIT = f"{HIDDEN}/owner.json", f"{HIDDEN}/commit.json"
OWNER_SECONDS = 120.0  # an owner on another machine that did not renew for this long is gone
_RENEWALS = 6  # in that time
_TRIES, _PAUSE = 5, 0.2  # seconds, doubled
_AT_ONCE = 8  # files that are copied together
_NO_KEYS, _REFUSED = ("NoCredentialsError", "LocalTokenNotFoundError"), (401, 403)
_READ_BACK = 1 << 20  # bytes up to which a file that was sent is read again
# Packages whose errors are not OSErrors and mean that a store could not be asked.
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "requests",
            "huggingface_hub", "hf_xet", "httpx", "httpx2", "httpcore", "httpcore2")  # fmt: skip
_CREATE = {"s3", "s3a", "gs", "gcs", "memory"}  # file systems that create a file only where there is none
_MARKS = ("ETag", "etag", "md5Hash", "md5", "checksum", "sha256", "version_id", "generation", "blob_id", "xet_hash",
          "last_commit", "LastModified", "last_modified", "mtime", "updated", "created")  # fmt: skip
_MANIFEST, _CHECKPOINTS, _STUDENT = "manifest.json", "checkpoints/", "student/"
_NEVER_SENT = (RUN_LOCK, "events.jsonl.tmp")
_LINKED = (_CHECKPOINTS, _STUDENT, "inputs/")  # files there are never written to again, only replaced


# -- addresses -------------------------------------------------------------------------------------------


def as_url(place: object) -> str:
    """Normalise an address: restore the slash that `Path` removed, drop a slash at the end."""
    scheme, _, rest = str(place).partition(":/")
    is_path = scheme in ("file", "local") or ":///" in str(place)
    return f"{scheme}:///{rest.strip('/')}" if is_path else f"{scheme}://{rest.strip('/')}"


def is_below(address: str, allowed: str | None) -> bool:
    """Whether an address is an allowed one or lies below it. A name with `..` lies below nothing."""
    if not allowed or {"..", "."} & {*address.split("/")}:
        return False
    return as_url(address) == as_url(allowed) or as_url(address).startswith(f"{as_url(allowed)}/")


def refuse_url(place: object, what: str, where: str) -> None:
    """Raise if an output that needs a local folder is the address of a store."""
    if is_in_store(place):
        scheme = str(place).split(":", 1)[0]
        raise ConfigError(
            f"{what} cannot be written to {scheme}: it needs atomic renames and locks, and a store has neither",
            where=where,
            advice=["write it to a disk of this machine, and copy the finished folder to the store"],
        )


def copies_folder(name: str = "copies") -> Path:
    """The folder for local copies, below XDG_CACHE_HOME."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stillroom" / name


def key_of(url: str) -> str:
    """Derive a folder name from an address."""
    return hashlib.blake2b(url.encode(), digest_size=8).hexdigest()


# -- the files of an address -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store. `mark` is a digest of size, checksum and time, as far as the store reports them."""

    path: str  # in its store
    name: str  # below the address
    size: int
    mark: str


class Store:
    """The files below one address, by names relative to it.

    Every method retries. What still fails is raised as a StillroomError with advice.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ConfigError(
                "the address of a store holds a name or a password",
                advice=["stores read their keys from the environment, or from their own files"],
            )
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self._files, path = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"{parts.scheme}:// needs a package that is not installed: {reason_of(error)}",
                advice=["install it: pip install 'stillroom[s3]' for s3://, 'stillroom[gcs]' for gs://"],
            ) from error
        except ValueError as error:
            raise ConfigError(f"{parts.scheme}:// is an unknown kind of store: {reason_of(error)}") from error
        self._root = str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # -- reading -----------------------------------------------------------------------------------------

    def entries(self, under: str = "") -> dict[str, RemoteFile]:
        """List all files below the address or its folder `under`, hidden ones included. Empty if it does not exist."""
        found = self._ask(lambda: self._files.find(self._path(under), detail=True), under) or {}
        start = len(self._root) + 1
        files = [_file(path, path[start:], info) for path, info in sorted(found.items()) if len(path) >= start]
        return {file.name: file for file in files}

    def listed(self) -> list[RemoteFile]:
        """List the files that the address stands for: one file, a glob or a folder. Hidden files are left out."""
        root = self._root
        if any(sign in root for sign in "*?["):
            root = re.split(r"[*?\[]", root)[0].rpartition("/")[0]
            found = self._ask(lambda: self._files.glob(self._root, detail=True)) or {}
            found = {path: info for path, info in found.items() if info.get("type") != "directory"}
        elif self._ask(lambda: self._files.isfile(self._root)):
            root = root.rpartition("/")[0]
            found = {self._root: self._ask(lambda: self._files.info(self._root))}
        else:
            found = self._ask(lambda: self._files.find(self._root, detail=True))
        if not found:
            raise AddressUnusable(
                f"{self.url} does not exist, or is empty", advice=["check the address, and who may read it"]
            )
        files = [_file(path, path[len(root) :].lstrip("/"), info) for path, info in sorted(found.items())]
        return [one for one in files if not is_hidden(one.name)]

    def size(self, name: str) -> int | None:
        """Ask for the size of a file, not a listing, which may be late. Return None if it does not exist."""
        info = self._ask(lambda: self._files.info(self._path(name)), name)
        return None if info is None else int(info.get("size") or 0)

    def read(self, name: str) -> bytes | None:
        """Read a small file. Return None if it does not exist."""
        contents = self._ask(lambda: self._files.cat_file(self._path(name)), name)
        return None if contents is None else bytes(contents)

    def _ask(self, work: Callable[[], Any], name: str = "") -> Any:
        """Ask the store, without its listing cache. Return None if the file does not exist."""

        def ask() -> Any:
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                return work()

        try:
            return again(ask, f"{self.url}/{name}" if name else self.url)
        except ValueError as error:  # such as an address without a bucket
            raise AddressUnusable(
                f"{self.url} cannot be read: {reason_of(error)}", advice=["check the address: s3://BUCKET/PATH"]
            ) from error

    def begin(self, name: str, num_bytes: int) -> bytes:
        """Read the first bytes of a file."""
        path = self._path(name)
        return bytes(again(lambda: self._files.cat_file(path, start=0, end=num_bytes), f"{self.url}/{name}"))

    def get(self, name: str, into: Path) -> None:
        """Download a file by name."""
        size = self.size(name)
        if size is None:
            raise AddressUnusable(f"{self.url}/{name} does not exist")
        into.parent.mkdir(parents=True, exist_ok=True)
        self.copy(RemoteFile(self._path(name), name, size, ""), into)

    def copy(self, file: RemoteFile, into: Path) -> None:
        """Download a file next to its place, compare its size, then rename it."""
        aside = into.with_name(f"{TEMPORARY}{into.name}-{secrets.token_hex(6)}")

        def bring() -> None:
            self._files.get_file(file.path, str(aside))
            if (size := aside.stat().st_size) != file.size:
                raise OSError(f"{size:,} bytes came of {file.size:,}")

        try:
            again(bring, f"{self.url} ({file.name})")
            aside.replace(into)
        finally:
            aside.unlink(missing_ok=True)

    # -- writing -----------------------------------------------------------------------------------------

    def put(self, name: str, path: Path) -> None:
        """Upload a file. Compare its size afterwards, and its contents if it is small."""

        def send() -> None:
            self._make_folder(name)
            self._files.put_file(str(path), self._path(name))
            self._compare(name, path.stat().st_size, path.read_bytes)

        self._write(send, name)

    def write(self, name: str, contents: bytes) -> None:
        """Replace a small file; atomically on S3, Google Cloud Storage, memory and disks."""

        def send() -> None:
            self._make_folder(name)
            if self._is_disk:
                write_atomically(Path(self._path(name)), contents, mark=secrets.token_hex(6))
            else:
                self._files.pipe_file(self._path(name), contents)
            self._compare(name, len(contents), lambda: contents)

        self._write(send, name)

    def create(self, name: str, contents: bytes, *, looks: bool = True) -> bool:
        """Create a file. Return False if it exists. `contents` must be unique to this process.

        `looks`: first check that it does not exist, for stores that ignore the condition. There, two processes that do
        this at the same time both create it.
        """

        def send() -> bool:
            self._make_folder(name)
            try:
                if looks and self.size(name) is not None:
                    raise FileExistsError(name)
                if self._is_disk:  # fsspec checks and then writes, which is not atomic
                    with self._files.open(self._path(name), "xb") as file:
                        file.write(contents)
                else:
                    self._files.pipe_file(self._path(name), contents, mode="create")
            except Exception as error:
                if not is_trouble(error) or (there := self.read(name)) is None:
                    raise
                return there == contents  # an earlier try may have succeeded without our seeing the answer
            return True

        return bool(self._write(send, name))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:

            def drop(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):  # removed by an earlier try
                    self._files.rm_file(self._path(name))

            self._write(drop, name)

    def send(self, files: Mapping[str, Path], commit: Commit, known: dict[str, FileSum | None]) -> None:
        """Upload the files of a commit that are not in `known`, then the commit. `known` follows each file."""
        todo = sorted((name for name, one in commit.files.items() if known.get(name) != one), key=_order)
        # A checkpoint that was saved again must not be read with its old manifest.
        self.remove(name for name in todo if name.endswith(f"/{_MANIFEST}") and name in known)
        for name in todo:
            self.put(name, files[name])
            known[name] = commit.files[name]
        self.write(COMMIT, commit.to_bytes())

    def own(self) -> Ownership:
        """Become the one that writes here, or raise ConfigError that names the owner."""
        return Owner(self).take()

    def prepare(self) -> list[str]:
        """Make the place for a run that begins. Return notes for its log."""
        return []

    def check_empty(self, names: Iterable[str]) -> None:
        """Raise if any of these names is not a hidden file of Stillroom."""
        others = sorted(name for name in names if not name.startswith(f"{HIDDEN}/"))
        if others:
            raise ConfigError(
                f"{self.url} is not empty and holds no Stillroom run or cache: {', '.join(others[:3])}",
                where="--out",
                advice=["choose another address with --out", "nothing in it was touched"],
            )

    def _write(self, work: Callable[[], Any], name: str) -> Any:
        return again(work, f"{self.url}/{name}", is_read=False)

    @property
    def can_create(self) -> bool:
        """Whether this kind of store supports creating a file only if it does not exist."""
        protocol = self._files.protocol
        kinds = {protocol} if isinstance(protocol, str) else {*protocol}
        return self._is_disk or bool(kinds & _CREATE)

    @property
    def _is_disk(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._files, LocalFileSystem)

    def _make_folder(self, name: str) -> None:
        """Where folders are real. An object store has none."""
        if self._is_disk:
            self._files.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _compare(self, name: str, size: int, contents: Callable[[], bytes]) -> None:
        self._files.invalidate_cache()
        there = int(self._files.info(self._path(name)).get("size") or 0)
        if there != size:
            raise OSError(f"{there:,} bytes are there of {size:,}")
        if size <= _READ_BACK and self._files.cat_file(self._path(name)) != contents():
            raise OSError("it reads back as something else")


def _file(path: str, name: str, info: Mapping[str, Any]) -> RemoteFile:
    told = "".join(f"{key}={info[key]};" for key in _MARKS if info.get(key) is not None)
    mark = hashlib.blake2b(f"{info.get('size')};{told}".encode(), digest_size=12).hexdigest()
    return RemoteFile(path, name, int(info.get("size") or 0), mark)


def is_trouble(error: BaseException) -> bool:
    """Whether an error comes from a store or the network, and not from a bug here."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def again(work: Callable[[], Any], what: str, *, is_read: bool = True) -> Any:
    """Call `work` with retries and backoff. A missing file or a refused permission is not retried."""
    end: type[StillroomError] = AddressUnusable if is_read else CannotSave
    done = "read" if is_read else "written"
    for number in range(_TRIES):
        try:
            return work()
        except Exception as error:
            if not is_trouble(error):
                raise
            if isinstance(error, FileNotFoundError):
                reason = "does not exist" if is_read else f"cannot be written: {reason_of(error)}"
                raise end(f"{what} {reason}", advice=["check the address"]) from error
            status = getattr(getattr(error, "response", None), "status_code", None)
            is_refused = isinstance(error, PermissionError) or type(error).__name__ in _NO_KEYS
            if is_refused or status in _REFUSED:
                reason = f"may not be {done}: {reason_of(error)}"
                keys = "check the store's keys; of hf:// it is HF_TOKEN or `hf auth login`"
                raise end(f"{what} {reason}", advice=[keys]) from error
            if number == _TRIES - 1:
                reason = f"cannot be {done}, in {_TRIES} tries: {reason_of(error)}"
                raise end(f"{what} {reason}", advice=["check the connection"]) from error
            time.sleep(_PAUSE * 2**number)
    raise AssertionError


# -- copies that are read --------------------------------------------------------------------------------


def _all(_name: str) -> bool:
    return True


def local_copy(url: str, *, wanted: Callable[[str], bool] = _all, name: str = "") -> Path:
    """Download the files of an address as they are now. Return the local folder.

    Processes on one machine wait for each other, so a file is downloaded once. `wanted` selects files by name; `name`
    is the folder's own name, for callers that show it.
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
    """Remove files that are no longer in the store: they would be read as data."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(".") and name not in names:
            path.unlink(missing_ok=True)
    for path in folder.rglob(f"{TEMPORARY}*"):  # left by a killed process: the lock is ours
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


# -- one process writes ----------------------------------------------------------------------------------


_held: set[str] = set()  # owners of this process that are not released


class Ownership(Protocol):
    """The right to write to an address."""

    is_exclusive: bool  # if False, two processes that start at the same time may both have it

    def check(self) -> None:
        """Raise CannotSave if another process has taken over."""

    def release(self) -> None: ...


class Owner:
    """Ownership of an address by this process, from `take` to `release`.

    The owner is named in one object, created only if it does not exist, which the owner rewrites every 20 seconds. An
    owner on this machine is replaced as soon as its process has ended; one on another machine if its object does not
    change for 120 seconds. This process measures that time itself, so clocks need not agree.
    """

    def __init__(
        self, store: Store, *, seconds: float = OWNER_SECONDS, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._store, self._seconds, self._sleep = store, seconds, sleep
        self.token, self._count = secrets.token_hex(8), 0
        self.is_exclusive = store.can_create
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Owner:
        """Become the owner, or raise ConfigError that names the owner."""
        if not self._store.create(OWNER, self._contents()):
            self._replace()
        elif self.is_exclusive and self._store.create(OWNER, b"{}", looks=False):
            self.is_exclusive = False  # some servers that speak S3 ignore the condition
            self._store.write(OWNER, self._contents())
        _held.add(self.token)
        self._thread = threading.Thread(target=self._keep_renewing, name="stillroom-owner", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raise CannotSave if another process has taken over."""
        if self._read()[1].get("token") != self.token:
            raise CannotSave(
                f"another process has taken over {self._store.url}, because this one did not renew its ownership for "
                f"{self._seconds:.0f} seconds",
                where=self._store.url,
                advice=["let the other process finish it", "or copy this one's folder to another address"],
            )

    def release(self) -> None:
        self._ended.set()
        _held.discard(self.token)
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(StillroomError):  # store unreachable: the ownership expires
            if self._read()[1].get("token") == self.token:
                self._store.remove([OWNER])

    def _contents(self) -> bytes:
        self._count += 1
        return json.dumps({"token": self.token, "renewed": self._count, **describe_process()}).encode("ascii")

    def _read(self) -> tuple[bytes | None, dict[str, Any]]:
        contents = self._store.read(OWNER)
        try:
            owner = json.loads(contents or b"{}")
        except (ValueError, RecursionError):
            owner = {}
        return contents, owner if isinstance(owner, dict) else {}

    def _replace(self) -> None:
        """Replace an owner that has ended. A file named after its last renewal decides between several candidates."""
        before, owner = self._read()
        if before is not None and not self._is_abandoned(before, owner):
            raise self._taken(owner)
        lock = f"{HIDDEN}/taken-{hashlib.blake2b(before or b'', digest_size=8).hexdigest()}"
        if not self._store.create(lock, self.token.encode("ascii")):
            raise self._taken({})
        try:
            there = self._store.read(OWNER)
            if there is not None and there == before:
                self._store.write(OWNER, self._contents())
            elif there is not None or not self._store.create(OWNER, self._contents()):
                raise self._taken({})
        finally:
            self._store.remove([lock])

    def _is_abandoned(self, before: bytes, owner: Mapping[str, Any]) -> bool:
        is_ended = has_ended(owner)
        if is_ended is False and owner.get("pid") == os.getpid():
            return owner.get("token") not in _held  # released while the store was unreachable
        if is_ended is not None:
            return is_ended
        for _ in range(_RENEWALS):
            self._sleep(self._seconds / _RENEWALS)
            if (now := self._store.read(OWNER)) != before:
                return now is None  # released
        return True

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWALS):
            try:
                if self._read()[1].get("token") != self.token:
                    return
                self._store.write(OWNER, self._contents())
            except (StillroomError, OSError):
                continue  # store unreachable; `check` runs before anything is sent

    def _taken(self, owner: Mapping[str, Any]) -> ConfigError:
        return ConfigError(
            f"{describe_owner(owner)} is writing to {self._store.url}",
            where="--out",
            advice=[
                "wait for it to end, or stop it: it saves, and can be resumed",
                "or choose another address with --out",
                f"if nothing writes there any more, remove {self._store.url}/{HIDDEN}/ but for commit.json",
            ],
        )


# -- a run is sent ---------------------------------------------------------------------------------------


class Commit(Manifest):
    """commit.json: the manifest of a run in a store, sent after all files."""

    id: str = ""


class Known(Stored):
    """sent.json next to the local folder: the commit of the store that the folder continues."""

    sent: str = ""
    next: str = ""  # a commit whose upload may have been interrupted

    @staticmethod
    def read(home: Path) -> Known:
        """Read the file. If it is missing or damaged, nothing is known and the store's files are downloaded."""
        try:
            return Known.of(json.loads((home / "sent.json").read_bytes()))
        except (OSError, ValueError, RecursionError):
            return Known()

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / "sent.json", self.model_dump_json().encode("utf-8"))


def read_commit(store: Store) -> Commit | None:
    """Read the last commit of a run in a store. Return None before the first."""
    contents = store.read(COMMIT)
    try:
        return None if contents is None else Commit.parse(contents)
    except ValueError as error:
        raise AddressUnusable(
            f"{store.url}/{COMMIT} is damaged: {reason_of(error)}",
            advice=["remove it: the other files are then used as they are"],
        ) from error


class Sender:
    """Uploads a run's folder: in a thread after each checkpoint, and at the end.

    A failed upload does not stop the run: it is logged once, and the next checkpoint sends all that is missing. `known`
    are the files in the store, with their sums or None.
    """

    def __init__(self, store: Store, folder: Path, owner: Ownership, known: Mapping[str, FileSum | None]) -> None:
        self.folder, self._store, self._owner, self._known = folder, store, owner, dict(known)
        self._staged = folder.parent / "staged"
        self._sums: dict[str, tuple[tuple[int, int, int], FileSum]] = {}  # by (size, time, inode)
        self._write_note: Callable[[str], object] | None = None
        self._notes: list[str] = []
        self.num_failed = 0
        self._is_away = False
        self._lost: BaseException | None = None  # raised in the thread of the run
        self._thread: threading.Thread | None = None

    def attach(self, log: Any) -> None:
        """Upload after each checkpoint event of a log. Log failures as notes."""
        self._notes += self._store.prepare()
        self._write_note = lambda text: log.write("note", text=text)
        log.listen(self.handle)

    def handle(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "run_end":
            return
        if self._lost is not None:
            raise self._lost
        while self._notes and self._write_note is not None:
            self._write_note(self._notes.pop(0))
        # A checkpoint saved during an upload is sent with the next one, so a slow store gets fewer.
        if event["event"] == "checkpoint" and (self._thread is None or not self._thread.is_alive()):
            try:
                files = self._stage()
            except OSError as error:
                self._failed(f"its files cannot be copied locally: {reason_of(error)}")
                return
            self._thread = threading.Thread(target=self._work, args=(files,), name="stillroom-sender", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for the upload in progress."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Upload the folder's final state. Raise CannotSave if that fails; the local folder is complete."""
        self.wait()
        if not (self.folder / "config.json").exists():
            return  # a run that could not begin leaves nothing
        try:
            self._send(self._stage())
        except (StillroomError, OSError) as error:
            self.num_failed += 1
            raise CannotSave(
                f"{self._store.url} does not have all of the run: {_what(error)}",
                where=str(self.folder),
                advice=[
                    f"nothing is lost, the run is in {self.folder}",
                    f"when the store answers, send what is missing: stillroom resume {self._store.url}",
                ],
            ) from error
        finally:
            shutil.rmtree(self._staged, ignore_errors=True)

    def _work(self, files: Mapping[str, Path]) -> None:
        try:
            self._send(files)
            if self._is_away:
                self._notes.append(f"{self._store.url} is reachable again, after {self.num_failed} failed uploads")
            self._is_away = False
        except (StillroomError, OSError) as error:  # of the store or the local disk
            self._failed(_what(error))
        except Exception as error:  # noqa: BLE001 - a bug is raised in the thread of the run
            self._lost = error

    def _failed(self, reason: str) -> None:
        self.num_failed += 1
        if not self._is_away:
            self._notes.append(
                f"{self._store.url} is not up to date, and the run continues in {self.folder}: {reason}; retried at "
                "every checkpoint"
            )
        self._is_away = True

    # -- a commit ----------------------------------------------------------------------------------------

    def _stage(self) -> dict[str, Path]:
        """Take a snapshot of all files by hard links and copies: during the upload the log grows and checkpoints go.

        Called when no checkpoint is being written.
        """
        shutil.rmtree(self._staged, ignore_errors=True)
        files = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if name in _NEVER_SENT or is_hidden(name) or path.is_symlink() or not path.is_file():
                continue
            aside = self._staged / path.relative_to(self.folder)
            aside.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                if not name.startswith(_LINKED) or not _is_linked(path, aside):
                    shutil.copyfile(path, aside)
                files[name] = aside
        return files

    def _send(self, files: Mapping[str, Path]) -> None:
        try:
            self._owner.check()
        except CannotSave as error:  # taken over; an unreachable store raises AddressUnusable
            self._lost = error
            raise
        sums = {name: self._sum(name, path) for name, path in files.items()}
        known = Known.read(self.folder.parent)
        if self._known == sums and known.sent:
            return
        commit = Commit(id=secrets.token_hex(8), files=sums)
        Known(sent=known.sent, next=commit.id).write(self.folder.parent)
        self._store.send(files, commit, self._known)
        Known(sent=commit.id).write(self.folder.parent)
        for name in sorted(self._known.keys() - sums.keys(), key=_order, reverse=True):
            self._store.remove([name])
            self._known.pop(name)

    def _sum(self, name: str, path: Path) -> FileSum:
        if not name.startswith(_LINKED):
            return sum_of_file(path)
        found = path.stat()
        stamp = (found.st_size, found.st_mtime_ns, found.st_ino)
        if name not in self._sums or self._sums[name][0] != stamp:
            self._sums[name] = (stamp, sum_of_file(path))
        return self._sums[name][1]


def _order(name: str) -> tuple[int, str]:
    """Sort manifests after the files they list, and the summary last."""
    if name == "summary.json":
        return 3, name
    if name.startswith(_CHECKPOINTS):
        return (2 if name.endswith(f"/{_MANIFEST}") else 1), name
    return 0, name


def _is_linked(path: Path, aside: Path) -> bool:
    """Make a hard link. Return False if the disk does not support it."""
    try:
        os.link(path, aside)
    except OSError:
        return False
    return True


def _what(error: BaseException) -> str:
    return error.what if isinstance(error, StillroomError) else reason_of(error)


# -- a run is read ---------------------------------------------------------------------------------------


def here(place: str | Path, *, needs: str = "student") -> Path:
    """Return a local folder: the folder itself, or for an address a copy of what is read.

    `needs`: `record` leaves out weights, `student` leaves out checkpoints, `all` leaves out nothing.
    """
    if not is_in_store(place):
        return Path(place)
    url = as_url(place)
    left_out = {"record": (_STUDENT, _CHECKPOINTS), "student": (_CHECKPOINTS,), "all": ()}[needs]
    folder = local_copy(url, wanted=lambda name: not name.startswith(left_out), name=url.rpartition("/")[2])
    commit = read_commit(Store(url)) if needs != "record" else None
    if commit is not None:
        student = {name: one for name, one in commit.files.items() if name.startswith(_STUDENT)}
        try:
            Manifest(files=student).check(folder)
        except OutsideName:
            raise
        except (ValueError, OSError) as error:  # a store replaces files one by one
            raise AddressUnusable(
                f"the student in {url} does not match the run's last commit: {reason_of(error)}; an upload is running "
                "or was interrupted",
                advice=["try again in a moment", f"or finish it: stillroom resume {url}"],
            ) from error
    return folder


def add(place: str | Path, *paths: Path) -> None:
    """Upload files that a command wrote into the local copy of a run. Do nothing for a local folder."""
    if is_in_store(place):
        store = Store(as_url(place))
        for path in paths:
            if path.exists():
                store.put(path.name, path)


def may_be_owned(place: str | Path) -> bool | None:
    """Whether a run in a store has an owner. None if one is named, because it may have ended; the Hub names none."""
    url = as_url(place)
    return None if url.startswith("hf://") or Store(url).size(OWNER) is not None else False
