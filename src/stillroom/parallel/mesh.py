"""Which processes hold parts of one copy of a model: groups that share a copy, and copies between the groups.

Processes 0 to S - 1 share the first copy, the next S the second. Torch numbers the processes of a machine one after
another, so with S processes on each machine layers are gathered inside of it, and only gradients go between machines.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stillroom.errors import ConfigError

COPIES, PARTS = "copies", "parts"


def check_shard_size(shard_size: int, size: int, strategy: str) -> None:
    """Raise if `size` processes cannot be divided into groups of `shard_size`. 0: they are one group."""
    if shard_size and strategy != "fsdp":
        raise ConfigError(
            f"train.shard_size = {shard_size} divides a sharded student, and train.strategy is {strategy!r}",
            where="train.shard_size",
            advice=["--set train.strategy=fsdp", "or leave train.shard_size out"],
        )
    if shard_size and size % shard_size:
        fitting = [str(number) for number in range(2, size + 1) if size % number == 0]
        raise ConfigError(
            f"{size} processes cannot be divided into groups of {shard_size}",
            where="train.shard_size",
            advice=[f"train.shard_size = {' or '.join(fitting)}", "or 0: one group of all processes"],
        )


def make_mesh(device_type: str, size: int, shard_size: int, timeout: timedelta | None = None) -> DeviceMesh:
    """One dimension of all processes, or two: copies of the model, and parts of each copy.

    Groups are made here and not by torch, because those would wait for half an hour whatever `timeout` says.
    """
    if shard_size == size:
        return init_device_mesh(device_type, (size,))
    ranks = torch.arange(size).view(-1, shard_size)
    divide: Any = dist.new_subgroups_by_enumeration  # torch leaves it untyped
    parts, _ = divide(ranks.tolist(), timeout=timeout)
    copies, _ = divide(ranks.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([copies, parts], device_type, mesh=ranks, mesh_dim_names=(COPIES, PARTS))
