"""Working memory for chunks of logits on a CPU: lent for a pass and kept for the next.

A block of this size goes back to the system when it is freed, and the next pass faults it in again, page by page, each
cleared by the kernel first: that took longer than the compiled rows do. A GPU's allocator keeps what is freed by
itself, so there every pass has its own.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

_MOST_KEPT = 2  # one pass borrows two blocks: the student's and the teacher's


class Shelf:
    """Blocks that nobody uses at the moment. Passes in several threads borrow from it and never share one."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._lock = threading.Lock()

    def lend(
        self, borrower: object, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A matrix, with whatever an earlier pass left in it, that is the borrower's until the borrower is gone."""
        if device.type != "cpu":
            return torch.empty((num_rows, num_columns), dtype=dtype, device=device)
        num_bytes = num_rows * num_columns * dtype.itemsize
        block = self._take(num_bytes)
        weakref.finalize(borrower, self._put, block).atexit = False
        return block[:num_bytes].view(dtype).view(num_rows, num_columns)

    @property
    def num_bytes(self) -> int:
        """What is kept."""
        return sum(block.numel() for block in self._blocks)

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._blocks = []

    def _take(self, num_bytes: int) -> Tensor:
        """The smallest block that is large enough, or a new one."""
        with self._lock:
            fitting = [block for block in self._blocks if block.numel() >= num_bytes]
            if fitting:
                chosen = min(fitting, key=Tensor.numel)
                self._blocks = [block for block in self._blocks if block is not chosen]
                return chosen
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _put(self, block: Tensor) -> None:
        """Keep the largest few: a small one is quickly had anew."""
        with self._lock:
            self._blocks = sorted([*self._blocks, block], key=Tensor.numel)[-_MOST_KEPT:]


SHELF = Shelf()
