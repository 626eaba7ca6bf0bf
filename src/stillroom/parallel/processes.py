"""What several processes tell each other by torch.distributed, whatever each holds of the student."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stillroom.errors import Diverged, Interrupted
from stillroom.parallel.base import Parallel, fingerprint
from stillroom.parallel.used import Uses

if TYPE_CHECKING:
    from stillroom.data import Loader
    from stillroom.precision import AdamW
    from stillroom.types import Batch

T = TypeVar("T")


class Processes(Parallel):
    """Processes that communicate by torch.distributed. If one ends, the others raise instead of waiting forever."""

    asks_together = False  # whether the teacher is in parts, so that every process must ask it as often

    def __init__(self, rank: int, size: int, shard_size: int = 0, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.size = size
        self.shard_size = shard_size or size  # processes that hold the parts of one copy of what is sharded
        self.timeout = timeout  # of groups of some of the processes
        self._uses = Uses()
        # Send small numbers through main memory where gloo is available.
        self._device = torch.device("cpu" if "gloo" in dist.get_backend_config() else "cuda")

    def seed(self, seed: int, attempted: int) -> None:
        """Random numbers that differ between processes and repeat after a resume."""
        torch.manual_seed(((seed * 1_000_003 + attempted) * 1_009 + self.rank) & (2**63 - 1))

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """A process without a target scores one batch all the same: every process must sum the same names."""
        if self.asks_together:
            return self.equally_many(window)
        own = super().scored(window)
        self._uses.begin(len(own))
        return own or list(window[:1])

    def equally_many(self, window: Sequence[Batch]) -> list[Batch]:
        """As many micro-batches as any process has: what is in parts is gathered by all processes or by none."""
        own = [batch for batch in window if batch.num_scored]
        self._uses.begin(len(own))
        num_batches = max(1, int(self.worst(len(own))))
        return own + [window[0].without_targets()] * (num_batches - len(own))

    def ask_together(self) -> None:
        """From now on the teacher is in parts: every process asks it as often, and no window is taken again."""
        self.asks_together, self.takes_smaller_parts = True, False

    def whole_window(self, loader: Loader, cursor: int, window: Sequence[Batch]) -> Sequence[Batch]:
        return loader.whole_window(cursor)

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        values = torch.tensor(list(counts.values()), dtype=torch.int64, device=self._device)
        self.sum_(values)
        return dict(zip(counts, map(int, values.tolist()), strict=True))

    def used_anywhere(self, optimizer: AdamW) -> Tensor:
        """For each parameter, whether a micro-batch with a target used it in any process."""
        is_used = self._uses.flags(cell.name for cells in optimizer.cells.values() for cell in cells).to(self._device)
        self.sum_(is_used)
        return is_used > 0

    def sum_(self, tensor: Tensor) -> None:
        with peer_errors():
            dist.all_reduce(tensor, dist.ReduceOp.SUM)

    def names(self, names: Iterable[str]) -> list[str]:
        return sorted({name for one in self.collect(list(names)) for name in one})

    def collect(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        width = int(self.worst(len(own)))
        padded = torch.nn.functional.pad(own, (0, width - len(own)), value=ord(" "))
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with peer_errors():
            dist.all_gather(gathered, padded)
        return [json.loads(bytes(one.tolist())) for one in gathered]

    def together(self, action: Callable[[], T]) -> T:
        error, result = None, None
        try:
            result = action()
        except OSError as caught:
            error = caught
        if self.any_of(error is not None):
            raise error or OSError(errno.EIO, "another process could not write its part")
        return result  # type: ignore[return-value]

    def worst(self, value: float) -> float:
        ordered = math.inf if math.isnan(value) else value
        largest = torch.tensor([ordered], dtype=torch.float64, device=self._device)
        with peer_errors():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest.tolist()[0])

    def broadcast(self, value: float) -> float:
        sent = torch.tensor([value], dtype=torch.float64, device=self._device)
        with peer_errors():
            dist.broadcast(sent, src=0)
        return float(sent.tolist()[0])

    def same_everywhere(self, fingerprint: int) -> bool:
        return same_in(None, fingerprint, self._device)

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.same_everywhere(fingerprint(tensors)):
            raise replicas_differ(f"the students of the {self.size} processes")

    def wait(self) -> None:
        self.worst(0.0)


def same_in(group: dist.ProcessGroup | None, fingerprint: int, device: torch.device) -> bool:
    """Whether every process of a group has this number; None: the group of all."""
    extremes = torch.tensor([fingerprint, -fingerprint], dtype=torch.int64, device=device)
    with peer_errors():
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def replicas_differ(what: str) -> Diverged:
    return Diverged(
        f"{what} are not the same",
        where="comparison of the weights of all processes",
        advice=["use the same device and the same libraries for every process", "resume from the last checkpoint"],
    )


@contextmanager
def peer_errors() -> Iterator[None]:
    """Turn torch's error for a missing or silent process into `Interrupted`: the run can be resumed."""
    try:
        yield
    except RuntimeError as error:
        raise peer_is_gone(error) from error


def is_of_peer(error: BaseException) -> bool:
    """Whether torch raised it because a process is missing or silent: gloo says so in words, NCCL by a class."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def peer_is_gone(error: BaseException) -> Interrupted:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return Interrupted(
        f"another process of this run is gone or does not answer: {reason}",
        where=f"process {os.environ.get('RANK', '?')}",
        advice=["look at the first process that ended", "then start all of them again: the run is resumed"],
    )
