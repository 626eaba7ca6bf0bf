"""A frozen network in parts: each process holds a part of every weight, and all of them ask it at the same time.

A layer is gathered for its forward and freed after it. What is outside of layers (embeddings, last norm, head) is
gathered by `gather` and freed by `release`. Torch's FSDP2 does both. Every process has to take part in every forward,
or the others wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from stillroom.errors import BrokenAtStart
from stillroom.parallel.mesh import make_mesh
from stillroom.parallel.processes import Processes
from stillroom.parallel.sharded import Gather, Root, is_sharded


def shard_frozen(
    parallel: Processes,
    network: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    device: str,
    where: str,
    bring: Callable[[int], None] = lambda _index: None,
) -> FrozenParts:
    """Leave this process a part of a frozen network, in the groups that a sharded student is divided in too.

    `bring` is called with the number of a layer before its weights are needed: they come one layer at a time.
    """
    mesh = make_mesh(device, parallel.size, parallel.shard_size, parallel.timeout)
    parts = FrozenParts(network, blocks, mesh, where=where, bring=bring)
    parallel.ask_together()
    return parts


class FrozenParts:
    """The parts of a network that this process holds."""

    def __init__(
        self,
        network: nn.Module,
        blocks: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        where: str,
        bring: Callable[[int], None],
    ) -> None:
        """Shard the layers and the rest, and raise where a weight is still whole."""
        if not blocks:
            raise BrokenAtStart(
                f"{type(network).__name__} has no list of layers that could be gathered one by one",
                where=where,
                advice=["--set teacher.placement=device", "--set teacher.placement=offload"],
            )
        network.requires_grad_(False)
        root: Any = Root(network)
        for index, block in enumerate(blocks):
            bring(index)
            fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh, reshard_after_forward=False)
        for module in (root, *blocks):
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather())
        whole = [name for name, parameter in network.named_parameters() if not is_sharded(parameter)]
        if whole:
            raise BrokenAtStart(
                f"a sharded teacher was asked for and {len(whole)} parameters are not sharded, {whole[0]} among them",
                where=where,
                advice=["--set teacher.placement=device"],
            )
        with torch.no_grad():
            root(lambda: None)  # FSDP2 takes the first module that runs as its root
        root.reshard()
        self._root = root
        self._parameters: list[Any] = list(network.parameters())

    def gather(self) -> None:
        """Make the weights outside of layers whole."""
        self._root.unshard()

    def release(self) -> None:
        self._root.reshard()

    def facts(self) -> dict[str, int]:
        """Bytes that this process holds, and those of the whole network."""
        held = sum(one.to_local().numel() * one.element_size() for one in self._parameters)
        return {"held_bytes": held, "whole_bytes": sum(one.numel() * one.element_size() for one in self._parameters)}
