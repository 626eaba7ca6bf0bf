"""Bring a run from a store into the folder that it is worked in, unless the folder is as new as the store.

Of the checkpoints the newest is brought whose sums hold; one that is broken there is brought too, so that resuming
names it as it does locally. A checkpoint without a manifest was never committed and is left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from stillroom.checkpoint import CheckpointStore
from stillroom.errors import ConfigError
from stillroom.files import inside, is_hidden
from stillroom.remote import alone
from stillroom.stores.files import StoreFiles, check_empty
from stillroom.stores.index import Index, Sent, State
from stillroom.stores.mirror import MANIFEST

_CONFIG = "config.json"
_CHECKPOINTS = "checkpoints/"


def bring(files: StoreFiles, folder: Path) -> tuple[str, ...]:
    """Make the folder that of the store's last commit, or leave it where it is that one or goes on from it.

    Return what is to be said of that.
    """
    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    with alone(home):
        index = Index.read(files)
        listed = files.names()
        names = {name for name in listed if not is_hidden(name)} | {*(index.files if index else ())}
        state, is_here = State.read(home), (folder / _CONFIG).exists()
        if _CONFIG not in names:
            return _nothing_there(files, names, folder, state, is_here=is_here)
        if is_here and (state.is_of(index) if index is not None else not state.number):
            return (f"the run goes on from {folder}, which is as new as {files.url}",)
        notes = [f"brought from {files.url}"]
        if folder.exists():
            old = folder.with_name(f".old-{folder.name}")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            notes.append(f"the folder of this machine was another or an older one: it is now {old}")
        _bring_all(files, folder, names, set(listed))
        run, number = (index.run, index.number) if index else ("", 0)
        State(run, number, 0, _sent(folder, index, names)).write(home)
        return tuple(notes)


def _nothing_there(
    files: StoreFiles, names: Iterable[str], folder: Path, state: State, *, is_here: bool
) -> tuple[str, ...]:
    check_empty(files, names)
    if not is_here:
        State().write(folder.parent)
        return ()
    if state.number:
        raise ConfigError(
            f"{files.url} holds no run, and the folder of this machine holds the one that was there",
            where="--out",
            advice=[f"to begin again, remove {folder.parent}", "or choose another address with --out"],
        )
    return (f"the run goes on from {folder}: nothing of it had reached {files.url}",)


def _bring_all(files: StoreFiles, folder: Path, names: set[str], listed: set[str]) -> None:
    """All files but those of checkpoints; then the checkpoints in their order, until one holds.

    Written aside and moved into place: a kill leaves no part of a run that would be taken for one.
    """
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)

    def get(name: str) -> bool:
        if name not in listed and files.size(name) is None:
            return False  # removed after the commit that names it
        files.get(name, inside(aside, name))
        return True

    parts = [name for name in names if name.startswith(_CHECKPOINTS)]
    for name in sorted(names - set(parts)):
        get(name)
    for name in parts:
        if name.endswith(f"/{MANIFEST}") or name.count("/") == 1:
            get(name)
    store = CheckpointStore(aside / "checkpoints")
    wanted = True
    for step in store.steps():
        place = f"{_CHECKPOINTS}step-{step:06d}"
        if not wanted:
            shutil.rmtree(aside / place)
            continue
        for name in parts:
            if name.startswith(f"{place}/") and not name.endswith(f"/{MANIFEST}"):
                get(name)
        wanted = not _holds(aside / place)
    aside.rename(folder)


def _holds(checkpoint: Path) -> bool:
    """Whether all files are those that the manifest names."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        return all(_sha256(inside(checkpoint, name)) == told["sha256"] for name, told in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sent(folder: Path, index: Index | None, names: Iterable[str]) -> dict[str, Sent]:
    """What the store has, with the sizes and times of the files here. What is not here is removed there in time."""
    sent = {name: Sent(-1, 0, "", 0) for name in names}
    for name, told in (index.files if index else {}).items():
        path = inside(folder, name)
        size, time = (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else (-1, 0)
        is_same = size == int(told["bytes"])
        sent[name] = Sent(size if is_same else -1, time, str(told["sha256"]), int(told["bytes"]))
    return sent
