"""What a teacher with trained gates asks of the other processes of a run; nothing, where there are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor


class Peers(Protocol):
    """The part of `parallel.Parallel` that is used here. Every process calls the same methods in the same order."""

    size: int

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]: ...
    def sum_(self, tensor: Tensor) -> None: ...
    def broadcast(self, value: float) -> float: ...
    def names(self, names: Iterable[str]) -> list[str]: ...
    def gathered(self) -> AbstractContextManager[None]: ...


class Alone:
    """One process, which has the whole student."""

    size = 1

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        return dict(counts)

    def sum_(self, tensor: Tensor) -> None:
        """Nothing to add."""

    def broadcast(self, value: float) -> float:
        return value

    def names(self, names: Iterable[str]) -> list[str]:
        return list(names)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()
