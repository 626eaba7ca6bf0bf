"""Requests to stop, from a signal or the time limit."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stillroom.errors import Interrupted

# A closed terminal or a lost connection sends a hangup. Not every platform has it.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class Stop:
    """A request to stop. It takes effect between two steps or two held-out batches."""

    def __init__(self, max_minutes: float = 0.0) -> None:
        self.reason = ""
        self.reserve = 0.0  # seconds that saving takes, subtracted from the time limit
        self._is_loading = False
        self._has_deadline = False
        self._began = time.monotonic()
        self._deadline = time.monotonic() + 60 * max_minutes if max_minutes else None

    @property
    def seconds(self) -> float:
        """The time since the command began."""
        return time.monotonic() - self._began

    def is_wanted(self) -> bool:
        if not self.reason and self._has_deadline and self.is_late():
            self.reason = "the time limit is reached"
        return bool(self.reason)

    def is_late(self) -> bool:
        """Whether saving now would end after the time limit."""
        return self._deadline is not None and time.monotonic() + self.reserve >= self._deadline

    def heed_clock(self) -> None:
        """Enforce the time limit from now on. Called after the first step, so that every start of a run makes progress.

        The limit counts from the start of the command, loading and the first evaluation included.
        """
        self._has_deadline = True

    @contextmanager
    def while_loading(self) -> Iterator[None]:
        """In the body a signal ends the command at once: there is nothing to save."""
        self.check_loading()
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading = False
        self.check_loading()  # a library may have caught the error that the signal raised

    def check_loading(self) -> None:
        if self.reason:
            raise Interrupted(
                f"stopped while loading: {self.reason}",
                advice=["give the same command again: nothing was trained yet, or what was is saved"],
            )

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """SIGTERM, a hangup and Ctrl-C request a stop; a second Ctrl-C ends at once."""

        def request(number: int, _frame: FrameType | None) -> None:
            if self.reason and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.reason = f"received {signal.Signals(number).name}"
            if self._is_loading:
                self.check_loading()

        # Under nohup a hangup stays ignored.
        wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        try:
            before = {number: signal.signal(number, request) for number in wanted}
        except ValueError:  # not in the main thread: the embedding program owns the signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
