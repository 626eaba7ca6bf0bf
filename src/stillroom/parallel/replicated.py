"""Several processes with a replica of the student each, started by torchrun or accelerate."""

from __future__ import annotations

import atexit
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stillroom.errors import BrokenAtStart, Diverged, Interrupted
from stillroom.parallel.base import Parallel, fingerprint

if TYPE_CHECKING:
    from stillroom.data import Loader
    from stillroom.precision import AdamW
    from stillroom.types import Batch

_BUCKET_ELEMENTS = 1 << 22


class Replicated(Parallel):
    """Processes that communicate by torch.distributed. If one ends, the others raise instead of waiting forever."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        # Send small numbers through main memory where gloo is available.
        self._device = torch.device("cpu" if "gloo" in dist.get_backend_config() else "cuda")

    def prepare(self, optimizer: AdamW) -> None:
        optimizer.accumulate_in_fp32()

    def seed(self, seed: int, attempted: int) -> None:
        """Random numbers that differ between processes and repeat after a resume."""
        torch.manual_seed(((seed * 1_000_003 + attempted) * 1_009 + self.rank) & (2**63 - 1))

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """A process without a target scores one batch all the same: every process must sum the same names."""
        return super().scored(window) or list(window[:1])

    def sum_gradients(self, optimizer: AdamW) -> None:
        has_gradients = optimizer.has_gradients().to(self._device, torch.int32)
        optimizer.complete_gradients(self._sum(has_gradients) > 0)
        self.sum_(gradient for _name, gradient in optimizer.named_gradients())

    def whole_window(self, loader: Loader, cursor: int, window: Sequence[Batch]) -> Sequence[Batch]:
        return loader.whole_window(cursor)

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        values = self._sum(torch.tensor(list(counts.values()), dtype=torch.int64, device=self._device))
        return dict(zip(counts, map(int, values.tolist()), strict=True))

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        for bucket in _buckets(tensors):
            summed = self._sum(torch.cat([tensor.reshape(-1) for tensor in bucket]))
            for tensor, part in zip(bucket, summed.split([tensor.numel() for tensor in bucket]), strict=True):  # type: ignore[no-untyped-call]
                tensor.copy_(part.view_as(tensor))

    def names(self, names: Iterable[str]) -> list[str]:
        own = torch.frombuffer(bytearray(json.dumps(list(names)).encode()), dtype=torch.uint8).to(self._device)
        width = int(self.worst(len(own)))
        padded = torch.nn.functional.pad(own, (0, width - len(own)), value=ord(" "))
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with _peer_errors():
            dist.all_gather(gathered, padded)
        return sorted({name for one in gathered for name in json.loads(bytes(one.tolist()))})

    def worst(self, value: float) -> float:
        ordered = math.inf if math.isnan(value) else value
        largest = torch.tensor([ordered], dtype=torch.float64, device=self._device)
        with _peer_errors():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.tolist()[0])

    def broadcast(self, value: float) -> float:
        sent = torch.tensor([value], dtype=torch.float64, device=self._device)
        with _peer_errors():
            dist.broadcast(sent, src=0)
        return float(sent.tolist()[0])

    def same_everywhere(self, fingerprint: int) -> bool:
        extremes = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64, device=self._device)
        with _peer_errors():
            dist.all_reduce(extremes, dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        return bool(highest == -lowest)

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.same_everywhere(fingerprint(tensors)):
            raise Diverged(
                f"the students of the {self.size} processes are not the same",
                where="comparison of the weights of all processes",
                advice=[
                    "use the same device and the same libraries for every process",
                    "resume from the last checkpoint",
                ],
            )

    def wait(self) -> None:
        self.worst(0.0)

    def _sum(self, tensor: Tensor) -> Tensor:
        with _peer_errors():
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor


def join(timeout_minutes: float) -> Parallel:
    """Join the processes that torchrun or accelerate started; `Parallel()` for a single process.

    A process waits for another at most `timeout_minutes`.
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
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        with _peer_errors():
            dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        atexit.register(dist.destroy_process_group)
    return Replicated(dist.get_rank(), dist.get_world_size())


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Turn torch's error for a missing or silent process into `Interrupted`: the run can be resumed."""
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
    """Group tensors of one dtype into messages of bounded size."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        is_full = sum(held.numel() for held in bucket) + tensor.numel() > _BUCKET_ELEMENTS
        if bucket and (is_full or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
