"""Runs and models behind an address, copied here to be read; and what a command adds to such a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

from stillroom.errors import AddressUnusable
from stillroom.files import inside
from stillroom.remote import as_url, is_in_store, local_copy
from stillroom.stores.files import HIDDEN, StoreFiles
from stillroom.stores.index import Index

_STUDENT, _CHECKPOINTS = "student/", "checkpoints/"


def here(place: str | Path, *, needs: str = "student") -> Path:
    """The folder of this machine for a folder or an address: itself, or a copy of what is read.

    `needs`: `record` leaves out weights, `student` checkpoints, `all` nothing.
    """
    if not is_in_store(place):
        return Path(place)
    url = as_url(place)
    left_out = {"record": (_STUDENT, _CHECKPOINTS), "student": (_CHECKPOINTS,), "all": ()}[needs]
    folder = local_copy(url, wanted=lambda name: not name.startswith(left_out), name=url.rpartition("/")[2])
    if needs != "record":
        _check_student(url, folder)
    return folder


def _check_student(url: str, folder: Path) -> None:
    """Raise where the student is not that of one commit: a store replaces files one at a time."""
    index = Index.read(StoreFiles(url))
    for name, told in (index.files if index else {}).items():
        if name.startswith(_STUDENT) and _sha256(inside(folder, name)) != told["sha256"]:
            raise AddressUnusable(
                f"{url}/{name} is not of the run's last commit: the student is being replaced, or that was cut short",
                advice=["try again in a moment", f"or finish it: stillroom resume {url}"],
            )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def add(place: str | Path, *paths: Path) -> None:
    """Send files that a command wrote into the copy of a run. Nothing is done for a folder of this machine."""
    if is_in_store(place):
        files = StoreFiles(as_url(place))
        for path in paths:
            if path.exists():
                files.put(path.name, path)


def may_be_owned(place: str | Path) -> bool | None:
    """Whether a run in a store has an owner: None where there is a lease, because its owner may have ended."""
    names = StoreFiles(as_url(place)).names()
    return None if any(name.startswith(f"{HIDDEN}/lease-") for name in names) else False
