"""Where a run works: its folder, or for an address of a store a folder of this machine that is sent there.

The folder of an address lies in the user's cache folder. Of several processes, the first brings and sends for all, so
they must be on one machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillroom.checkpoint import MANIFEST, CheckpointStore
from stillroom.config import Config
from stillroom.engine.run_folder.folder import CONFIG, read_config
from stillroom.engine.run_folder.trust import Trust
from stillroom.errors import BrokenAtStart, CannotSave, ConfigError, DataError, StillroomError
from stillroom.files import FileSum, Manifest, inside, is_hidden
from stillroom.locks import alone
from stillroom.remote import Known, Owner, Sender, Store, as_url, copies_folder, is_in_store, key_of, read_commit

_CHECKPOINTS = "checkpoints/"


@dataclass(frozen=True)
class Place:
    """The folder that a run works in, and where it is sent to."""

    folder: Path
    url: str = ""
    sender: Sender | None = None  # of the first process
    notes: tuple[str, ...] = ()

    def read_config(self, trust: Trust) -> Config:
        """The configuration of the run. Another process than the first may be here before the run was brought."""
        is_other = bool(self.url) and self.sender is None
        contents = Store(self.url).read(CONFIG) if is_other else None
        return read_config(self.folder, contents, trust=trust)


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
    with contextlib.ExitStack() as ending:
        ending.callback(_open.pop, folder, None)
        if os.environ.get("RANK", "0") != "0":
            _open[folder] = Place(folder, url)
            yield _open[folder]
            return
        try:
            store = Store(url)
            store.entries()  # a store that cannot be reached is named before anything is begun
            owner = Owner(store).take()
        except (DataError, CannotSave) as error:
            raise ConfigError(error.what, where="--out", advice=error.advice) from error
        ending.callback(owner.release)
        notes, known = _bring(store, folder)
        if not owner.is_exclusive:
            notes.append(f"{url} cannot create a file only where there is none: nothing keeps two processes apart that "
                         "begin on it in the same moment")  # fmt: skip
        _open[folder] = Place(folder, url, Sender(store, folder, owner, known), tuple(notes))
        yield from _sent(_open[folder])


def _sent(place: Place) -> Iterator[Place]:
    """Send at the end. A body that failed keeps its own error, with the address for the folder in its advice."""
    assert place.sender is not None
    try:
        yield place
    except Exception as error:
        trouble = []
        try:
            place.sender.finish()
        except CannotSave as unsent:
            trouble = [f"{unsent.what}; it is in {place.folder}"]
        if isinstance(error, StillroomError):
            here, there = str(place.folder), place.url
            error.what = error.what.replace(here, there)
            error.advice = (*(one.replace(here, there) for one in error.advice), *trouble)
        raise
    place.sender.finish()


def _refuse_several_machines(url: str) -> None:
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "LOCAL_WORLD_SIZE" in os.environ and size != here:
        raise BrokenAtStart(
            f"processes on several machines share a run's folder, and {url} is worked in on a disk of one machine",
            where="--out",
            advice=["name a folder that all machines share, and copy it to the store at the end"],
        )


# -- a run is brought ------------------------------------------------------------------------------------


def _bring(store: Store, folder: Path) -> tuple[list[str], dict[str, FileSum | None]]:
    """Make the folder that of the store's last commit, or leave it where it is that one or goes on from it.

    Return (what is to be said of that, the files that the store has).
    """
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        commit, listed = read_commit(store), store.entries()
        sums = commit.files if commit is not None else {}
        there = {name: file for name, file in listed.items() if not is_hidden(name)}
        known = {
            name: sums[name] if name in sums and sums[name].bytes == file.size else None for name, file in there.items()
        }
        names, state = {*there, *sums}, Known.read(home)
        is_here = (folder / CONFIG).exists()
        if CONFIG not in names:
            store.check_empty(names)
            if is_here and state.sent:
                raise ConfigError(
                    f"{store.url} holds no run, and the folder of this machine holds the one that was there",
                    where="--out",
                    advice=[f"to begin again, remove {home}", "or choose another address with --out"],
                )
            return ([f"the run goes on from {folder}: nothing of it had reached {store.url}"] if is_here else []), known
        if is_here and (commit.id in (state.sent, state.next) if commit is not None else not state.sent):
            return [f"the run goes on from {folder}, which is as new as {store.url}"], known
        notes = [f"brought from {store.url}"]
        if folder.exists():
            old = folder.with_name(f".old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            notes.append(f"the folder of this machine was another or an older one: it is now {old}")
        _bring_files(store, folder, names, {*there})
        Known(sent=commit.id if commit is not None else "").write(home)
        return notes, known


def _bring_files(store: Store, folder: Path, names: set[str], listed: set[str]) -> None:
    """All files but those of checkpoints; then the checkpoints, the newest first, until the sums of one hold.

    One that is broken in the store is brought too, so that resuming names it as it does locally. One without a
    manifest was never whole and is left out. Written aside and moved into place: a kill leaves no part of a run that
    would be taken for one.
    """
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    def get(name: str) -> None:
        path = inside(aside, name)
        if name in listed or store.size(name) is not None:  # else removed after the commit that names it
            store.get(name, path)

    of_checkpoints = {name for name in names if name.startswith(_CHECKPOINTS) and name.count("/") > 1}
    for name in sorted(names - of_checkpoints):
        get(name)
    for name in of_checkpoints:
        if name.endswith(f"/{MANIFEST}"):
            get(name)
    wanted = True
    for step in CheckpointStore(aside / "checkpoints").steps():
        place = f"{_CHECKPOINTS}step-{step:06d}"
        if not wanted:
            shutil.rmtree(aside / place)
            continue
        for name in of_checkpoints:
            if name.startswith(f"{place}/") and not name.endswith(f"/{MANIFEST}"):
                get(name)
        with contextlib.suppress(OSError, ValueError):
            Manifest.parse((aside / place / MANIFEST).read_bytes()).check(aside / place)
            wanted = False
    aside.rename(folder)
