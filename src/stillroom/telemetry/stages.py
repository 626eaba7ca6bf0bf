"""Stages of a run: what it does when it takes no step, how far it is, and about how long that takes.

A stage begins and ends in the log. Its progress goes to listeners alone, because a log of batches evaluated helps
nobody later. Times left are estimated from what is done, at first from the last stage of the same name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Advance = Callable[[], None]

_PROGRESS_SECONDS = 0.25  # between two announcements


class Sink(Protocol):
    """An `EventLog`, or what replaces it before the log is open."""

    def write(self, event: str, /, **fields: Any) -> object: ...

    def announce(self, event: str, /, **fields: Any) -> None: ...


class Listening:
    """Call listeners while there is no log yet."""

    def __init__(self, listeners: tuple[Callable[[dict[str, Any]], None], ...] = ()) -> None:
        self._listeners = listeners

    def write(self, event: str, /, **fields: Any) -> None:
        for listener in self._listeners:
            listener({"event": event, **fields})

    announce = write


class Stages:
    """The stages of one run. `seconds` holds what each took, the last of a name."""

    def __init__(self, sink: Sink | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.sink: Sink = sink if sink is not None else Listening()
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def stage(
        self, name: str, total: int = 0, *, unit: str = "batches", about: float | None = None
    ) -> Iterator[Advance]:
        """Announce a stage around the body, which calls what it gets after each of `total` parts.

        `about` is how many seconds it is expected to take, where the last stage of this name does not say it. A stage
        that ends with an error has no end in the log: the record of the run's end follows.
        """
        began = told = self._clock()
        counted: dict[str, Any] = {"total": total, "unit": unit} if total else {}
        expected = self.seconds.get(name, about)
        done = 0

        def advance() -> None:
            nonlocal done, told
            done += 1
            now = self._clock()
            if now - told < _PROGRESS_SECONDS:
                return
            told = now
            left = (now - began) / done * max(0, total - done) if total else None
            self.sink.announce(
                "stage",
                name=name,
                state="progress",
                seconds=now - began,
                done=done,
                **counted,
                **({} if left is None else {"eta_seconds": left}),
            )

        estimate = {} if expected is None else {"eta_seconds": round(expected, 3)}
        self.sink.write("stage", name=name, state="begin", seconds=0.0, **counted, **estimate)
        yield advance
        self.seconds[name] = round(self._clock() - began, 3)
        self.sink.write("stage", name=name, state="end", seconds=self.seconds[name], **counted)
