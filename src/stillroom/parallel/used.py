"""Which trained parameters the micro-batches of a window used in this process.

In one process an expert that no token chose has no gradient and is not updated. Several processes have to send zeros
for it, because all of them send the same tensors, and AdamW would move it by its momentum and its decay.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class Uses:
    """Names of parameters that got a gradient since `begin`.

    A micro-batch without a target, which a process takes to keep step with the others, uses nothing.
    """

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()  # by parameter: another run in this process has others of the same names
        self._names: set[str] = set()
        self._num_left = 0  # micro-batches with a target that are still to come
        self._is_counted = False

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        if parameter not in self._watched:
            self._watched[parameter] = name
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def _note(self, name: str, _parameter: Any) -> None:
        if self._is_counted:
            self._names.add(name)

    def begin(self, num_batches: int) -> None:
        """A window of so many micro-batches with a target begins."""
        self._names.clear()
        self._num_left = num_batches

    def next_batch(self) -> None:
        self._is_counted = self._num_left > 0
        self._num_left -= 1

    def flags(self, names: Iterable[str]) -> Tensor:
        return torch.tensor([name in self._names for name in names], dtype=torch.int32)
