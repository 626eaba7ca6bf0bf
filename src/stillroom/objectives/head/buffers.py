"""Large memory of the head on a CPU: lent to a tensor and taken back when nothing uses that tensor's memory any more.

A block of this size goes back to the system when it is freed, and the next pass faults it in again, page by page, each
cleared by the kernel first. For a chunk of logits that took longer than the compiled rows do, and the weight's gradient
is as large. A GPU's allocator keeps what is freed by itself, so there it is asked.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

_LEAST_KEPT_BYTES = 1 << 20  # smaller ones are kept by the allocator itself
_MOST_KEPT = 5  # of one pass: two chunks of logits, the weight's gradient, FP32 copies of two half-precision weights


class BufferPool:
    """Blocks that nobody uses at the moment. Passes in several threads borrow from it and never share one."""

    def __init__(self, least_kept_bytes: int = _LEAST_KEPT_BYTES) -> None:
        self._least_kept_bytes = least_kept_bytes
        self._blocks: list[np.ndarray] = []
        # A collection of garbage may run anywhere, also in here, and bring a block back in the middle of lending one.
        self._lock = threading.RLock()

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor. Its memory, with whatever was left in it, is lent again once the last view of it is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes < self._least_kept_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._take(num_bytes)
        lent = block[:num_bytes]  # an object of its own: torch holds it for as long as it holds the memory
        weakref.finalize(lent, self._put, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """What is kept."""
        return sum(block.size for block in self._blocks)

    def clear(self) -> None:
        """Give back to the system what nobody uses."""
        with self._lock:
            self._blocks = []

    def _take(self, num_bytes: int) -> np.ndarray:
        """The smallest block that is large enough, or a new one."""
        with self._lock:
            fitting = [block for block in self._blocks if block.size >= num_bytes]
            if fitting:
                chosen = min(fitting, key=lambda block: block.size)
                self._blocks = [block for block in self._blocks if block is not chosen]
                return chosen
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()  # torch's own memory, for its alignment

    def _put(self, block: np.ndarray) -> None:
        """Keep the largest few: a small one is quickly had anew."""
        with self._lock:
            self._blocks = sorted([*self._blocks, block], key=lambda block: block.size)[-_MOST_KEPT:]


POOL = BufferPool()
