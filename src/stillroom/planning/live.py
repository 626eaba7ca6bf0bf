"""Follow the bytes of tensors that are alive at once, by the part of a step that made them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CASTS = "casts"
_CAST = torch.ops.aten._to_copy.default


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, sums up the storages that operations make. Storages of `known` tensors are not counted.

    Works on fake tensors and on real ones. `at_peak` says what each part had when the sum was largest.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = list(known)  # keeps their storages, so that no other one gets the same number
        self._known = {_number(tensor) for tensor in self._held}
        self._parts: dict[int, str] = {}
        self.by_part: Counter[str] = Counter()
        self.live = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._part = "other"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is _CAST and _number(args[0]) in self._known
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor, CASTS if is_cast else self._part)
        return result

    def _hold(self, tensor: Tensor, part: str) -> None:
        number = _number(tensor)
        if number in self._known or number in self._parts:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._parts[number] = part
        self.by_part[part] += size
        self.live += size
        weakref.finalize(storage, self._drop, number, size)
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, {name: held for name, held in self.by_part.items() if held}

    def _drop(self, number: int, size: int) -> None:
        self.by_part[self._parts.pop(number)] -= size
        self.live -= size


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
