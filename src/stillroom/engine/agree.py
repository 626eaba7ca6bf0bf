"""Several processes, one run.

Every process trains the same student on its share of each window. What they must agree on goes through here: counts
are summed before any forward (so the one division is by the counts of all), gradients are summed and never averaged
(the counts have divided already), and what the guard judges is the same for all, so every process reaches the same
verdict. Alone, a process agrees with itself for nothing.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stillroom.errors import BrokenAtStart, Interrupted

_BUCKET_ELEMENTS = 1 << 22


class Agreement:
    """One process: whatever it says is agreed."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes: events, checkpoints, the student, the console."""
        return self.rank == 0

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Counts of all processes together."""
        return dict(counts)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum each tensor over the processes, in place."""

    def any_of(self, claims: Tensor) -> Tensor:
        """For each place, whether any process claims it."""
        return claims

    def worst(self, value: float) -> float:
        """The largest value of any process; NaN is worse than all."""
        return value

    def first(self, value: float) -> float:
        """What the first process says."""
        return value

    def is_alike(self, fingerprint: int) -> bool:
        """Whether every process has this very number."""
        return True

    def wait(self) -> None:
        """Until all processes are here."""

    def every(self, claim: bool) -> bool:
        return self.worst(0.0 if claim else 1.0) == 0.0

    def anyone(self, claim: bool) -> bool:
        return self.worst(1.0 if claim else 0.0) == 1.0


class Several(Agreement):
    """Processes that talk through torch.distributed. One that is gone ends the others instead of hanging them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Small numbers travel through main memory where a backend for it is there.
        self._device = torch.device("cpu" if "gloo" in dist.get_backend_config() else "cuda")

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        values = self._sum(torch.tensor(list(counts.values()), dtype=torch.int64, device=self._device))
        return dict(zip(counts, map(int, values.tolist()), strict=True))

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        for bucket in _buckets(tensors):
            whole = self._sum(torch.cat([tensor.reshape(-1) for tensor in bucket]))
            for tensor, part in zip(bucket, whole.split([tensor.numel() for tensor in bucket]), strict=True):  # type: ignore[no-untyped-call]
                tensor.copy_(part.view_as(tensor))

    def any_of(self, claims: Tensor) -> Tensor:
        return self._sum(claims.to(self._device, torch.int32)) > 0

    def worst(self, value: float) -> float:
        ordered = math.inf if math.isnan(value) else value
        found = torch.tensor([ordered], dtype=torch.float64, device=self._device)
        with _together():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found.tolist()[0])

    def first(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64, device=self._device)
        with _together():
            dist.broadcast(found, src=0)
        return float(found.tolist()[0])

    def is_alike(self, fingerprint: int) -> bool:
        found = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64, device=self._device)
        with _together():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        highest, lowest = found.tolist()
        return bool(highest == -lowest)

    def wait(self) -> None:
        self.worst(0.0)

    def _sum(self, tensor: Tensor) -> Tensor:
        with _together():
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor


def join(timeout_minutes: float) -> Agreement:
    """The processes of this run, as torchrun or accelerate started them; alone where none did.

    A process waits for another at most `timeout_minutes`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Agreement()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise BrokenAtStart(
            f"WORLD_SIZE is {size} and {', '.join(missing)} not set: the processes cannot find each other",
            where="environment",
            advice=["start the run with torchrun --nproc-per-node N -m stillroom distill ...", "or unset WORLD_SIZE"],
        )
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with _together():
            dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        atexit.register(dist.destroy_process_group)
    return Several(dist.get_rank(), dist.get_world_size())


@contextmanager
def _together() -> Iterator[None]:
    """What torch raises when another process is gone or does not answer, as an end that can be resumed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Interrupted(
            f"another process of this run is gone or does not answer: {reason}",
            where=f"process {os.environ.get('RANK', '?')}",
            advice=["look at the first process that ended", "then start all of them again: the run is resumed"],
        ) from error


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, enough of them to be worth a message and few enough to be copied."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        is_full = sum(held.numel() for held in bucket) + tensor.numel() > _BUCKET_ELEMENTS
        if bucket and (is_full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
