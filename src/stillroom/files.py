"""Files and folders that are replaced whole or not at all, and that survive a loss of power once they are there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEMPORARY = ".tmp-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = re.compile(r"no space left|quota exceeded|os error (?:28|122)\b|file too large", re.IGNORECASE)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error says that there is no room. Libraries written in Rust say it in words only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return bool(_FULL_WORDS.search(str(error)))


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, without Python's decoration."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text).splitlines()[0]


def write_durably(path: Path, contents: bytes) -> dict[str, Any]:
    """Write a file and flush it to the disk. Returns its size and sha256."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(contents).hexdigest(), "bytes": len(contents)}


def write_atomically(path: Path, contents: bytes) -> None:
    """Replace a file as a whole: readers see the old one or the new one. A failed write leaves the old one."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        write_durably(temporary, contents)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Make a rename durable. Not every platform can open a folder; then the rename alone must do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a kill in between leaves no half of it under its name."""
    gone = folder.with_name(f"{TEMPORARY}gone-{folder.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def swap_in(temporary: Path, final: Path) -> None:
    """Put a filled folder into its place. The one that was there stays beside it until the other is in.

    A kill between the two renames leaves the old one beside an empty place; `mend` puts it back.
    """
    retired = final.with_name(f"{TEMPORARY}old-{final.name}")
    shutil.rmtree(retired, ignore_errors=True)
    if final.exists():
        final.rename(retired)
    temporary.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(retired, ignore_errors=True)


def mend(folder: Path) -> int:
    """Undo replacements that a kill cut in two and remove what half-made folders it left. Returns how many.

    Only for the owner of the folder: what another process is just writing would go too.
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
    """Fill a folder aside and swap it in when the body succeeds; the old one stays until then.

    The folder around it must be there: one that was deleted is not made again.
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
