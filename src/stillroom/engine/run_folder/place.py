"""The folder a run works in: its own, or for an address a local folder that is uploaded.

The local folder of an address is in the user's cache folder. Of several processes, the first downloads and uploads for
all, so they must be on one machine.
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
    """The folder that a run works in, and the address it is uploaded to."""

    folder: Path
    url: str = ""
    sender: Sender | None = None  # of the first process
    notes: tuple[str, ...] = ()

    def read_config(self, trust: Trust) -> Config:
        """Read the run's configuration. Other processes than the first read it from the store."""
        is_other = bool(self.url) and self.sender is None
        contents = Store(self.url).read(CONFIG) if is_other else None
        return read_config(self.folder, contents, trust=trust)


_open: dict[Path, Place] = {}  # addresses that this process works in


def folder_of(out: str | Path) -> Path:
    """Return the local folder for a run's folder or address."""
    if not is_in_store(out):
        return Path(out)
    url = as_url(out)
    return inside(copies_folder("runs") / key_of(url), url.rpartition("/")[2] or "run")


@contextlib.contextmanager
def opened(out: str | Path) -> Iterator[Place]:
    """Work in a run's folder or address while the body runs; upload the folder at the end.

    A nested call for the same place gets the same object, and the outer call uploads.
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
            store.entries()  # fail on an unreachable store before anything is loaded
            owner = Owner(store).take()
        except (DataError, CannotSave) as error:
            raise ConfigError(error.what, where="--out", advice=error.advice) from error
        ending.callback(owner.release)
        notes, known = _bring(store, folder)
        if not owner.is_exclusive:
            notes.append(f"{url} cannot create a file only if it does not exist: two processes that start on it at the "
                         "same time are not kept apart")  # fmt: skip
        _open[folder] = Place(folder, url, Sender(store, folder, owner, known), tuple(notes))
        yield from _sent(_open[folder])


def _sent(place: Place) -> Iterator[Place]:
    """Upload at the end. An error of the body is kept; its text names the address instead of the local folder."""
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


# -- downloading a run ------------------------------------------------------------------------------------


def _bring(store: Store, folder: Path) -> tuple[list[str], dict[str, FileSum | None]]:
    """Download the store's last commit, unless the local folder is that commit or continues it.

    Return (notes for the log, the files in the store).
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
                    f"{store.url} holds no run, but the local folder holds the one that was there",
                    where="--out",
                    advice=[f"to begin again, remove {home}", "or choose another address with --out"],
                )
            return (
                [f"the run continues from {folder}: nothing of it had reached {store.url}"] if is_here else []
            ), known
        if is_here and (commit.id in (state.sent, state.next) if commit is not None else not state.sent):
            return [f"the run continues from {folder}, which is as new as {store.url}"], known
        notes = [f"downloaded from {store.url}"]
        if folder.exists():
            old = folder.with_name(f".old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            notes.append(f"the local folder was older or another run: it is now {old}")
        _bring_files(store, folder, names, {*there})
        Known(sent=commit.id if commit is not None else "").write(home)
        return notes, known


def _bring_files(store: Store, folder: Path, names: set[str], listed: set[str]) -> None:
    """Download all files, but of the checkpoints only the newest ones, down to the first whose sums hold.

    A damaged checkpoint is downloaded too, so that resuming reports it as it does for a local run. One without a
    manifest was never complete and is left out. The folder is written under another name and renamed, so a kill leaves
    no partial run.
    """
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    def get(name: str) -> None:
        path = inside(aside, name)
        if name in listed or store.size(name) is not None:  # else removed after that commit
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
