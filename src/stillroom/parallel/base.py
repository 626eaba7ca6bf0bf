"""How a run uses its processes. With one process every method is a no-op.

Every process trains on its share of each window. Counts are summed before any forward, so every loss is divided by the
counts of all processes, and gradients are summed, not averaged. The guard's evidence is the same everywhere, so every
process reaches the same verdict. Only the first process writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stillroom.data import Loader
    from stillroom.precision import AdamW
    from stillroom.types import Batch

T = TypeVar("T")


class Parallel:
    """One process."""

    strategy = "single"
    rank = 0
    size = 1
    is_sharded = False  # whether a process holds a part of each weight
    group: Any = None  # of torch.distributed; None: the one of all processes
    takes_smaller_parts = True  # whether a window can be taken again where memory ran out

    @property
    def num_copies(self) -> int:
        """How often all processes together hold the student and its optimizer state."""
        return self.size

    @property
    def is_first(self) -> bool:
        """Whether this process writes: events, checkpoints, the student, the console, the report."""
        return self.rank == 0

    def beside(self) -> Parallel:
        """The same processes for another thread, whose messages do not mix with those of this one. Called by all."""
        return self

    # -- what a step asks ----------------------------------------------------------------------------------

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Called when the student is on its device, before there is an optimizer. `blocks` are its layers."""

    def gather_in(self, dtype: torch.dtype) -> None:
        """Called before `place`: parts of weights stay as they are, and are cast to this when they are gathered."""

    def prepare(self, optimizer: AdamW) -> None:
        """Called when the run is built, and again after a window that was given up for want of memory."""

    def seed(self, seed: int, attempted: int) -> None:
        """Called before the first forward of an attempt."""

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """The micro-batches this process learns from: those with a target."""
        return [batch for batch in window if batch.num_scored]

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Sum counts over the processes."""
        return dict(counts)

    def window(self) -> AbstractContextManager[None]:
        """Around the micro-batches of a window."""
        return nullcontext()

    def forward(self, compute: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        """The loss of a micro-batch. `compute` is its whole forward; `is_last` in the window."""
        return compute()

    def trial(self, compute: Callable[[], Tensor]) -> Tensor:
        """The same outside of a window: its gradients are dropped."""
        return compute()

    def trial_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The counts that divide the loss of a trial: those of the processes whose gradients are added up in it."""
        return dict(counts)

    def gradients_of(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The gradient of a trial's loss, what this process holds of it. Nothing is left in the parameters."""
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    def sum_parts(self, tensor: Tensor) -> None:
        """Sum what each process computed of its part of the weights, in place."""

    def sum_gradients(self, optimizer: AdamW) -> None:
        """Called after the last backward of a window: from here on gradients are those of all processes."""

    def mean_of_norms(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this process adds to the squared gradient norms that are summed over the processes."""
        return squares

    def gathered(self) -> AbstractContextManager[None]:
        """Around uses of the student outside of a window."""
        return nullcontext()

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over the processes, in place."""

    def names(self, names: Iterable[str]) -> list[str]:
        """All names that a process has, in the same order in every process."""
        return list(names)

    def whole_window(self, loader: Loader, cursor: int, window: Sequence[Batch]) -> Sequence[Batch]:
        """The window of all processes; `window` is the share of this one."""
        return window

    # -- state -------------------------------------------------------------------------------------------

    def as_global(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process holds, as torch knows it to be a part of the whole."""
        return dict(tensors)

    @torch.no_grad()
    def load(self, group: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy a saved group of tensors into those that are present; both have the same names."""
        if set(present) != set(saved):
            odd = sorted(set(present) ^ set(saved))[:3]
            raise ValueError(f"the saved {group} has other tensors: {', '.join(odd)}")
        if hasattr(saved, "into"):  # it is read from the files of several processes
            saved.into(present)
            return
        for name, tensor in present.items():
            found = saved[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:  # a copy would broadcast or cast it
                raise ValueError(f"the saved {group} has {name} as {_kind(found)}, the run as {_kind(tensor)}")
            tensor.copy_(found)

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

    def collect(self, value: Any) -> list[Any]:
        """A JSON value of every process, in their order."""
        return [value]

    def together(self, action: Callable[[], T]) -> T:
        """Do something with files in every process. An OSError in one of them is raised in all."""
        return action()

    def asking_peers(self) -> AbstractContextManager[None]:
        """Around messages that a library sends: there too a lost process ends the others with exit code 75."""
        return nullcontext()

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


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
