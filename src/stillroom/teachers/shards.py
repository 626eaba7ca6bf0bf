"""A teacher of which each process holds a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from stillroom.teachers.placement import Placement
from stillroom.types import HeadWeights


class Parts(Protocol):
    """A network in parts, whose layers come and go by themselves."""

    def gather(self) -> None:
        """Make what is outside of layers whole."""

    def release(self) -> None: ...

    def facts(self) -> dict[str, int]: ...


class Shards(Placement):
    """What is outside of layers is whole while the teacher is asked, and from the first answer of a window to its end.

    The head is needed until the student's backward: inside a window it is the gathered one, elsewhere a copy.
    """

    writes_text = False  # each token would gather every layer
    is_shared = True

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._visits = 0
        self._is_whole = False
        self._is_window = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if not self._is_whole:
            self._parts.gather()
            self._is_whole = True
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if not self._is_window:
                self._release()

    def begin_window(self) -> None:
        self._is_window = True

    def end_window(self) -> None:
        self._is_window = False
        self._release()

    def lasting(self, head: HeadWeights) -> HeadWeights:
        if self._is_window or head.is_identity:
            return head
        return replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())

    def facts(self) -> dict[str, Any]:
        return {"teacher_shards": self._parts.facts()}

    def _release(self) -> None:
        if self._visits == 0 and self._is_whole:
            self._parts.release()
            self._is_whole = False
