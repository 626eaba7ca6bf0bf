"""Where a run works: its folder, or for an address of a store a folder of this machine that is sent there.

The folder of an address lies in the user's cache folder. Of several processes, the first brings and sends for all, so
they must be on one machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.config import Config
from stillroom.engine.run_folder import folder as run_folder
from stillroom.engine.run_folder.from_store import bring
from stillroom.engine.run_folder.trust import Trust
from stillroom.errors import BrokenAtStart, CannotSave, ConfigError, DataError, StillroomError
from stillroom.files import inside
from stillroom.remote import as_url, copies_folder, is_in_store, key_of
from stillroom.stores.files import StoreFiles
from stillroom.stores.lease import Lease
from stillroom.stores.mirror import Mirror


@dataclass(frozen=True)
class Place:
    """The folder that a run works in, and where it is sent to."""

    folder: Path
    url: str = ""
    mirror: Mirror | None = None  # of the first process
    notes: tuple[str, ...] = ()

    def read_config(self, trust: Trust) -> Config:
        """The configuration of the run. Another process than the first may be here before the run was brought."""
        is_other = bool(self.url) and self.mirror is None
        contents = StoreFiles(self.url).read(run_folder.CONFIG) if is_other else None
        return run_folder.read_config(self.folder, contents, trust=trust)


_open: dict[Path, Place] = {}  # addresses that this process works in


def folder_of(out: str | Path) -> Path:
    """The folder of this machine for a run's folder or address."""
    if not is_in_store(out):
        return Path(out)
    url = as_url(out)
    return inside(copies_folder("runs") / key_of(url), url.rpartition("/")[2] or "run")


@contextlib.contextmanager
def opened(out: str | Path) -> Iterator[Place]:
    """Work in a run's folder or address while the body runs. What it holds is sent when the body ends.

    A body inside of another of the same place gets the same place, and the outer one sends.
    """
    folder = folder_of(out)
    if folder in _open:
        yield _open[folder]
        return
    if not is_in_store(out):
        yield Place(folder)
        return
    url = as_url(out)
    _refuse_several_machines(url)
    if os.environ.get("RANK", "0") != "0":
        _open[folder] = Place(folder, url)
        try:
            yield _open[folder]
        finally:
            del _open[folder]
        return
    files = _reachable(url)
    lease = Lease(files).take()
    try:
        notes = bring(files, folder)
        if not files.creates:
            notes = (*notes, f"{url} cannot create a file only where there is none: nothing keeps two processes apart "
                             "that begin on it in the same moment")  # fmt: skip
        _open[folder] = Place(folder, url, Mirror(files, folder, folder.parent, lease), notes)
        yield from _sent(_open[folder])
    finally:
        _open.pop(folder, None)
        lease.release()


def _sent(place: Place) -> Iterator[Place]:
    """Send at the end. A body that failed keeps its own error, with the address for the folder in its advice."""
    assert place.mirror is not None
    try:
        yield place
    except Exception as error:
        trouble = ""
        try:
            place.mirror.finish()
        except CannotSave as unsent:
            trouble = f"{unsent.what}; it is in {place.folder}"
        if isinstance(error, StillroomError):
            here, there = str(place.folder), place.url
            error.what = error.what.replace(here, there)
            error.advice = (*(one.replace(here, there) for one in error.advice), *([trouble] if trouble else []))
        raise
    place.mirror.finish()


def _reachable(url: str) -> StoreFiles:
    """The files of an address, or the reason why they cannot be reached, before anything is begun."""
    try:
        files = StoreFiles(url)
        files.names()
        _ = files.creates
    except (DataError, CannotSave) as error:
        raise ConfigError(error.what, where="--out", advice=error.advice) from error
    return files


def _refuse_several_machines(url: str) -> None:
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "LOCAL_WORLD_SIZE" in os.environ and size != here:
        raise BrokenAtStart(
            f"processes on several machines share a run's folder, and {url} is worked in on a disk of one machine",
            where="--out",
            advice=["name a folder that all machines share, and copy it to the store at the end"],
        )
