"""What several processes need of torch, by name: older versions train in one process alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from stillroom.errors import BrokenAtStart

DDP_OPTIONS = ("init_sync", "forward_sync_buffers")
FSDP_METHODS = (
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_requires_all_reduce",
)


def check_torch(*, is_sharded: bool) -> None:
    """Raise where this torch cannot train in several processes, or not with a model in parts."""
    options = inspect.signature(DistributedDataParallel.__init__).parameters
    _refuse("several processes", [name for name in DDP_OPTIONS if name not in options])
    if is_sharded:
        from torch.distributed.fsdp import FSDPModule  # it takes half a second to import

        _refuse("a model in parts", [name for name in FSDP_METHODS if not hasattr(FSDPModule, name)])


def _refuse(what: str, missing: Sequence[str]) -> None:
    if missing:
        raise BrokenAtStart(
            f"torch {torch.__version__} is too old for {what}: it has no {missing[0]}",
            where="torch",
            advice=["install a newer torch", "or start a single process"],
        )
