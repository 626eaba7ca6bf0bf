"""Write checkpoints and the student's folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from stillroom.core.errors import CannotSave, PeerGone, StillroomError
from stillroom.core.files import TEMPORARY, is_disk_full, reason_of, replaced_folder
from stillroom.core.locks import LockHeld
from stillroom.models import Student
from stillroom.models.files import open_written, save_configuration
from stillroom.models.gguf import keep_codes
from stillroom.models.load import quiet_transformers
from stillroom.models.lora import Adapter, fill, save_merged
from stillroom.parallel import Parallel
from stillroom.parallel.shards import WHOLE_FILE, write_whole
from stillroom.telemetry import EventLog
from stillroom.training import run_folder as run_folder
from stillroom.training.checkpoint import Save, Saves, drop_pages, settle
from stillroom.training.recover import is_good, is_sound
from stillroom.training.run import Run, RunState, capture, frozen_of, history, kept_weights, weights_of

_EXPORT = f"{TEMPORARY}student-parts"  # in the run's folder
_COMPARED_ROWS = 2  # of training text, that a merged student is compared with the trained one on
_COMPARED_LENGTH = 128


def save_checkpoint(run: Run, state: RunState, *, is_awaited: bool = False) -> None:
    """Write a checkpoint, unless this state is saved already: in the background where the run does so.

    `is_awaited`: it is whole when this returns. A full disk is logged and the run continues; a deleted folder ends it.
    """
    settle(run, state)
    moment = (state.applied, state.attempted, state.rollbacks, int(state.owes_evaluation))
    if state.saved_at == moment:
        return
    if not is_sound(run):
        run.log.write("note", text="weights are not finite: nothing is saved, the last good checkpoint stays")
        return
    in_background = run.saves.is_background and not is_awaited
    takes_part = run.parallel.is_first or run.parallel.is_sharded
    run.hooks.before_save()
    began = time.monotonic()
    write = _writer(run, state, in_background=in_background) if takes_part else None
    run.saves.begin(Save(state.applied, began, write), in_background=in_background)
    state.saved_at = moment
    if not in_background:
        settle(run, state)


def _writer(run: Run, state: RunState, *, in_background: bool) -> Callable[[], Path]:
    """What writes the present state: a copy of it if the run continues meanwhile."""
    run.check_folder()  # of the first process, which alone has a lock
    run.log.sync()  # a checkpoint stores its position in the log, which must survive a power cut
    saved = capture(run, state)
    run.checkpoints.line = saved.line
    if run.parallel.is_sharded:
        held = {**saved.tensors, "student": _as_written(run)}  # masters are among the optimizer's tensors
        parts = {group: run.parallel.as_global(group, named) for group, named in held.items()}
        saved = replace(saved, tensors=parts)
    if in_background:
        saved = saved.copied(but=("best",))  # another best student is another tensor: none is written over
    if not run.parallel.is_sharded:
        return lambda: run.checkpoints.save(saved.step, saved.tensors, saved.scalars)
    processes = run.saves.beside if in_background else run.parallel
    return lambda: run.checkpoints.save_parts(saved.step, saved.tensors, saved.scalars, processes)


def record_rollback(run: Run, state: RunState) -> None:
    """After a rollback, mark the checkpoints of the undone steps as abandoned, then save the restored state.

    The mark is written first, with the budgets spent so far.
    """
    if run.checkpoints.line == state.rollbacks:
        return
    run.checkpoints.line = state.rollbacks
    run.snapshots.settle()
    run.hooks.before_save()
    if run.parallel.is_first:
        run.check_folder()
        run.log.sync()
        run.checkpoints.begin_line(state.rollbacks, state.applied, history(run, state))
    save_checkpoint(run, state, is_awaited=True)


def save_student(run: Run) -> None:
    """Write the student as a Hugging Face folder, complete or not at all. If the disk is full, prune checkpoints."""
    run.optimizer.zero_grad()  # writing takes a copy of the weights: the gradients' room is for it
    for is_last_try in (False, True):
        run.check_folder()
        try:
            with quiet_transformers(), replaced_folder(run.folder / "student") as folder:
                note = _write_student(run, folder)
                run.tokenizer.save_pretrained(folder)
                codes = {name: one.codes() for name, one in run.optimizer.rounded().items()}
                keep_codes(folder, {name: one for name, one in codes.items() if one is not None})
            shutil.rmtree(run.folder / _EXPORT, ignore_errors=True)
            if note:
                run.log.write("note", text=note)
            return
        except StillroomError:
            raise
        except Exception as error:  # safetensors and tokenizers raise their own errors, the latter plain Exception
            if is_last_try or not is_disk_full(error):
                raise CannotSave(
                    f"cannot write the student: {reason_of(error)}",
                    where=str(run.folder / "student"),
                    advice=[
                        "free some space on that disk" if is_disk_full(error) else "see to what it says",
                        f"then continue, nothing is trained again: stillroom resume {run.folder}",
                    ],
                ) from error
            run.log.write("note", text="the disk is full: older checkpoints are removed to save the student")
            run.checkpoints.prune(keep=1)


def _write_student(run: Run, folder: Path) -> str:
    """Write the weights: an adapter merged, and also alone. Return a note for the log."""
    if run.adapter is not None:
        ids = run.canary().input_ids[:_COMPARED_ROWS, :_COMPARED_LENGTH]
        return save_merged(_whole_adapter(run, run.adapter), folder, ids)
    if run.parallel.is_sharded:
        _link(run.folder / _EXPORT / WHOLE_FILE, folder / "model.safetensors")
        save_configuration(run.student.model, folder, torch.float16 if run.precision.keeps_half_weights else None)
        return ""
    run.student.model.save_pretrained(folder)
    return ""


def _whole_adapter(run: Run, adapter: Adapter) -> Adapter:
    """The adapter in a whole network, in main memory where the student is sharded."""
    if not run.parallel.is_sharded:
        return adapter
    fill(adapter.outline, load_file(run.folder / _EXPORT / WHOLE_FILE))
    return replace(adapter, network=adapter.outline)


def gather_student(run: Run) -> None:
    """Where the student is sharded, all processes write its parts and the first one joins the files for `student/`."""
    if not run.parallel.is_sharded:
        return
    folder = run.folder / _EXPORT
    try:
        run.parallel.together(lambda: _empty(folder) if run.parallel.is_first else None)
        frozen = {} if run.adapter is None else frozen_of(run.student.model)
        weights = run.parallel.as_global("student", {**_as_written(run), **frozen})
        run.parallel.together(lambda: _write_whole(run, folder, weights))
    except OSError as error:
        raise CannotSave(
            f"cannot write the student: {reason_of(error)}",
            where=str(folder),
            advice=["free some space on that disk", f"then continue: stillroom resume {run.folder}"],
        ) from error


def _as_written(run: Run) -> dict[str, Tensor]:
    """The trained weights in the dtype that one process would write: the parts are FP32 masters in every mode."""
    weights = weights_of(run.student.model)
    if run.precision.keeps_half_weights and run.adapter is None:
        trained = {name for name, _parameter in run.student.model.named_parameters()}
        return {name: one.to(torch.float16) if name in trained else one for name, one in weights.items()}
    return weights


def _write_whole(run: Run, folder: Path, weights: Mapping[str, Tensor]) -> None:
    with run.parallel.asking_peers():
        write_whole(folder, weights, run.parallel)


def whole_again(run: Run) -> Run:
    """The run with the student that was just written, where the one in memory is sharded: its peers are gone."""
    if not run.parallel.is_sharded:
        return run
    network = open_written(run.student.model, run.folder / "student").to(run.device)
    student = Student(network, vocab_size=run.student.vocab_size, is_described=run.student.is_described)
    return replace(run, student=student, parallel=Parallel(), adapter=None)  # it is merged


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the file system has no links."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


@torch.no_grad()
def load_best(run: Run, state: RunState) -> None:
    """Put the best weights into the student."""
    weights = kept_weights(run)
    for name, tensor in state.best_weights.items():
        weights[name].copy_(tensor)
        drop_pages(tensor)
    for rounded in run.optimizer.rounded().values():
        rounded.refresh()


def save_stopped_student(run: Run, state: RunState) -> None:
    """Write the best student of a run that is stopped. The checkpoint is saved already."""
    is_judged = state.best_step > 0 or state.evaluations_since_best > 0
    is_best = bool(state.best_weights) and is_judged
    if is_best:
        load_best(run, state)
    try:
        gather_student(run)
    except CannotSave as error:
        run.log.write("note", text=f"{error.what}; the checkpoint holds it, and a resumed run writes it")
        return
    if not run.parallel.is_first:
        return
    if is_best:
        which = f"the best student so far, that of step {state.best_step}"
    else:
        which = f"the student of step {state.applied}, which was never evaluated"
    try:
        save_student(run)
    except CannotSave as error:
        run.log.write("note", text=f"{error.what}; the checkpoint holds it, and a resumed run writes it")
        return
    run.log.write("note", text=f"student/ holds {which}")


# -- lost peer -------------------------------------------------------------------------------------
# The last checkpoint of a run that has lost a process.
#
# With ddp each process holds the whole state, so whoever is left saves the last accepted step and no step is lost.
# With fsdp the parts of the lost process are gone with it, and the newest checkpoint stays what it was.
#
# The first process writes if it is left: it holds the lock of the run's folder. If it is dead its lock is free, and
# of the others the one that takes it writes. If it is frozen it still holds the lock, and nobody writes.


@contextmanager
def last_step_saved(run: Run, state: RunState) -> Iterator[None]:
    """Where the body ends because another process is gone, save the last accepted step if this process can."""
    try:
        yield
    except PeerGone as error:
        if _is_whole(run, state):
            try:
                if run.parallel.is_first:
                    _save(replace(run, parallel=Parallel(), saves=Saves()), state)
                else:
                    _save_for_the_first(run, state, error)
            except (StillroomError, OSError) as failed:  # the error to report is that a process is gone
                run.log.write("note", text=f"step {state.applied} could not be saved: {reason_of(failed)}")
        raise


def _is_whole(run: Run, state: RunState) -> bool:
    """Whether this process holds all of the last accepted step: not in an update, and no rollback is half done."""
    return not run.parallel.is_sharded and not state.is_changing and run.checkpoints.line == state.rollbacks


def _save(alone: Run, state: RunState) -> None:
    """Save as a single process would. The checks before it need no other process: all hold the same state."""
    if not is_good(alone, state):
        alone.log.write("note", text=f"step {state.applied} does not pass its checks: the last good checkpoint stays")
        return
    save_checkpoint(alone, state, is_awaited=True)


def _save_for_the_first(run: Run, state: RunState, error: PeerGone) -> None:
    """Save in place of the first process, if that is dead and no other did so before.

    The log must tell of the attempts that this process made. It does not where the first process died between an
    update and its record; then the newest checkpoint stays.
    """
    try:
        own = run_folder.take_lock(run.folder)
    except LockHeld:
        return  # the first process is there, or another one is about to save
    try:
        with EventLog(run.folder / run_folder.EVENTS) as log:
            records = log.records()
            attempts = sum(record["event"] == "step" for record in records)
            if attempts != state.attempted or any(step >= state.applied for step in run.checkpoints.steps()):
                return
            is_again = bool(records) and records[-1]["event"] == "gradients"  # written before the attempt
            state.begun_at = len(records) - is_again
            state.saved_at = ()  # that may be a save that died with the first process
            _save(replace(run, parallel=Parallel(), saves=Saves(), lock=own, log=log), state)
            log.write("note", text=f"the first process is gone: process {run.parallel.rank} saved step {state.applied}")
            log.write("run_end", status="stopped", exit_code=error.exit_code, reason=str(error.what))
    finally:
        own.release()
