"""Checkpoints that survive a kill at any moment.

A checkpoint is written into a temporary folder, flushed to the disk file by file, sealed with a manifest of
sha256 sums, and renamed into place: it is there whole or not at all. It is read back only if every sum
holds; otherwise the one before is tried. The sums guard against damage, not against an attacker.

A rollback begins another line of the run: what was saved of the line before, after the step it went back to, is
abandoned and never read again. A mark says so from the first moment and stays until a checkpoint of the new line is
whole, so a kill in between resumes the new line and not the abandoned one.

Tensors are safetensors, the rest is JSON. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from stillroom.core.errors import CannotSave, CheckpointUnusable, StillroomError
from stillroom.core.files import (
    TEMPORARY,
    Count,
    FileSum,
    Manifest,
    Stored,
    flush_folder,
    inside,
    mend,
    reason_of,
    remove_folder,
    sum_of_bytes,
    swap_in,
    write_atomically,
    write_durably,
)
from stillroom.parallel import Parallel
from stillroom.parallel.shards import read_shards, write_shards

if TYPE_CHECKING:
    from stillroom.parallel import Parallel
    from stillroom.training.run import Run, RunState


MANIFEST = "manifest.json"
FORMAT = 1
SHARDED_FORMAT = 2  # parts of tensors in one file for each process, see parallel/shards.py
_NAME = re.compile(r"^step-(\d{6,})$")
_MARK = "rollback.json"
# What reading a damaged checkpoint can raise: files, JSON of any shape, safetensors.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
TensorGroups = Mapping[str, Mapping[str, Tensor]]


class _Line(Stored):
    """The one field of a manifest that orders checkpoints: also those that are rejected when read."""

    line: Count = 0


class CheckpointManifest(Manifest, _Line):
    """manifest.json of a checkpoint."""

    format: int
    step: Count


class _Note(Stored):
    """rollback.json: the mark of a rollback."""

    line: Count
    to: Count
    history: dict[str, Any]


# Names of dtypes in safetensors files.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def as_safetensors(named: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The contents of a safetensors file, a piece at a time: the library's `save` holds two copies of all of it."""
    header, end = {}, 0
    for name, tensor in named.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    table = json.dumps(header, separators=(",", ":")).encode("utf-8")
    table += b" " * (-len(table) % 8)  # data begins at a multiple of eight
    yield len(table).to_bytes(8, "little") + table
    for tensor in named.values():
        contents = _bytes_of(tensor)
        for begin in range(0, len(contents), _PIECE):
            yield contents[begin : begin + _PIECE]
            drop_pages(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


_PIECE = 1 << 24  # bytes that are read from a copy on disk at a time
_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by the address of their storage


def drop_pages(tensor: Tensor) -> None:
    """Drop the pages that reading a tensor took, if it is one of `DiskCopies`: they are in its file."""
    mapped = _MAPS.get(tensor.untyped_storage().data_ptr())
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)


class DiskCopies:
    """Copies of tensors in files that are mapped and not read: no memory is taken until they are needed again.

    A file is removed as soon as it is mapped: its space is freed with the last tensor, or when the process ends.
    """

    def __init__(self, folder: Path, tell: Callable[[str], object]) -> None:
        self._folder, self._tell = folder, tell

    def copy(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that later steps do not change; in main memory where the disk has no room."""
        try:
            return self._in_file(named)
        except OSError as error:
            self._tell(f"a copy of the state is kept in memory, because the disk takes none: {reason_of(error)}")
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}

    def _in_file(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=TEMPORARY) as file:
            places = {}
            for name, tensor in named.items():
                file.write(bytes(-file.tell() % _ALIGNED))
                places[name] = file.tell()
                file.write(_bytes_of(tensor))
            file.write(bytes(_ALIGNED))  # a file of no bytes cannot be mapped
            file.flush()
            mapped = mmap.mmap(file.fileno(), file.tell(), access=mmap.ACCESS_COPY)
        held = torch.frombuffer(mapped, dtype=torch.uint8)
        _MAPS[held.untyped_storage().data_ptr()] = mapped
        return {name: _viewed(held, place, named[name]) for name, place in places.items()}


_ALIGNED = 64  # bytes


def _viewed(held: Tensor, place: int, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return held[place : place + size].view(like.dtype).reshape(like.shape)


@dataclass(frozen=True)
class Saved:
    """A state outside the process: groups of named tensors, and everything else as JSON values."""

    step: int
    tensors: TensorGroups
    scalars: Mapping[str, Any]
    rejected: tuple[str, ...] = ()  # newer checkpoints that did not verify, with the reason
    line: int = 0  # rollbacks before it was saved

    def copied(self, but: Collection[str] = (), *, disk: DiskCopies | None = None) -> Saved:
        """The same state in main memory, or on disk, with nothing shared: later steps cannot change it.

        `but` are groups that nobody writes to: they are shared if they are in main memory. The copies are not pinned:
        torch rounds pinned blocks up to a power of two, and a copy is taken rarely.
        """
        tensors = {
            group: disk.copy(named)
            if disk is not None
            else {name: tensor.detach().to("cpu", copy=group not in but) for name, tensor in named.items()}
            for group, named in self.tensors.items()
        }
        return Saved(self.step, tensors, json.loads(json.dumps(self.scalars)), line=self.line)


@dataclass(frozen=True)
class Mark:
    """A rollback whose new line has no checkpoint yet: where it went back to, and what it must not forget."""

    line: int
    to: int  # step of the state it returned to
    history: Mapping[str, Any]


def _nothing(_point: str) -> None:
    """The default for `at_point`: real runs do nothing there."""


class CheckpointStore:
    """The `checkpoints` folder of a run."""

    def __init__(self, folder: Path, keep: int = 2, at_point: Callable[[str], None] = _nothing) -> None:
        self.folder = folder
        self.keep = keep
        self.line = 0  # rollbacks of the run so far
        self.at_point = at_point  # called between the stages of a save, so that a test can kill us there
        self._commits = threading.Lock()
        self._is_given_up = False

    # -- writing -----------------------------------------------------------------------------------------

    def save(self, step: int, tensors: TensorGroups, scalars: Mapping[str, Any]) -> Path:
        """Write a checkpoint and prune old ones. An older checkpoint is never touched before the new one is whole."""
        with self._saving(step, str(os.getpid())) as temporary:
            self._make(temporary)
            sums: dict[str, FileSum] = {}
            for group, named in tensors.items():
                sums[f"{group}.safetensors"] = write_durably(temporary / f"{group}.safetensors", as_safetensors(named))
                self.at_point("while_writing")
            return self._commit(temporary, step, FORMAT, sums, scalars)

    def save_parts(self, step: int, tensors: TensorGroups, scalars: Mapping[str, Any], parallel: Parallel) -> Path:
        """The same by several processes, each of which writes the parts that it holds. The first one seals them.

        Each stage succeeds in all processes or raises in all.
        """
        with self._saving(step, "parts") as temporary:
            parallel.together(lambda: self._make(temporary) if parallel.is_first else None)
            parallel.together(lambda: self.at_point("while_writing"))
            written = parallel.together(lambda: self._write_parts(temporary, tensors, parallel))
            sums = {name: FileSum.of(one) for process in parallel.collect(written) for name, one in process.items()}
            parallel.together(
                lambda: self._commit(temporary, step, SHARDED_FORMAT, sums, scalars) if parallel.is_first else None
            )
        return self.folder / f"step-{step:06d}"

    def _write_parts(self, temporary: Path, tensors: TensorGroups, parallel: Parallel) -> dict[str, dict[str, Any]]:
        with parallel.asking_peers():
            return {name: one.model_dump() for name, one in write_shards(temporary, tensors, parallel).items()}

    @contextlib.contextmanager
    def _saving(self, step: int, owner: str) -> Iterator[Path]:
        temporary = self.folder / f"{TEMPORARY}step-{step:06d}-{owner}"
        try:
            yield temporary
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CannotSave(
                f"cannot write the checkpoint of step {step}: {reason_of(error)}",
                where=str(self.folder),
                advice=[
                    "free some space on that disk, then `stillroom resume` the run",
                    "or keep fewer checkpoints: --set checkpoint.keep=1",
                ],
            ) from error

    def _make(self, temporary: Path) -> None:
        self.folder.mkdir(exist_ok=True)  # in a run's folder, which is not made again where it was deleted
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    def _commit(
        self, temporary: Path, step: int, kind: int, sums: dict[str, FileSum], scalars: Mapping[str, Any]
    ) -> Path:
        """Seal what was written, move it into its place and prune old checkpoints."""
        final = self.folder / f"step-{step:06d}"
        sums["state.json"] = write_durably(temporary / "state.json", _json(scalars))
        manifest = CheckpointManifest(format=kind, step=step, line=self.line, files=sums)
        write_durably(temporary / MANIFEST, manifest.to_bytes())
        flush_folder(temporary)
        self.at_point("before_rename")
        with self._commits:
            if self._is_given_up:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            swap_in(temporary, final)
            self.at_point("after_rename")
            self._retire()
            self.prune()
        return final

    def give_up(self) -> None:
        """From now on nothing is moved into its place. Waits for a move that has begun."""
        with self._commits:
            self._is_given_up = True

    def prune(self, keep: int | None = None) -> None:
        """Remove all but the newest checkpoints; only folders that carry our name and our manifest."""
        for path in self._paths()[keep if keep is not None else self.keep :]:
            if (path / MANIFEST).exists():
                # One that cannot be removed is tried again at the next save.
                with contextlib.suppress(OSError):
                    remove_folder(path)

    def sweep(self) -> int:
        """Undo or finish what a kill interrupted. Returns how many half-made folders that were."""
        found = mend(self.folder)
        self._retire()
        return found

    # -- rollbacks ---------------------------------------------------------------------------------------

    def begin_line(self, line: int, to: int, history: Mapping[str, Any]) -> None:
        """Abandon every checkpoint after step `to`, from this moment on, whatever happens next."""
        self._retire()  # what an earlier rollback abandoned is judged by its own mark
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomically(self.folder / _MARK, _json({"line": line, "to": to, "history": history}))
        except OSError as error:
            raise CannotSave(
                f"cannot note the rollback to step {to}: {reason_of(error)}",
                where=str(self.folder),
                advice=["free some space on that disk, then `stillroom resume` the run"],
            ) from error
        self.line = line
        self.at_point("after_mark")

    def mark(self) -> Mark | None:
        """The rollback that is not in a checkpoint yet, if there is one."""
        try:
            note = _Note.of(json.loads((self.folder / _MARK).read_bytes()))
            return Mark(note.line, note.to, note.history)
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            raise self.unusable_mark(reason_of(error)) from error

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint, not even one that a rollback abandoned."""
        return not self._named()

    def forget_mark(self) -> None:
        """For a run that begins again, before its first checkpoint."""
        (self.folder / _MARK).unlink(missing_ok=True)
        flush_folder(self.folder)

    def unusable_mark(self, reason: str) -> CheckpointUnusable:
        return CheckpointUnusable(
            f"the note of a rollback cannot be read: {reason}",
            where=str(self.folder / _MARK),
            advice=["restore the folder from a backup", "or begin again in another folder"],
        )

    def _retire(self) -> None:
        """Remove what was abandoned once the new line has a checkpoint, then the mark itself."""
        mark = self.mark()
        if mark is None:
            return
        lines = {path: _line(path) for path in self._named()}
        if not any(line >= mark.line for line in lines.values()):
            return
        for path, line in lines.items():
            if not mark_keeps(mark, line, _step(path)) and (path / MANIFEST).exists():
                remove_folder(path)
                self.at_point("while_retiring")
        flush_folder(self.folder)
        (self.folder / _MARK).unlink()
        flush_folder(self.folder)

    # -- reading -----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, newest first; verified or not."""
        return [_step(path) for path in self._paths()]

    def load_newest(
        self, why_unusable: Callable[[Saved], str] = lambda _saved: "", without: Collection[int] = ()
    ) -> Saved | None:
        """The newest checkpoint that verifies; None when there is none at all; an error when all are bad.

        `why_unusable` says why a caller cannot use a checkpoint whose sums hold; nothing where it can.
        """
        rejected: list[str] = []
        for path in self._paths():
            if _step(path) in without:
                continue
            try:
                step, tensors, scalars = _read(path)
            except _DAMAGE as error:
                rejected.append(f"{path.name}: {_said(error)}")
                continue
            found = Saved(step, tensors, scalars, tuple(rejected), _line(path))
            reason = why_unusable(found)
            if not reason:
                return found
            rejected.append(f"{path.name}: {reason}")
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

    def abandoned_best(self, step: int) -> Mapping[str, Tensor]:
        """The best student's weights from a checkpoint of an abandoned line, if one holds that of this step."""
        valid = set(self._paths())
        for path in sorted(set(self._named()) - valid, key=_step, reverse=True):
            try:
                _number, tensors, scalars = _read(path)
                if scalars["state"]["best_step"] == step and "best" in tensors:
                    return tensors["best"]
            except _DAMAGE:
                continue  # it is abandoned in any case
        return {}

    def _paths(self) -> list[Path]:
        """Checkpoints that may be read, newest first."""
        mark = self.mark()
        lines = {path: _line(path) for path in self._named()}
        kept = [path for path, line in lines.items() if mark is None or mark_keeps(mark, line, _step(path))]
        return sorted(kept, key=lambda path: (lines[path], _step(path)), reverse=True)

    def _named(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _NAME.match(path.name) and not path.is_symlink()]


def mark_keeps(mark: Mark, line: int, step: int) -> bool:
    """Whether a checkpoint belongs to the line that a rollback began, or to the stretch before it."""
    return line >= mark.line or step <= mark.to


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _line(path: Path) -> int:
    """The line a checkpoint was saved in. One whose manifest cannot be read is of none, and is rejected when read."""
    try:
        return _Line.of(json.loads((path / MANIFEST).read_bytes())).line
    except _DAMAGE:
        return -1


def _said(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)


def _read(path: Path) -> tuple[int, TensorGroups, Mapping[str, Any]]:
    """A verified checkpoint. What is loaded is the very bytes that were summed."""
    manifest = CheckpointManifest.parse((path / MANIFEST).read_bytes())
    if manifest.format == SHARDED_FORMAT:
        return manifest.step, *read_shards(path, manifest)
    if manifest.format != FORMAT:
        raise ValueError(f"format {manifest.format} is not one this version reads")
    contents: dict[str, bytes] = {}
    for name, expected in manifest.files.items():
        contents[name] = inside(path, name).read_bytes()
        if sum_of_bytes(contents[name]).sha256 != expected.sha256:
            raise ValueError(f"{name} does not match its sha256")
    scalars = json.loads(contents.pop("state.json"))
    tensors = {name.removesuffix(".safetensors"): load_safetensors(data) for name, data in contents.items()}
    return manifest.step, tensors, scalars


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False, sort_keys=True).encode("utf-8")


# -- snapshots -------------------------------------------------------------------------------------
# Good states that a rollback returns to: copies in main memory, or the checkpoints on disk.


class Snapshots(Protocol):
    """Good states to return to."""

    def keep(self, saved: Saved) -> None: ...
    def newest(self) -> Saved | None: ...
    def drop_newest(self) -> None: ...
    def settle(self) -> None: ...
    def __len__(self) -> int: ...


class SnapshotRing:
    """The last few good states, in main memory whatever device the run is on, or in files where they are large."""

    def __init__(self, size: int, disk: DiskCopies | None = None) -> None:
        self.size, self.disk = size, disk
        self._states: list[Saved] = []

    def keep(self, saved: Saved) -> None:
        """Copy a state. The oldest is dropped first, so there are never more copies than `size`."""
        del self._states[: max(0, len(self._states) + 1 - self.size)]
        self._states.append(saved.copied() if self.disk is None else saved.copied(disk=self.disk))

    def newest(self) -> Saved | None:
        return self._states[-1] if self._states else None

    def drop_newest(self) -> None:
        """The state behind the newest snapshot led into trouble twice: fall back to the one before."""
        if self._states:
            self._states.pop()

    def settle(self) -> None:
        """Nothing to do: what was dropped is gone."""

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

    def settle(self) -> None:
        """What was dropped is abandoned on the disk as well: a later checkpoint of that step is another."""
        self._dropped.clear()

    def __len__(self) -> int:
        return len([step for step in self.store.steps() if step not in self._dropped])


# -- background save -------------------------------------------------------------------------------
# The save in flight: at most one, written by a thread while training continues.
#
# The state was copied before, so later steps do not change what is written. Whoever needs a finished checkpoint calls
# `settle`: the next save, a rollback, a stop, the end of the run. Every process calls it at the same places, because
# the first one says whether the checkpoint is whole.


class Save:
    """One checkpoint that is being written, and what came of it: `path` or `error`.

    Neither in a process that writes no part of it.
    """

    def __init__(self, step: int, began: float, write: Callable[[], Path] | None) -> None:
        self.step = step
        self.path: Path | None = None
        self.error: BaseException | None = None
        self.num_bytes = 0
        self.seconds = 0.0  # from its beginning until it was whole
        self.waited = 0.0  # of these, seconds in which the run stood still
        self.is_told = False
        self._began, self._write = began, write
        self._thread: threading.Thread | None = None

    def in_background(self) -> None:
        """Write it by a thread. Called when the state is copied: until then the run stood still."""
        self.waited = time.monotonic() - self._began
        self._thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self._thread.start()

    def write(self) -> None:
        try:
            if self._write is not None:
                self.path = self._write()
                self.num_bytes = sum(file.stat().st_size for file in self.path.iterdir())
        except BaseException as error:  # noqa: BLE001  raised by `_report` in the thread of the run
            self.path, self.error = None, error
        self._write = None  # it holds the copy
        self.seconds = time.monotonic() - self._began
        if self._thread is None:
            self.waited = self.seconds

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            began = time.monotonic()
            self._thread.join()
            self.waited += time.monotonic() - began


class Saves:
    """How a run saves, and its save in flight. `beside` are the processes as the thread uses them."""

    def __init__(self, *, is_background: bool = False, beside: Parallel | None = None) -> None:
        self.is_background = is_background
        self.beside = beside or Parallel()
        self.current: Save | None = None

    def begin(self, save: Save, *, in_background: bool) -> None:
        """Begin a save. The caller has settled the one before."""
        assert self.current is None
        self.current = save
        if in_background:
            save.in_background()
        else:
            save.write()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self.current is not None:
            self.current.wait()


def settle(run: Run, state: RunState) -> None:
    """Wait until no save is in flight, and report it. Called by all processes together.

    A full disk is logged and the run continues; any other error is raised.
    """
    save, run.saves.current = run.saves.current, None
    if save is None:
        return
    moment, state.saved_at = state.saved_at, ()  # whatever is raised below: this state is not known to be saved
    save.wait()
    is_saved = _report(run, state, save)
    # All processes wait for the first, so a rollback never reads a half-written checkpoint.
    if run.parallel.broadcast(float(is_saved)):
        state.saved_at = moment


def tell_finished(run: Run, state: RunState) -> None:
    """Report a save that has ended meanwhile, in the process that writes the log. Waits for nothing."""
    save = run.saves.current
    if run.parallel.is_first and save is not None and save.is_done:
        _report(run, state, save)


def _report(run: Run, state: RunState, save: Save) -> bool:
    """Log a checkpoint that is whole, once. Return whether it is."""
    if save.is_told:
        return save.path is not None
    save.is_told = True
    if save.error is not None:
        run.check_folder()  # a folder that is gone explains any error
    if isinstance(save.error, CannotSave):
        run.log.write("note", text=f"{save.error.what}; the run continues, the last good checkpoint stays")
        return False
    if save.error is not None:
        raise save.error
    if save.path is None:
        return False
    state.pace.saved(save.seconds)
    run.log.write(
        "checkpoint",
        step=save.step,
        path=str(save.path.relative_to(run.folder)),
        bytes=save.num_bytes,
        seconds=save.seconds,
        waited_seconds=save.waited,
    )
    return True


@contextmanager
def no_save_left(run: Run, state: RunState) -> Iterator[None]:
    """No save outlives the body: the folder belongs to this process only until the command ends.

    After an error the save is finished without the other processes, which may be gone. A second Ctrl-C does not wait:
    what is in flight is never moved into its place.
    """
    try:
        yield
    except KeyboardInterrupt:
        run.checkpoints.give_up()
        raise
    except BaseException:
        finish_alone(run, state)
        raise
    settle(run, state)


def finish_alone(run: Run, state: RunState) -> None:
    """Wait for the save in flight and log what came of it, without asking other processes."""
    save, run.saves.current = run.saves.current, None
    if save is None:
        return
    save.wait()
    if save.path is None:
        state.saved_at = ()
    if save.error is not None and not save.is_told:
        with suppress(StillroomError):  # the log itself may be lost, and another error is on its way
            text = f"the checkpoint of step {save.step} was not written: {reason_of(save.error)}"
            run.log.write("note", text=text)
        return
    with suppress(StillroomError):
        _report(run, state, save)
