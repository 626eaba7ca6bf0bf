"""One interface for runs of one process and of several; `join` makes it for the processes that a launcher started."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from stillroom.core.errors import BrokenAtStart
from stillroom.parallel.base import Parallel, check_torch, fingerprint, peer_errors
from stillroom.parallel.ddp import Replicated
from stillroom.parallel.fsdp import check_shard_size

__all__ = ["Parallel", "Replicated", "fingerprint", "join"]


def join(timeout_minutes: float, strategy: str = "auto", shard_size: int = 0) -> Parallel:
    """The policy of `train.strategy` for the processes of this run; `Parallel()` for a single process.

    A process waits for another at most `timeout_minutes`. With `shard_size` groups of so many processes hold a copy.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Parallel()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BrokenAtStart(
            f"WORLD_SIZE is {size} and {', '.join(missing)} not set: the processes cannot find each other",
            where="environment",
            advice=["start the run with torchrun --nproc-per-node N -m stillroom distill ...", "or unset WORLD_SIZE"],
        )
    check_torch(is_sharded=strategy == "fsdp")
    check_shard_size(shard_size, size, strategy)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _begin(timeout)
    return _policy(strategy, shard_size, timeout)


def _begin(timeout: timedelta) -> None:
    """Make the group of all processes."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with peer_errors():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts the processes again: addresses of the dead ones are still in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(dist.destroy_process_group)


def _policy(strategy: str, shard_size: int, timeout: timedelta) -> Parallel:
    if strategy == "fsdp":
        from stillroom.parallel.fsdp import Sharded  # it takes half a second to import

        return Sharded(dist.get_rank(), dist.get_world_size(), shard_size, timeout)
    return Replicated(dist.get_rank(), dist.get_world_size(), timeout=timeout)
