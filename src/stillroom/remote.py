"""Files behind an address (s3://, gs://, hf://, memory://, file://), by fsspec: brought here, and sent from here.

Reading: a copy is used again while the store says the same of the file: size, and checksum or time. It is put into its
place whole, after its size was compared.

Writing: a run works in a folder of this machine (`Sender`), which is sent after each checkpoint and at the end. Files
that vouch for others are sent after them, and the commit, a manifest of all files, is sent last. An object store has no
folders, no renaming and no locks; what it may have is creating an object only where there is none (S3: If-None-Match).
One such object names the one process that writes (`Owner`).
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
from typing import Any
from urllib.parse import urlsplit

from stillroom.errors import AddressUnusable, CannotSave, ConfigError, OutsideName, StillroomError
from stillroom.files import (
    TEMPORARY,
    FileSum,
    Manifest,
    Stored,
    inside,
    is_hidden,
    reason_of,
    sum_of_file,
    write_atomically,
)
from stillroom.locks import alone, describe_owner, describe_process, has_ended

HIDDEN = ".stillroom"  # folder of our own files at an address: who owns it, and its last commit
OWNER, COMMIT = f"{HIDDEN}/owner.json", f"{HIDDEN}/commit.json"
OWNER_SECONDS = 120.0  # an owner on another machine that was silent for so long has ended
_RENEWALS = 6  # in that time
_TRIES, _PAUSE = 5, 0.2  # seconds, doubled
_AT_ONCE = 8  # files that are copied together
_READ_BACK = 1 << 20  # bytes up to which a file that was sent is read again
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # one slash is left of two where a URL was taken for a path
# Packages whose errors are not OSErrors and mean that a store could not be asked.
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "huggingface_hub", "httpx", "httpcore", "requests")
_CREATE = {"s3", "s3a", "gs", "gcs", "memory"}  # file systems that create a file only where there is none
_MARKS = ("ETag", "etag", "md5Hash", "md5", "checksum", "sha256", "version_id", "generation", "last_commit",
          "LastModified", "last_modified", "mtime", "updated", "created")  # fmt: skip
_MANIFEST, _CHECKPOINTS, _STUDENT = "manifest.json", "checkpoints/", "student/"
_NEVER_SENT = ("run.lock", "events.jsonl.tmp")
_LINKED = (_CHECKPOINTS, _STUDENT, "inputs/")  # files there are never written to again, only replaced


# -- addresses -------------------------------------------------------------------------------------------


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


# -- the files of an address -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store. `mark` changes when the file does, as far as the store says."""

    path: str  # in its store
    name: str  # below the address
    size: int
    mark: str


class Store:
    """The files below one address. Names are relative to it.

    Every method tries again where the store fails for a moment; an error is a StillroomError with advice.
    """

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

            self._files, path = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"{parts.scheme}:// needs a package that is not installed: {reason_of(error)}",
                advice=["install it: pip install 'stillroom[s3]' for s3://, 'stillroom[gcs]' for gs://"],
            ) from error
        except ValueError as error:
            raise ConfigError(f"{parts.scheme}:// is no kind of store: {reason_of(error)}") from error
        self._root = str(path).rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    # -- reading -----------------------------------------------------------------------------------------

    def entries(self, under: str = "") -> dict[str, RemoteFile]:
        """All files by name, hidden ones too; those of a folder where `under` names one. Empty where there is none."""
        found = self._ask(lambda: self._files.find(self._path(under), detail=True), under) or {}
        start = len(self._root) + 1
        files = [_file(path, path[start:], info) for path, info in sorted(found.items()) if len(path) >= start]
        return {file.name: file for file in files}

    def listed(self) -> list[RemoteFile]:
        """The file, or the files that a glob or a folder stands for, by name. Hidden ones are left out."""
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
        """The size of a file; None where there is none. Asks for the file itself, because a listing may be late."""
        info = self._ask(lambda: self._files.info(self._path(name)), name)
        return None if info is None else int(info.get("size") or 0)

    def read(self, name: str) -> bytes | None:
        """The contents of a small file; None where there is none."""
        contents = self._ask(lambda: self._files.cat_file(self._path(name)), name)
        return None if contents is None else bytes(contents)

    def _ask(self, work: Callable[[], Any], name: str = "") -> Any:
        """What the store says now; None where there is no such file."""

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
        """The first bytes of a file."""
        path = self._path(name)
        return bytes(again(lambda: self._files.cat_file(path, start=0, end=num_bytes), f"{self.url}/{name}"))

    def get(self, name: str, into: Path) -> None:
        """Copy a file here, whole."""
        size = self.size(name)
        if size is None:
            raise AddressUnusable(f"{self.url}/{name} does not exist")
        into.parent.mkdir(parents=True, exist_ok=True)
        self.copy(RemoteFile(self._path(name), name, size, ""), into)

    def copy(self, file: RemoteFile, into: Path) -> None:
        """Copy a file, and put it into its place once it has the size that the store says."""
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
        """Send a file, and compare what is there: its size, and of a small one its contents."""

        def send() -> None:
            self._make_folder(name)
            self._files.put_file(str(path), self._path(name))
            self._compare(name, path.stat().st_size, path.read_bytes)

        self._write(send, name)

    def write(self, name: str, contents: bytes) -> None:
        """Replace a small file, at once where the store does so."""

        def send() -> None:
            self._make_folder(name)
            if self._is_disk:
                write_atomically(Path(self._path(name)), contents, mark=secrets.token_hex(6))
            else:
                self._files.pipe_file(self._path(name), contents)
            self._compare(name, len(contents), lambda: contents)

        self._write(send, name)

    def create(self, name: str, contents: bytes, *, looks: bool = True) -> bool:
        """Whether a file was created: False where there is one. `contents` are of this process alone.

        `looks` for it before, because not every store knows the condition: of those, two that do so in the same moment
        both create it.
        """

        def send() -> bool:
            self._make_folder(name)
            try:
                if looks and self.size(name) is not None:
                    raise FileExistsError(name)
                if self._is_disk:  # fsspec would only look whether there is one
                    with self._files.open(self._path(name), "xb") as file:
                        file.write(contents)
                else:
                    self._files.pipe_file(self._path(name), contents, mode="create")
            except Exception as error:
                if not is_trouble(error) or (there := self.read(name)) is None:
                    raise
                return there == contents  # the answer to an earlier try may have been lost
            return True

        return bool(self._write(send, name))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:

            def drop(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):  # removed by an earlier try
                    self._files.rm_file(self._path(name))

            self._write(drop, name)

    def check_empty(self, names: Iterable[str]) -> None:
        """Raise where the address holds files that are not ours."""
        others = sorted(name for name in names if not name.startswith(f"{HIDDEN}/"))
        if others:
            raise ConfigError(
                f"{self.url} is not empty and holds nothing of ours: {', '.join(others[:3])}",
                where="--out",
                advice=["choose another address with --out", "nothing in it was touched"],
            )

    def _write(self, work: Callable[[], Any], name: str) -> Any:
        return again(work, f"{self.url}/{name}", is_read=False)

    @property
    def can_create(self) -> bool:
        """Whether this kind of store creates a file only where there is none."""
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
    """Whether an error says that a store could not be asked, and not that something here is wrong."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _CLIENTS


def again(work: Callable[[], Any], what: str, *, is_read: bool = True) -> Any:
    """Do some work with a store that may fail for a moment. What is not there, or not allowed, is not tried again."""
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
            if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
                reason = f"may not be {done}: {reason_of(error)}"
                raise end(f"{what} {reason}", advice=["check the store's keys"]) from error
            if number == _TRIES - 1:
                reason = f"cannot be {done}, in {_TRIES} tries: {reason_of(error)}"
                raise end(f"{what} {reason}", advice=["check the connection"]) from error
            time.sleep(_PAUSE * 2**number)
    raise AssertionError


# -- copies that are read --------------------------------------------------------------------------------


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


# -- one process writes ----------------------------------------------------------------------------------


_held: set[str] = set()  # owners of this process that are not released


class Owner:
    """This process as the only one that writes to an address, from `take` to `release`.

    One object names the owner, which renews it. It is created where there is none. One that is not renewed while this
    process watches it for `OWNER_SECONDS` is replaced; that of a process of this machine as soon as the process has
    ended. No clock of another machine counts.
    """

    def __init__(
        self, store: Store, *, seconds: float = OWNER_SECONDS, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._store, self._seconds, self._sleep = store, seconds, sleep
        self.token, self._count = secrets.token_hex(8), 0
        self.is_exclusive = store.can_create  # else two that begin in the same moment may both begin
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Owner:
        """Own the address, or raise with the name of its owner."""
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
        """Raise where another process has taken over: it would be two that write."""
        if self._read()[1].get("token") != self.token:
            raise CannotSave(
                f"another process has taken over {self._store.url}, because this one was silent for "
                f"{self._seconds:.0f} seconds",
                where=self._store.url,
                advice=["let the other process finish it", "or copy this one's folder to another address"],
            )

    def release(self) -> None:
        self._ended.set()
        _held.discard(self.token)
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(StillroomError):  # the store is away: the owner is silent from now on
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
        """Replace an owner that has ended. Of several that try, the one does that creates a file named after it."""
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
            return owner.get("token") not in _held  # released while the store was away
        if is_ended is not None:
            return is_ended
        for _ in range(_RENEWALS):
            self._sleep(self._seconds / _RENEWALS)
            if (now := self._store.read(OWNER)) != before:
                return now is None  # given back
        return True

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWALS):
            try:
                if self._read()[1].get("token") != self.token:
                    return
                self._store.write(OWNER, self._contents())
            except (StillroomError, OSError):
                continue  # the store is away; `check` tells before anything is sent

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
    """commit.json: all files of a run in a store. Sent after them."""

    id: str = ""


class Known(Stored):
    """Which commits of a store the folder of this machine goes on from, beside that folder."""

    sent: str = ""
    next: str = ""  # of a commit that may have been cut short

    @staticmethod
    def read(home: Path) -> Known:
        """What cannot be read is that of a machine that knows nothing: the store's files are brought then."""
        try:
            return Known.of(json.loads((home / "sent.json").read_bytes()))
        except (OSError, ValueError, RecursionError):
            return Known()

    def write(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / "sent.json", self.model_dump_json().encode("utf-8"))


def read_commit(store: Store) -> Commit | None:
    """The last commit of a run in a store; None before the first."""
    contents = store.read(COMMIT)
    try:
        return None if contents is None else Commit.parse(contents)
    except ValueError as error:
        raise AddressUnusable(
            f"{store.url}/{COMMIT} is damaged: {reason_of(error)}",
            advice=["remove it: the files beside it are then taken as they are"],
        ) from error


class Sender:
    """Sends a run's folder to a store: after each checkpoint by a thread, and at the end.

    A store that stays away costs nothing but time: the log says so once, and the next checkpoint sends all that is
    missing. `known` are the files that the store has, with their sums where they are known.
    """

    def __init__(self, store: Store, folder: Path, owner: Owner, known: Mapping[str, FileSum | None]) -> None:
        self.folder, self._store, self._owner, self._known = folder, store, owner, dict(known)
        self._staged = folder.parent / "staged"
        self._sums: dict[str, tuple[tuple[int, int, int], FileSum]] = {}  # of files that do not change
        self._write_note: Callable[[str], object] | None = None
        self._notes: list[str] = []
        self.num_commits = self.num_failed = 0
        self._is_away = False
        self._lost: BaseException | None = None  # raised in the thread of the run
        self._thread: threading.Thread | None = None

    def attach(self, log: Any) -> None:
        """Send after the checkpoints of a log, and note in it what goes wrong."""
        self._write_note = lambda text: log.write("note", text=text)
        log.listen(self.handle)

    def handle(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "run_end":
            return
        if self._lost is not None:
            raise self._lost
        while self._notes and self._write_note is not None:
            self._write_note(self._notes.pop(0))
        # A checkpoint that comes while another one is sent is left to the next: slow stores get fewer of them.
        if event["event"] == "checkpoint" and (self._thread is None or not self._thread.is_alive()):
            try:
                files = self._stage()
            except OSError as error:
                self._failed(f"its files cannot be put aside here: {reason_of(error)}")
                return
            self._thread = threading.Thread(target=self._work, args=(files,), name="stillroom-sender", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being sent."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Bring the store to the state of the folder. Raise where that fails: nothing here is lost."""
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
                self._notes.append(f"{self._store.url} takes files again, after {self.num_failed} failed commits")
            self._is_away = False
        except (StillroomError, OSError) as error:  # of the store, or of the disk here
            self._failed(_what(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours is raised where the run sees it
            self._lost = error

    def _failed(self, reason: str) -> None:
        self.num_failed += 1
        if not self._is_away:
            self._notes.append(
                f"{self._store.url} is not up to date, and the run goes on in {self.folder}: {reason}; tried again at "
                "every checkpoint"
            )
        self._is_away = True

    # -- a commit ----------------------------------------------------------------------------------------

    def _stage(self) -> dict[str, Path]:
        """Put all files aside as they are now: the log grows, and old checkpoints are removed, while they are sent.

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
            with contextlib.suppress(FileNotFoundError):  # a file that was removed in this moment
                if not name.startswith(_LINKED) or not _is_linked(path, aside):
                    shutil.copyfile(path, aside)
                files[name] = aside
        return files

    def _send(self, files: Mapping[str, Path]) -> None:
        try:
            self._owner.check()
        except CannotSave as error:  # taken over; a store that is away raises another error
            self._lost = error
            raise
        sums = {name: self._sum(name, path) for name, path in files.items()}
        todo = sorted((name for name, one in sums.items() if self._known.get(name) != one), key=_order)
        gone = sorted((name for name in self._known if name not in sums), key=_order, reverse=True)
        known = Known.read(self.folder.parent)
        if not todo and not gone and known.sent:
            return
        commit = Commit(id=secrets.token_hex(8), files=sums)
        Known(sent=known.sent, next=commit.id).write(self.folder.parent)
        # The manifest of a checkpoint that was saved again vouches for other files.
        self._store.remove(name for name in todo if name.endswith(f"/{_MANIFEST}") and name in self._known)
        for name in todo:
            self._store.put(name, files[name])
            self._known[name] = sums[name]
        self._store.write(COMMIT, commit.to_bytes())
        Known(sent=commit.id).write(self.folder.parent)
        self.num_commits += 1
        for name in gone:
            self._store.remove([name])
            self._known.pop(name)

    def _sum(self, name: str, path: Path) -> FileSum:
        if not name.startswith(_LINKED):
            return sum_of_file(path)
        told = path.stat()
        stamp = (told.st_size, told.st_mtime_ns, told.st_ino)
        if name not in self._sums or self._sums[name][0] != stamp:
            self._sums[name] = (stamp, sum_of_file(path))
        return self._sums[name][1]


def _order(name: str) -> tuple[int, str]:
    """Files that vouch for others come after them."""
    if name == "summary.json":
        return 3, name
    if name.startswith(_CHECKPOINTS):
        return (2 if name.endswith(f"/{_MANIFEST}") else 1), name
    return 0, name


def _is_linked(path: Path, aside: Path) -> bool:
    """Whether a hard link could be made; not every disk has them."""
    try:
        os.link(path, aside)
    except OSError:
        return False
    return True


def _what(error: BaseException) -> str:
    return error.what if isinstance(error, StillroomError) else reason_of(error)


# -- a run is read ---------------------------------------------------------------------------------------


def here(place: str | Path, *, needs: str = "student") -> Path:
    """The folder of this machine for a folder or an address: itself, or a copy of what is read.

    `needs`: `record` leaves out weights, `student` checkpoints, `all` nothing.
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
        except (ValueError, OSError) as error:  # a store replaces files one at a time
            raise AddressUnusable(
                f"the student in {url} is not of the run's last commit: {reason_of(error)}; it is being replaced, or "
                "that was cut short",
                advice=["try again in a moment", f"or finish it: stillroom resume {url}"],
            ) from error
    return folder


def add(place: str | Path, *paths: Path) -> None:
    """Send files that a command wrote into the copy of a run. Nothing is done for a folder of this machine."""
    if is_in_store(place):
        store = Store(as_url(place))
        for path in paths:
            if path.exists():
                store.put(path.name, path)


def may_be_owned(place: str | Path) -> bool | None:
    """Whether a run in a store has an owner: None where one is named, because it may have ended."""
    return None if Store(as_url(place)).size(OWNER) is not None else False
