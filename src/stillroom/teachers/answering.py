"""The process that holds a teacher: it answers the trainers that ask it until each has said that the run is over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillroom.ends import explained
from stillroom.errors import Fault, Interrupted, StillroomError
from stillroom.files import reason_of
from stillroom.models import LoadedModel
from stillroom.teachers.elsewhere import DESCRIBE, END, Exchange, batch_of, description_of, error_of
from stillroom.teachers.live import LiveTeacher
from stillroom.types import Needs

# The trainers wait for an answer, whatever goes wrong in a network's forward.
_FAILURES = (StillroomError, ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)

Opened = tuple[LoadedModel, LiveTeacher]
Answer = tuple[dict[str, Any], Sequence[Tensor]]


@dataclass
class _Letter:
    """A message of a trainer, or why there is none. The trainer's next one is read after `is_answered`."""

    sender: Exchange
    header: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    lost: Interrupted | None = None
    is_answered: threading.Event = field(default_factory=threading.Event)

    @property
    def is_last(self) -> bool:
        return self.lost is not None or self.header["do"] == END


def answer_all(exchanges: Sequence[Exchange], open_teacher: Callable[[], Opened]) -> int:
    """Answer every trainer. Return the exit code that they ended with, the first that is not 0.

    The teacher is opened when a trainer first asks about it. A thread waits for each trainer; this one computes. Where
    a trainer is lost or the teacher fails, the trainers are answered until all have ended, and then that is raised: a
    process cannot end cleanly while a thread waits for a message.
    """
    letters: queue.Queue[_Letter] = queue.Queue()
    for exchange in exchanges:
        threading.Thread(target=_read, args=(exchange, letters), daemon=True).start()
    desk, ends = _Desk(open_teacher), list[_Letter]()
    while len(ends) < len(exchanges):
        letter = letters.get()
        ends += [letter] if letter.is_last else []
        if letter.lost is None:
            with suppress(Interrupted):  # the thread that reads finds the same
                letter.sender.send(*desk.answer(letter))
        letter.is_answered.set()
    lost = next((letter.lost for letter in ends if letter.lost is not None), None)
    if desk.failure is not None or lost is not None:
        raise desk.failure or lost or AssertionError
    return next((code for code in (int(letter.header["exit_code"]) for letter in ends) if code), 0)


def _read(exchange: Exchange, letters: queue.Queue[_Letter]) -> None:
    while True:
        letter = _Letter(exchange)
        try:
            letter.header, letter.tensors = exchange.receive()
        except Interrupted as error:
            letter.lost = error
        letters.put(letter)
        if letter.is_last:
            return
        letter.is_answered.wait()


class _Desk:
    """The teacher, or the reason why it cannot answer, which is an answer too: trainers raise it and end."""

    def __init__(self, open_teacher: Callable[[], Opened]) -> None:
        self._open = open_teacher
        self._opened: Opened | None = None
        self.failure: StillroomError | None = None

    def answer(self, letter: _Letter) -> Answer:
        if letter.header["do"] == END:
            return {}, []
        if self.failure is None:
            try:
                return self._described() if letter.header["do"] == DESCRIBE else self._asked(letter)
            except _FAILURES as error:
                known = error if isinstance(error, StillroomError) else explained(error, "the teacher's process")
                self.failure = known or Fault(f"the teacher failed: {type(error).__name__}: {reason_of(error)}")
                self.failure.__cause__ = error
        return error_of(self.failure), []

    def _described(self) -> Answer:
        self._opened = self._opened or self._open()
        return description_of(self._opened[0])

    @torch.no_grad()
    def _asked(self, letter: _Letter) -> Answer:
        assert self._opened is not None, "a trainer asks for the description first"
        live = self._opened[1]
        return {}, [live.observe(batch_of(letter.tensors[0]).to(live.device), Needs()).hidden]
