"""Where built kernels are kept, and which of them may be loaded.

A library that is loaded runs with all the user's rights, and a truncated one ends the process with SIGBUS. So nothing
is loaded but a regular file of this user that nobody else can write to, in a folder of which the same is true, and
whose SHA-256 is the one in its name. The sum is part of the name because one rename then puts both in place: processes
that build at the same time cannot mix them up.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def choose_folder() -> tuple[Path, str]:
    """A folder that only this user can write to, and why it is not the usual one where it is not."""
    doubts: list[str] = []
    for folder in _candidates():
        doubt = _prepare(folder)
        if not doubt:
            return folder, "; ".join(doubts)
        doubts.append(doubt)
    folder = Path(tempfile.mkdtemp(prefix="stillroom-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, "; ".join(doubts or ["there is no home folder"])


def find(folder: Path, stem: str) -> tuple[Path | None, str]:
    """A kept library that may be loaded, and what was wrong with one that may not: that one is removed."""
    doubt = ""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        found = fault_of(path)
        if not found:
            return path, doubt
        doubt = f"{path} {found} and was removed"
        path.unlink(missing_ok=True)
    return None, doubt


def keep(made: Path, folder: Path, stem: str) -> Path:
    """Put a library into the folder, whole or not at all."""
    made.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path = folder / f"{stem}-{hashlib.sha256(made.read_bytes()).hexdigest()}.so"
    made.replace(path)
    return path


def fault_of(path: Path) -> str:
    """Why a library may not be loaded; empty where it may."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
            details = os.fstat(file.fileno())
            if not stat.S_ISREG(details.st_mode):
                return "is no regular file"
            doubt = _foreign(details)
            if doubt:
                return doubt
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if path.stem.endswith(f"-{digest}") else "does not have the checksum in its name"


def _candidates() -> Iterator[Path]:
    home = os.environ.get("STILLROOM_CACHE") or _absolute(os.environ.get("XDG_CACHE_HOME")) or _home_cache()
    if home:
        yield Path(home).absolute() / "stillroom" / "kernels"
    user = _user()
    if user is not None:
        yield Path(tempfile.gettempdir()) / f"stillroom-kernels-{user}"


def _absolute(path: str | None) -> str | None:
    """The XDG specification has relative paths ignored."""
    return path if path and Path(path).is_absolute() else None


def _home_cache() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and the user is not in the password file
        return None
    return home / ".cache" if home.is_absolute() else None


def _user() -> int | None:
    """None on systems without user numbers: there a folder in the user's profile is the user's own."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _prepare(folder: Path) -> str:
    """Make the folder where it does not exist. Why it cannot be used; empty where it can."""
    try:
        for path in (*reversed(folder.parents), folder):  # one by one: `parents=True` would not pass on the mode
            path.mkdir(exist_ok=True, mode=stat.S_IRWXU)
        details = folder.lstat()
        doubt = "is no folder" if not stat.S_ISDIR(details.st_mode) else _foreign(details)
        if not doubt and not os.access(folder, os.W_OK | os.X_OK):
            doubt = "cannot be written to"
        if doubt:
            return f"{folder} {doubt}"
        open_parent = next((path for path in folder.resolve().parents if _can_be_renamed_in(path.stat())), None)
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return f"{folder} can be replaced by others, who may write to {open_parent}" if open_parent else ""


def _foreign(details: os.stat_result) -> str:
    user = _user()
    if user is None:
        return ""
    if details.st_uid != user:
        return "belongs to another user"
    return "can be written to by other users" if details.st_mode & _OTHERS_WRITE else ""


def _can_be_renamed_in(details: os.stat_result) -> bool:
    """Whether anyone but this user and root may rename entries of a folder above ours: /tmp is sticky, so no."""
    user = _user()
    if user is None:
        return False
    is_open = details.st_mode & stat.S_IWOTH and not details.st_mode & stat.S_ISVTX
    return bool(is_open) or details.st_uid not in (0, user)
