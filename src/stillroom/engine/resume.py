"""Find the checkpoint and log to continue a run from, restore it, and record how a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stillroom.checkpoint import CheckpointStore, Mark, Saved
from stillroom.config import Config
from stillroom.ends import explained
from stillroom.engine.run import Run
from stillroom.engine.state import RunState, restore, why_unusable, why_unusable_mark
from stillroom.errors import CheckpointUnusable, Fault, StillroomError, is_panic
from stillroom.files import mend, reason_of
from stillroom.parallel import Parallel
from stillroom.telemetry import EventLog


def newest_checkpoint(folder: Path, config: Config) -> Saved | None:
    """The newest checkpoint that verifies. Change nothing: the run may be training."""
    return CheckpointStore(folder / "checkpoints", config.checkpoint.keep).load_newest(why_unusable)


def newest_state(folder: Path, config: Config, parallel: Parallel) -> tuple[Saved | None, Mark | None]:
    """The newest checkpoint that verifies, and the mark of a rollback after it, if any.

    Remove the files of an interrupted save first.
    """
    store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
    if parallel.is_first:
        mend(folder)
        store.sweep()
    parallel.wait()
    saved, mark = store.load_newest(why_unusable), store.mark()
    if mark is None or (saved is not None and saved.line >= mark.line):
        return saved, None
    if reason := why_unusable_mark(mark):
        raise store.unusable_mark(reason)
    return saved, mark


def open_log(folder: Path, saved: Saved | None, mark: Mark | None) -> EventLog:
    """The run's log, cut back to the state it is continued from."""
    if mark is not None:
        return EventLog(folder / "events.jsonl", keep_records=int(mark.history["events"]), keep_until_step=mark.to)
    if saved is None:
        return EventLog(folder / "events.jsonl", keep_records=0, keep_until_step=-1)
    known = saved.scalars.get("events")
    return EventLog(folder / "events.jsonl", keep_records=known, keep_until_step=saved.step)


def _check_base(saved: Saved, run: Run) -> None:
    """Raise if the weights under an adapter are not those it was trained on: no checkpoint holds them."""
    begun, here = saved.scalars.get("base"), run.adapter.base_identity if run.adapter else None
    if begun != here:
        raise CheckpointUnusable(
            f"the weights under the adapter are not those the run began with: their hash was {begun} and is {here}",
            where=run.config.student.model,
            advice=[
                "put the student's model back as it was",
                "begin again with the present one: another folder with --out",
            ],
        )


def precision_of(saved: Saved | None) -> str:
    """The mode a checkpoint was written in: it belongs to the run, whatever `auto` would choose on this device."""
    return str(saved.scalars["precision"]["mode"]) if saved is not None else ""


def processes_of(saved: Saved | None) -> int:
    """The number of processes that a run began with: its windows and its schedule depend on it. 0 before it began."""
    return int(saved.scalars.get("processes", 1)) if saved is not None else 0


def moved_processes(saved: Saved, run: Run) -> str:
    """What to say where a run goes on with another number of processes; nothing where it does not."""
    before, now = processes_of(saved), run.parallel.size
    if before == now:
        return ""
    text = f"begun with {before} processes, goes on with {now}: the same rows in the same order and the same steps"
    idle = now - run.config.train.gradient_accumulation_steps * before
    if idle > 0:
        text += f"; {idle} of the {now} have nothing to do, because a step has {now - idle} micro-batches"
    return f"{text}; sums are added in another order, and random numbers of dropout are others"


def moved_device(saved: Saved, run: Run) -> str:
    """What to say where a run goes on on another kind of device; nothing where it does not."""
    before = saved.scalars["precision"].get("device", run.device.type)
    if before == run.device.type:
        return ""
    return (
        f"the checkpoint is from {before} and the run goes on with {run.device.type}, in {run.precision.mode} "
        "as before: its numbers are no longer those of an uncut run to the last bit"
    )


def restore_checkpoint(run: Run, state: RunState, saved: Saved, *, takes_other_base: bool = False) -> None:
    """Restore a checkpoint into a run built from the same configuration."""
    if not takes_other_base:
        _check_base(saved, run)
    try:
        restore(run, state, saved)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointUnusable(
            f"the checkpoint of step {saved.step} does not fit the run: {reason_of(error)}",
            where=str(run.folder / "checkpoints"),
            advice=[
                "check that the models are those the run began with",
                "or that this version of stillroom is the one that saved it, see config.json",
            ],
        ) from error


@contextmanager
def recorded_end(log: EventLog, folder: Path) -> Iterator[None]:
    """Log how the run ended. Turn errors of memory and disk into errors with advice."""
    try:
        yield
    except StillroomError as error:
        log.write("run_end", status="stopped", exit_code=error.exit_code, reason=str(error.what))
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        end = explained(error, str(folder)) or Fault(f"{type(error).__name__}: {reason_of(error)}")
        log.write("run_end", status="stopped", exit_code=end.exit_code, reason=str(end.what))
        if isinstance(end, Fault):
            raise
        raise end from error
