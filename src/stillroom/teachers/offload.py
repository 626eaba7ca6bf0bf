"""A network whose weights live in main memory and are copied to the device while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.teachers.placement import Placement
from stillroom.types import HeadWeights

_HOME = torch.device("cpu")


@dataclass
class _Kept:
    """A tensor of the network with its values in main memory, and its version when it came to the device."""

    tensor: Tensor
    home: Tensor
    version: int = 0


class Offloaded(Placement):
    """Weights come to the device for a visit and are never copied back: they do not change, so the copy is dropped.

    On CUDA the values at home are pinned: the copies are queued behind the work that is under way, and the program goes
    on. They come on the same stream, so that what the student's backward pass has freed is where they go: fetched
    earlier, beside that pass, they would need as much memory as a teacher that stays.
    """

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network = network
        self._device = device
        self._kept: dict[int, _Kept] = {}
        self._visits = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The weights are on the device in the body. Visits may be nested: the last one to end sends them home."""
        if self._visits == 0:
            self._bring()
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if self._visits == 0:
                self._send_home()

    def lasting(self, head: HeadWeights) -> HeadWeights:
        """The copy on the device and not the model's parameter, which goes home."""
        bias = head.bias.detach() if head.bias is not None else None
        return replace(head, weight=head.weight.detach(), bias=bias)

    def _bring(self) -> None:
        known, self._kept = self._kept, {}
        for tensor in self._tensors():
            kept = known.get(id(tensor)) or _Kept(tensor, _pinned(tensor.data, self._device))
            self._kept[id(tensor)] = kept
            tensor.data = _fetched(kept.home, self._device)
            kept.version = tensor._version

    def _send_home(self) -> None:
        for tensor in self._tensors():
            kept = self._kept.get(id(tensor))
            if kept is None:  # a buffer that the forward made anew, as some rotary embeddings do
                tensor.data = tensor.data.to(_HOME)
                continue
            if tensor._version != kept.version:  # a buffer that the forward wrote into
                kept.home.copy_(tensor.data)
            tensor.data = kept.home

    def _tensors(self) -> list[Tensor]:
        return [*self._network.parameters(), *self._network.buffers()]


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    values = values.to(_HOME)
    return values.pin_memory() if device.type == "cuda" else values


def _fetched(home: Tensor, device: torch.device) -> Tensor:
    return home.to(device, non_blocking=True)
