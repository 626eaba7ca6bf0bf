"""Replace files and folders atomically, and durably once they are in place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
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


def _flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
