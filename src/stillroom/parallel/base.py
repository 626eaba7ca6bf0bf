"""How a run uses its processes. With one process every method is a no-op.

Every process trains on its share of each window. Counts are summed before any forward, so every loss is divided by the
counts of all processes, and gradients are summed, not averaged. The guard's evidence is the same everywhere, so every
process reaches the same verdict. Only the first process writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stillroom.data import Loader
    from stillroom.precision import AdamW
    from stillroom.types import Batch


class Parallel:
    """One process."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes: events, checkpoints, the student, the console, the report."""
        return self.rank == 0

    # -- what a step asks ----------------------------------------------------------------------------------

    def prepare(self, optimizer: AdamW) -> None:
        """Called once, when the run is built."""

    def seed(self, seed: int, attempted: int) -> None:
        """Called before the first forward of an attempt."""

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """The micro-batches this process learns from: those with a target."""
        return [batch for batch in window if batch.num_scored]

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Sum counts over the processes."""
        return dict(counts)

    def sum_gradients(self, optimizer: AdamW) -> None:
        """Called after the last backward of a window: sum the gradients over the processes."""

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over the processes, in place."""

    def names(self, names: Iterable[str]) -> list[str]:
        """All names that a process has, in the same order in every process."""
        return list(names)

    def whole_window(self, loader: Loader, cursor: int, window: Sequence[Batch]) -> Sequence[Batch]:
        """The window of all processes; `window` is the share of this one."""
        return window

    # -- what all processes agree on --------------------------------------------------------------------

    def worst(self, value: float) -> float:
        """The largest value of any process; NaN counts as infinite."""
        return value

    def broadcast(self, value: float) -> float:
        """The first process's value."""
        return value

    def same_everywhere(self, fingerprint: int) -> bool:
        """Whether every process has this number."""
        return True

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if the processes' tensors differ in any bit."""

    def wait(self) -> None:
        """Wait for all processes."""

    def all_of(self, claim: bool) -> bool:
        return self.worst(0.0 if claim else 1.0) == 0.0

    def any_of(self, claim: bool) -> bool:
        return self.worst(1.0 if claim else 0.0) == 1.0


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """Sum the bits of every tensor, weighted by its place among the tensors."""
    total = 0
    for place, tensor in enumerate(tensors.values(), start=1):
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        total = (total + place * int(bits.sum(dtype=torch.int64))) % (1 << 62)
    return total
