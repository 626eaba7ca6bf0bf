"""Replace files and folders atomically, and durably once they are in place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from stillroom.errors import OutsideName

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".tmp-"
_TRIES = 5
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFIT = re.compile(r"[\\\x00-\x1f]|^[A-Za-z]:")  # another system's separators and drives, and control characters
_FULL_WORDS = re.compile(r"no space left|quota exceeded|os error (?:28|122)\b|file too large", re.IGNORECASE)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk. Libraries written in Rust say so only in the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return bool(_FULL_WORDS.search(str(error)))


def reason_of(error: BaseException) -> str:
    """The first line of an error's message, without the error number."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]


def inside(folder: Path, name: str) -> Path:
    """The path of a name that a file, a manifest or a store gave. Raise for one that is not a plain name below.

    Every such name is joined here: `..`, an absolute path or a drive would lead anywhere, and a hidden name is that of
    our own files beside those that are named.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(not part or part.startswith(".") or _UNFIT.search(part) for part in parts):
        raise OutsideName(
            f"{name!r} is no name of a file within {folder}",
            where="the name is from outside of this machine",
            advice=["do not use what names it: nobody's ordinary program writes such a name"],
        )
    return folder.joinpath(*parts)


def is_hidden(name: str) -> bool:
    """Whether a name of a listing is left out: a part of it begins with a dot. One with `..` is refused instead."""
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) and not {".", ".."} & {*parts}


def new_run_folder(name: str) -> Path:
    """A folder below `runs` that is not there yet, by a name and the time; two runs may begin in one second."""
    first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    folder, number = first, 2
    while folder.exists():
        folder, number = first.with_name(f"{first.name}-{number}"), number + 1
    return folder


def write_durably(path: Path, contents: bytes) -> dict[str, Any]:
    """Write a file and flush it to the disk. Return its size and sha256."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(contents).hexdigest(), "bytes": len(contents)}


def write_atomically(path: Path, contents: bytes, *, mark: str = "") -> None:
    """Replace a file: readers see the old one or the new one. A failed write leaves the old one.

    `mark` tells writers apart where they may be on several machines, whose process ids may be the same.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{mark or os.getpid()}")
    try:
        write_durably(temporary, contents)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def create_atomically(path: Path, contents: bytes) -> None:
    """Create a file that is whole from its first moment. Raise FileExistsError where there is one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(6)}")
    try:
        write_durably(temporary, contents)
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a disk without hard links
            with path.open("xb") as file:
                file.write(contents)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename durable. Does nothing on a platform that cannot open a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then remove it: a kill in between leaves no part of it under its name."""
    gone = folder.with_name(f"{TEMPORARY}gone-{folder.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def swap_in(temporary: Path, final: Path) -> None:
    """Move a folder into its place. The old one is kept under another name until then.

    After a kill between the two renames the place is empty; `mend` puts the old folder back.
    """
    retired = final.with_name(f"{TEMPORARY}old-{final.name}")
    shutil.rmtree(retired, ignore_errors=True)
    if final.exists():
        final.rename(retired)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def mend(folder: Path) -> int:
    """Undo replacements that a kill interrupted, and remove unfinished folders. Return how many there were.

    Only for the owner of the folder: it would also remove what another process is writing.
    """
    leftovers = [path for path in folder.glob(f"{TEMPORARY}*") if path.is_dir() and not path.is_symlink()]
    for path in leftovers:
        name = path.name.removeprefix(f"{TEMPORARY}old-")
        if name != path.name and not (folder / name).exists():
            path.rename(folder / name)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)
    return len(leftovers)


@contextlib.contextmanager
def replaced_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder; move it into place when the body succeeds. The old one stays until then.

    The parent folder must exist: one that was deleted is not made again.
    """
    _remove_abandoned(final)
    temporary, lock = _new_locked_folder(final)
    with _closing(lock):
        try:
            yield temporary
            for path in temporary.rglob("*"):
                if path.is_file():
                    _flush_file(path)
            flush_folder(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        swap_in(temporary, final)


@contextlib.contextmanager
def _closing(handle: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(handle)


def _new_locked_folder(final: Path) -> tuple[Path, int]:
    """(a new folder beside `final`, the handle of its lock). The lock ends with its process, on whatever machine.

    Another process may take the folder for abandoned before it is locked: then take another.
    """
    for _ in range(_TRIES):
        temporary = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}-{secrets.token_hex(4)}")
        temporary.mkdir()
        try:
            handle = os.open(temporary if fcntl is not None else os.devnull, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(handle) is not False and temporary.exists():
            return temporary, handle
        os.close(handle)
    raise FileExistsError(errno.EEXIST, "other processes remove what is begun here", str(final))


def _remove_abandoned(final: Path) -> None:
    """Remove unfinished folders whose process has ended: nobody holds their lock. Without locks nothing is removed."""
    ours = re.compile(re.escape(f"{TEMPORARY}{final.name}-") + r"\d+(-[0-9a-f]{8})?")  # earlier versions had no token
    for path in final.parent.iterdir():
        if not ours.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        with _closing(handle):
            if _lock(handle):
                shutil.rmtree(path, ignore_errors=True)


def _lock(handle: int) -> bool | None:
    """Whether a file or folder is locked by us now; None where the disk has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    with _closing(handle):
        os.fsync(handle)
