"""How many bytes of tensors are alive at once, counted by the storage behind them."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, sums up the storages that operations make. `peak` is the largest sum seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_tensor(tensor):
                self._hold(tensor, known)
        return result

    def _hold(self, tensor: Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in known and place not in self._holders:  # a view of what was there before
            return
        if self._holders[place] == 0:
            self.live += size
            self.peak = max(self.peak, self.live)
        self._holders[place] += 1
        weakref.finalize(tensor, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if self._holders[place] == 0:
            del self._holders[place]
            self.live -= size


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
