"""A teacher that answers while the student trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from stillroom.models import probe
from stillroom.models.student import last_hidden
from stillroom.models.taps import tapped
from stillroom.types import Batch, DenseSignal, Needs, Signal


class TeacherSource(Protocol):
    """Whatever answers a batch: a live model, or a store of answers."""

    def observe(self, batch: Batch, rows: Tensor, needs: Needs) -> Signal: ...


class LiveTeacher:
    """A frozen model, on the device for good or only while it answers."""

    def __init__(self, model: Any, *, vocab_size: int, device: torch.device, offload: bool, is_described: bool) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.device = device
        self.offload = offload
        self.is_described = is_described
        self._blocks = probe.layers(model)
        if not offload:
            model.to(device)

    @torch.no_grad()
    def observe(self, batch: Batch, rows: Tensor, needs: Needs) -> DenseSignal:
        with self._at_work(), tapped(self._blocks, needs) as taps:
            hidden, head = last_hidden(self.model, batch, self.vocab_size, self.is_described)
            weight, bias = head.weight, head.bias
            if self.offload:
                # The head outlives the visit: the objectives need it after the body has left the device.
                weight = weight.to(self.device, copy=True)
                bias = bias.to(self.device, copy=True) if bias is not None else None
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, rows)
        return DenseSignal(chosen, weight, bias, head.scale, head.softcap, head.vocab_size, taps)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        self.model.to(self.device)
        try:
            yield
        finally:
            self.model.to("cpu")
