"""Join the processes that torchrun, accelerate or Slurm started."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from stillroom.errors import BrokenAtStart
from stillroom.parallel.base import Parallel
from stillroom.parallel.link import Link, TeacherRank, check_teacher_ranks, make_links
from stillroom.parallel.mesh import check_shard_size
from stillroom.parallel.processes import peer_errors
from stillroom.parallel.replicated import Replicated
from stillroom.parallel.torch_version import check_torch

_LINKS: list[Link] = []  # of this process, for as long as it lives; runs one after another use the same


def join(timeout_minutes: float, strategy: str = "auto", shard_size: int = 0, teacher_ranks: int = 0) -> Parallel:
    """The policy of `train.strategy` for the processes of this run; `Parallel()` for a single process.

    A process waits for another at most `timeout_minutes`. With `shard_size` groups of so many processes hold a copy.
    The last `teacher_ranks` processes do not train: each gets a `TeacherRank`.
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
    check_teacher_ranks(teacher_ranks, size)
    num_trainers = size - teacher_ranks
    check_shard_size(shard_size, num_trainers, strategy)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized() and not _LINKS:
        _begin(timeout, teacher_ranks)
    if int(os.environ["RANK"]) >= num_trainers:
        return TeacherRank(_LINKS)
    parallel = _policy(strategy, shard_size, timeout) if num_trainers > 1 else Parallel()
    parallel.link = _LINKS[0] if teacher_ranks else None
    return parallel


def _begin(timeout: timedelta, teacher_ranks: int) -> None:
    """Make the group of the trainers, and the links to the processes that hold the teacher."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with peer_errors():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts the processes again: addresses of the dead ones are still in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"start-{attempt}", store)  # type: ignore[attr-defined]
    if teacher_ranks:
        _LINKS.extend(make_links(store, rank, size, teacher_ranks, timeout))
    num_trainers = size - teacher_ranks
    if num_trainers > 1 and rank < num_trainers:
        with peer_errors():
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_trainers, timeout=timeout)
        atexit.register(dist.destroy_process_group)


def _policy(strategy: str, shard_size: int, timeout: timedelta) -> Parallel:
    if strategy == "fsdp":
        from stillroom.parallel.sharded import Sharded  # it takes half a second to import

        return Sharded(dist.get_rank(), dist.get_world_size(), shard_size, timeout)
    return Replicated(dist.get_rank(), dist.get_world_size(), timeout=timeout)
