"""A pool of large CPU buffers for the head: a buffer returns to it when the last tensor that uses it is gone.

Freed, a block of this size goes back to the system, and the next pass faults it in again page by page, each cleared
first. For a chunk of logits that took longer than the compiled rows, and the weight's gradient is as large. On a GPU
torch's caching allocator is used.
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
    """Unused blocks. Several threads may borrow; no block is lent twice at a time."""

    def __init__(self, least_kept_bytes: int = _LEAST_KEPT_BYTES) -> None:
        self._least_kept_bytes = least_kept_bytes
        self._blocks: list[np.ndarray] = []
        # Reentrant: garbage collection may run inside `_take` and call `_put` in the same thread.
        self._lock = threading.RLock()

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor. Its memory comes back to the pool when its last view is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes < self._least_kept_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._take(num_bytes)
        lent = block[:num_bytes]  # an object of its own: torch holds it for as long as it holds the memory
        weakref.finalize(lent, self._put, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the unused blocks."""
        return sum(block.size for block in self._blocks)

    def clear(self) -> None:
        """Free the unused blocks."""
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
        """Keep the largest few blocks: small ones are cheap to allocate."""
        with self._lock:
            self._blocks = sorted([*self._blocks, block], key=lambda block: block.size)[-_MOST_KEPT:]


POOL = BufferPool()
