"""Checkpoints that survive a kill at any moment.

A checkpoint is written into a temporary folder, flushed to the disk file by file, sealed with a manifest of
sha256 sums, and renamed into place: it is there whole or not at all. It is read back only if every sum
holds; otherwise the one before is tried. The sums guard against damage, not against an attacker.

Tensors are safetensors, the rest is JSON. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as to_safetensors
from torch import Tensor

from stillroom.errors import CannotSave, CheckpointUnusable

FORMAT = 1
_NAME = re.compile(r"^step-(\d{6,})$")
_TEMPORARY = ".tmp-"

TensorGroups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Saved:
    """A state outside the process: groups of named tensors, and everything else as JSON values."""

    step: int
    tensors: TensorGroups
    scalars: Mapping[str, Any]
    rejected: tuple[str, ...] = ()  # newer checkpoints that did not verify, with the reason

    def copied(self) -> Saved:
        """The same state with nothing shared: later steps cannot change it."""
        tensors = {
            group: {name: tensor.detach().clone() for name, tensor in named.items()}
            for group, named in self.tensors.items()
        }
        return Saved(self.step, tensors, json.loads(json.dumps(self.scalars)))


def _nothing(_point: str) -> None:
    """The default for `at_point`: real runs do nothing there."""


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(self, folder: Path, keep: int = 2, at_point: Callable[[str], None] = _nothing) -> None:
        self.folder = folder
        self.keep = keep
        self.at_point = at_point  # called between the stages of a save, so that a test can kill us there

    # -- writing -----------------------------------------------------------------------------------------

    def save(self, step: int, tensors: TensorGroups, scalars: Mapping[str, Any]) -> Path:
        """Write a checkpoint and prune old ones. An older checkpoint is never touched before the new one is whole."""
        final = self.folder / f"step-{step:06d}"
        temporary = self.folder / f"{_TEMPORARY}{final.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            self._fill(temporary, step, tensors, scalars)
            self.at_point("before_rename")
            if final.exists():  # a rerun after a rollback reached the same step again
                shutil.rmtree(final)
            temporary.rename(final)
            _flush_folder(self.folder)
            self.at_point("after_rename")
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CannotSave(
                f"cannot write the checkpoint of step {step}: {error.strerror or error}",
                where=str(self.folder),
                advice=[
                    "free some space on that disk, then `stillroom resume` the run",
                    "or keep fewer checkpoints: --set checkpoint.keep=1",
                ],
            ) from error
        self.prune()
        return final

    def _fill(self, folder: Path, step: int, tensors: TensorGroups, scalars: Mapping[str, Any]) -> None:
        sums: dict[str, dict[str, Any]] = {}
        for group, named in tensors.items():
            contents = to_safetensors({name: tensor.detach().cpu().contiguous() for name, tensor in named.items()})
            sums[f"{group}.safetensors"] = _write(folder / f"{group}.safetensors", contents)
            self.at_point("while_writing")
        sums["state.json"] = _write(folder / "state.json", _json(scalars))
        _write(folder / "manifest.json", _json({"format": FORMAT, "step": step, "files": sums}))
        _flush_folder(folder)

    def prune(self, keep: int | None = None) -> None:
        """Remove all but the newest checkpoints; only folders that carry our name and our manifest."""
        for path in self._paths()[keep if keep is not None else self.keep :]:
            if (path / "manifest.json").exists() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def sweep(self) -> int:
        """Remove what an interrupted save left behind. Returns how many folders that were."""
        leftovers = [path for path in self.folder.glob(f"{_TEMPORARY}*") if path.is_dir() and not path.is_symlink()]
        for path in leftovers:
            shutil.rmtree(path, ignore_errors=True)
        return len(leftovers)

    # -- reading -----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, newest first; verified or not."""
        return [int(path.name.removeprefix("step-")) for path in self._paths()]

    def load_newest(self, without: Collection[int] = ()) -> Saved | None:
        """The newest checkpoint that verifies; None when there is none at all; an error when all are bad."""
        rejected: list[str] = []
        for path in self._paths():
            if int(path.name.removeprefix("step-")) in without:
                continue
            try:
                step, tensors, scalars = _read(path)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                rejected.append(f"{path.name}: {error}")
                continue
            return Saved(step, tensors, scalars, tuple(rejected))
        if rejected:
            raise CheckpointUnusable(
                "no checkpoint passes verification: " + "; ".join(rejected),
                where=str(self.folder),
                advice=[
                    "restore the folder from a backup",
                    "or begin again in another folder: the best student so far may be in student/",
                ],
            )
        return None

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.match(path.name) and not path.is_symlink()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _read(path: Path) -> tuple[int, TensorGroups, Mapping[str, Any]]:
    """A verified checkpoint. What is loaded is the very bytes that were summed."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not one this version reads")
    contents: dict[str, bytes] = {}
    for name, expected in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"manifest names a file outside the checkpoint: {name}")
        contents[name] = (path / name).read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != expected["sha256"]:
            raise ValueError(f"{name} does not match its sha256")
    scalars = json.loads(contents.pop("state.json"))
    tensors = {name.removesuffix(".safetensors"): load_safetensors(data) for name, data in contents.items()}
    return int(manifest["step"]), tensors, scalars


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, sort_keys=True).encode("utf-8")


def _write(path: Path, contents: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(contents).hexdigest(), "bytes": len(contents)}


def _flush_folder(folder: Path) -> None:
    """Make a rename durable. Not every platform can open a folder; then the rename alone must do."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_atomically(path: Path, contents: bytes) -> None:
    """Replace a file as a whole: readers see the old one or the new one."""
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
    _write(temporary, contents)
    temporary.replace(path)


@contextlib.contextmanager
def replaced_folder(final: Path) -> Iterator[Path]:
    """Fill a folder aside and swap it in when the body succeeds; the old one stays until then."""
    temporary = final.with_name(f"{_TEMPORARY}{final.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    retired = final.with_name(f"{_TEMPORARY}old-{final.name}-{os.getpid()}")
    if final.exists():
        final.rename(retired)
    temporary.rename(final)
    shutil.rmtree(retired, ignore_errors=True)


class Snapshots(Protocol):
    """Good states to return to."""

    def keep(self, saved: Saved) -> None: ...
    def newest(self) -> Saved | None: ...
    def drop_newest(self) -> None: ...
    def __len__(self) -> int: ...


class SnapshotRing:
    """The last few good states, in memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._states: list[Saved] = []

    def keep(self, saved: Saved) -> None:
        self._states.append(saved.copied())
        del self._states[: -self.size]

    def newest(self) -> Saved | None:
        return self._states[-1] if self._states else None

    def drop_newest(self) -> None:
        """The state behind the newest snapshot led into trouble twice: fall back to the one before."""
        if self._states:
            self._states.pop()

    def __len__(self) -> int:
        return len(self._states)


class CheckpointSnapshots:
    """The newest verified checkpoints instead of copies in memory, where memory is short."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._dropped: set[int] = set()

    def keep(self, saved: Saved) -> None:
        """Nothing to do: what is on disk is what there is."""

    def newest(self) -> Saved | None:
        return self.store.load_newest(without=self._dropped)

    def drop_newest(self) -> None:
        self._dropped.update([step for step in self.store.steps() if step not in self._dropped][:1])

    def __len__(self) -> int:
        return len([step for step in self.store.steps() if step not in self._dropped])
