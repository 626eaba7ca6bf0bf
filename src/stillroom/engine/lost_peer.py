"""The last checkpoint of a run that has lost a process.

With ddp each process holds the whole state, so whoever is left saves the last accepted step and no step is lost. With
fsdp the parts of the lost process are gone with it, and the newest checkpoint stays what it was.

The first process writes if it is left: it holds the lock of the run's folder. If it is dead its lock is free, and of
the others the one that takes it writes. If it is frozen it still holds the lock, and nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from stillroom.engine.background_save import Saves
from stillroom.engine.recovery.recover import is_good
from stillroom.engine.run import Run
from stillroom.engine.run_folder import folder as run_folder
from stillroom.engine.saving import save_checkpoint
from stillroom.engine.state import RunState
from stillroom.errors import PeerGone, StillroomError
from stillroom.files import reason_of
from stillroom.locks import LockHeld
from stillroom.parallel import Parallel
from stillroom.telemetry import EventLog


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
