"""Write checkpoints and the student's folder."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from stillroom.engine.recovery.recover import is_sound
from stillroom.engine.run import Run
from stillroom.engine.state import RunState, capture, history, weights_of
from stillroom.errors import CannotSave, StillroomError
from stillroom.files import is_disk_full, reason_of, replaced_folder
from stillroom.models.adapter.merge import save_merged
from stillroom.models.load.quiet import quiet_transformers

_COMPARED_ROWS = 2  # of training text, that a merged student is compared with the trained one on
_COMPARED_LENGTH = 128


def save_checkpoint(run: Run, state: RunState) -> None:
    """Write a checkpoint, unless this state is saved already.

    A full disk is logged and the run goes on; a deleted folder ends it.
    """
    moment = (state.applied, state.attempted, state.rollbacks, int(state.owes_evaluation))
    if state.saved_at == moment:
        return
    if not is_sound(run):
        run.log.write("note", text="weights are not finite: nothing is saved, the last good checkpoint stays")
        return
    is_saved = _write_checkpoint(run, state) if run.parallel.is_first else False
    # All processes wait for the first, so a rollback never reads a half-written checkpoint.
    if run.parallel.broadcast(float(is_saved)):
        state.saved_at = moment


def _write_checkpoint(run: Run, state: RunState) -> bool:
    began = time.monotonic()
    run.check_folder()
    run.log.sync()  # a checkpoint stores its position in the log, which must survive a power cut
    saved = capture(run, state)
    run.checkpoints.line = saved.line
    try:
        path = run.checkpoints.save(saved.step, saved.tensors, saved.scalars)
    except CannotSave as error:
        run.check_folder()
        run.log.write("note", text=f"{error.what}; the run goes on, the last good checkpoint stays")
        return False
    seconds = time.monotonic() - began
    state.pace.saved(seconds)
    size = sum(file.stat().st_size for file in path.iterdir())
    name = str(path.relative_to(run.folder))
    run.log.write("checkpoint", step=saved.step, path=name, bytes=size, seconds=seconds)
    return True


def record_rollback(run: Run, state: RunState) -> None:
    """After a rollback, mark the checkpoints of the undone steps as abandoned, then save the restored state.

    The mark is written first, with the budgets spent so far.
    """
    if run.checkpoints.line == state.rollbacks:
        return
    run.checkpoints.line = state.rollbacks
    run.ring.settle()
    if run.parallel.is_first:
        run.check_folder()
        run.log.sync()
        run.checkpoints.begin_line(state.rollbacks, state.applied, history(run, state))
    save_checkpoint(run, state)


def save_student(run: Run) -> None:
    """Write the student as a Hugging Face folder, complete or not at all. If the disk is full, prune checkpoints."""
    for is_last_try in (False, True):
        run.check_folder()
        try:
            with quiet_transformers(), replaced_folder(run.folder / "student") as folder:
                note = _write_student(run, folder)
                run.tokenizer.save_pretrained(folder)
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
    """Write the weights: an adapter merged, and itself beside them. Return what is to be said of that."""
    if run.adapter is None:
        run.student.model.save_pretrained(folder)
        return ""
    ids = run.canary().input_ids[:_COMPARED_ROWS, :_COMPARED_LENGTH]
    return save_merged(run.adapter, folder, ids)


@torch.no_grad()
def load_best(run: Run, state: RunState) -> None:
    """Put the best weights into the student."""
    weights = weights_of(run.student.model)
    for name, tensor in state.best_weights.items():
        weights[name].copy_(tensor)


def save_stopped_student(run: Run, state: RunState) -> None:
    """Write the best student of a run that is stopped. The checkpoint is saved already."""
    if not run.parallel.is_first:
        return
    is_judged = state.best_step > 0 or state.evaluations_since_best > 0
    if state.best_weights and is_judged:
        load_best(run, state)
        which = f"the best student so far, that of step {state.best_step}"
    else:
        which = f"the student of step {state.applied}, which was never evaluated"
    try:
        save_student(run)
    except CannotSave as error:
        run.log.write("note", text=f"{error.what}; the checkpoint holds it, and a resumed run writes it")
        return
    run.log.write("note", text=f"student/ holds {which}")
