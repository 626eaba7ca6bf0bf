"""A network without values: its layers as they are, its parameters without memory, to be filled from a file.

Where a student is sharded, no process has a network that could be merged and written. An outline is taken before it is
sharded, with the adapter and the stored base in place, and filled at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def outline_of(network: Any) -> Any:
    """A copy whose parameters are on the meta device, tied ones tied. Buffers are copied: they are small."""
    memo: dict[int, Any] = {
        id(one): nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad) for one in network.parameters()
    }
    return copy.deepcopy(network, memo)


@torch.no_grad()
def fill(outline: Any, values: Mapping[str, Tensor]) -> None:
    """Give every parameter its value, and every buffer that has one; a tied parameter has one name."""
    made = {
        id(one): nn.Parameter(values[name], requires_grad=one.requires_grad) for name, one in outline.named_parameters()
    }
    for module in outline.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    for name, buffer in outline.named_buffers():
        if name in values:
            buffer.copy_(values[name])
