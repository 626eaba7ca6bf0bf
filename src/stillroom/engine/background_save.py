"""The save in flight: at most one, written by a thread while training goes on.

The state was copied before, so later steps do not change what is written. Whoever needs a finished checkpoint calls
`settle`: the next save, a rollback, a stop, the end of the run. Every process calls it at the same places, because the
first one says whether the checkpoint is whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stillroom.errors import CannotSave, StillroomError
from stillroom.files import reason_of
from stillroom.parallel import Parallel

if TYPE_CHECKING:
    from stillroom.engine.run import Run
    from stillroom.engine.state import RunState


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

    A full disk is logged and the run goes on; any other error is raised.
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
        run.log.write("note", text=f"{save.error.what}; the run goes on, the last good checkpoint stays")
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
