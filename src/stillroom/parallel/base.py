"""How a run uses its processes. With one process every method is a no-op.

Every process trains on its share of each window. Counts are summed before any forward, so every loss is divided by the
counts of all processes, and gradients are summed, not averaged. The guard's evidence is the same everywhere, so every
process reaches the same verdict. Only the first process writes.
"""

from __future__ import annotations

import atexit
import copy
import errno
import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from stillroom.core.errors import BrokenAtStart, Diverged, PeerGone

if TYPE_CHECKING:
    from stillroom.core.types import Batch
    from stillroom.data import Loader
    from stillroom.precision import AdamW


T = TypeVar("T")


class Parallel:
    """One process."""

    strategy = "single"
    rank = 0
    size = 1
    is_sharded = False  # whether a process holds a part of each weight
    group: Any = None  # of torch.distributed; None: the one of all processes
    takes_smaller_parts = True  # whether a window can be taken again where memory ran out

    @property
    def num_copies(self) -> int:
        """How often all processes together hold the student and its optimizer state."""
        return self.size

    @property
    def is_first(self) -> bool:
        """Whether this process writes: events, checkpoints, the student, the console, the report."""
        return self.rank == 0

    def beside(self) -> Parallel:
        """The same processes for another thread, whose messages do not mix with those of this one. Called by all."""
        return self

    # -- what a step asks ----------------------------------------------------------------------------------

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Called when the student is on its device, before there is an optimizer. `blocks` are its layers."""

    def gather_in(self, dtype: torch.dtype) -> None:
        """Called before `place`: parts of weights stay as they are, and are cast to this when they are gathered."""

    def prepare(self, optimizer: AdamW) -> None:
        """Called when the run is built, and again after a window that was given up because memory ran out."""

    def seed(self, seed: int, attempted: int) -> None:
        """Called before the first forward of an attempt."""

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """The micro-batches this process learns from: those with a target."""
        return [batch for batch in window if batch.num_scored]

    def counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Sum counts over the processes."""
        return dict(counts)

    def window(self) -> AbstractContextManager[None]:
        """Around the micro-batches of a window."""
        return nullcontext()

    def forward(self, compute: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        """The loss of a micro-batch. `compute` is its whole forward; `is_last` in the window."""
        return compute()

    def trial(self, compute: Callable[[], Tensor]) -> Tensor:
        """The same outside of a window: its gradients are dropped."""
        return compute()

    def trial_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """The counts that divide the loss of a trial: those of the processes whose gradients are added up in it."""
        return dict(counts)

    def gradients_of(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The gradient of a trial's loss, what this process holds of it. Nothing is left in the parameters."""
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))

    def sum_parts(self, tensor: Tensor) -> None:
        """Sum what each process computed of its part of the weights, in place."""

    def sum_gradients(self, optimizer: AdamW) -> None:
        """Called after the last backward of a window: from here on gradients are those of all processes."""

    def mean_of_norms(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this process adds to the squared gradient norms that are summed over the processes."""
        return squares

    def gathered(self) -> AbstractContextManager[None]:
        """Around uses of the student outside of a window."""
        return nullcontext()

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over the processes, in place."""

    def names(self, names: Iterable[str]) -> list[str]:
        """All names that a process has, in the same order in every process."""
        return list(names)

    def whole_window(self, loader: Loader, cursor: int, window: Sequence[Batch]) -> Sequence[Batch]:
        """The window of all processes; `window` is the share of this one."""
        return window

    # -- state -------------------------------------------------------------------------------------------

    def as_global(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process holds, as torch knows it to be a part of the whole."""
        return dict(tensors)

    @torch.no_grad()
    def load(self, group: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy a saved group of tensors into those that are present; both have the same names."""
        if set(present) != set(saved):
            odd = sorted(set(present) ^ set(saved))[:3]
            raise ValueError(f"the saved {group} has other tensors: {', '.join(odd)}")
        if hasattr(saved, "into"):  # it is read from the files of several processes
            saved.into(present)
            return
        for name, tensor in present.items():
            found = saved[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:  # a copy would broadcast or cast it
                raise ValueError(f"the saved {group} has {name} as {_kind(found)}, the run as {_kind(tensor)}")
            tensor.copy_(found)

    # -- what all processes agree on --------------------------------------------------------------------

    def worst(self, value: float) -> float:
        """The largest value of any process; NaN counts as infinite."""
        return value

    def broadcast(self, value: float) -> float:
        """The first process's value."""
        return value

    def same_everywhere(self, fingerprint: int) -> bool:
        """Whether every process has this number."""
        return True

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise if the processes' tensors differ in any bit."""

    def collect(self, value: Any) -> list[Any]:
        """A JSON value of every process, in their order."""
        return [value]

    def together(self, action: Callable[[], T]) -> T:
        """Do something with files in every process. An OSError in one of them is raised in all."""
        return action()

    def asking_peers(self) -> AbstractContextManager[None]:
        """Around messages that a library sends: there too a lost process ends the others with exit code 75."""
        return nullcontext()

    def wait(self) -> None:
        """Wait for all processes."""

    def all_of(self, claim: bool) -> bool:
        return self.worst(0.0 if claim else 1.0) == 0.0

    def any_of(self, claim: bool) -> bool:
        return self.worst(1.0 if claim else 0.0) == 1.0


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> int:
    """Sum the bits of every tensor, weighted by its place among the tensors."""
    total = 0
    for place, tensor in enumerate(tensors.values(), start=1):
        bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
        total = (total + place * int(bits.sum(dtype=torch.int64))) % (1 << 62)
    return total


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


# -- used ------------------------------------------------------------------------------------------
# Which trained parameters the micro-batches of a window used in this process.
#
# In one process an expert that no token chose has no gradient and is not updated. Several processes have to send
# zeros for it, because all of them send the same tensors, and AdamW would move it by its momentum and its decay.


class Uses:
    """Names of parameters that got a gradient since `begin`.

    A micro-batch without a target, which a process takes to keep step with the others, uses nothing.
    """

    def __init__(self) -> None:
        self._watched = WeakIdKeyDictionary()  # by parameter: another run in this process has others of the same names
        self._names: set[str] = set()
        self._num_left = 0  # micro-batches with a target that are still to come
        self._is_counted = False

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        if parameter not in self._watched:
            self._watched[parameter] = name
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]

    def _note(self, name: str, _parameter: Any) -> None:
        if self._is_counted:
            self._names.add(name)

    def begin(self, num_batches: int) -> None:
        """A window of so many micro-batches with a target begins."""
        self._names.clear()
        self._num_left = num_batches

    def next_batch(self) -> None:
        self._is_counted = self._num_left > 0
        self._num_left -= 1

    def flags(self, names: Iterable[str]) -> Tensor:
        return torch.tensor([name in self._names for name in names], dtype=torch.int32)


# -- processes -------------------------------------------------------------------------------------
# What several processes tell each other by torch.distributed, whatever each holds of the student.


class Processes(Parallel):
    """Processes that communicate by torch.distributed. If one ends, the others raise instead of waiting forever."""

    asks_together = False  # whether the teacher is in parts, so that every process must ask it as often

    def __init__(self, rank: int, size: int, shard_size: int = 0, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.size = size
        self.shard_size = shard_size or size  # processes that hold the parts of one copy of what is sharded
        self.timeout = timeout  # of one process that waits for another; None: what torch has
        self._uses = Uses()
        # Send small numbers through main memory where gloo is available.
        self._device = torch.device("cpu" if "gloo" in dist.get_backend_config() else "cuda")

    def beside(self) -> Processes:
        """Use a separate gloo group, so that this thread does not wait for what another sends by NCCL or gloo."""
        other = copy.copy(self)
        with peer_errors():
            other.group = dist.new_group(backend="gloo", timeout=self.timeout)
        other._device = torch.device("cpu")
        return other

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
            dist.all_reduce(tensor, dist.ReduceOp.SUM, group=self.group)

    def names(self, names: Iterable[str]) -> list[str]:
        return sorted({name for one in self.collect(list(names)) for name in one})

    def collect(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        width = int(self.worst(len(own)))
        padded = torch.nn.functional.pad(own, (0, width - len(own)), value=ord(" "))
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        with peer_errors():
            dist.all_gather(gathered, padded, group=self.group)
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
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return float(largest.tolist()[0])

    def broadcast(self, value: float) -> float:
        sent = torch.tensor([value], dtype=torch.float64, device=self._device)
        with peer_errors():
            dist.broadcast(sent, src=0, group=self.group)
        return float(sent.tolist()[0])

    def same_everywhere(self, fingerprint: int) -> bool:
        return same_in(self.group, fingerprint, self._device)

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.same_everywhere(fingerprint(tensors)):
            raise replicas_differ(f"the students of the {self.size} processes")

    def asking_peers(self) -> AbstractContextManager[None]:
        return peer_errors()

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
    """Turn torch's error for a missing or silent process into `PeerGone`: the run can be resumed."""
    try:
        yield
    except RuntimeError as error:
        raise peer_is_gone(error) from error


def is_of_peer(error: BaseException) -> bool:
    """Whether torch raised it because a process is missing or silent: gloo says so in words, NCCL by a class."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def peer_is_gone(error: BaseException) -> PeerGone:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerGone(
        f"another process of this run is gone or does not answer: {reason}",
        where=f"process {os.environ.get('RANK', '?')}",
        advice=["look at the first process that ended", "then start all of them again: the run is resumed"],
    )


# -- torch version ---------------------------------------------------------------------------------
# What several processes need of torch, by name: older versions train in one process alone.


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


def join(timeout_minutes: float, strategy: str = "auto", shard_size: int = 0) -> Parallel:
    """Return the policy of `train.strategy` for the processes of this run; `Parallel()` for a single process.

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
    from stillroom.parallel.ddp import Replicated  # both are made of this module
    from stillroom.parallel.fsdp import Sharded, check_shard_size

    check_torch(is_sharded=strategy == "fsdp")
    check_shard_size(shard_size, size, strategy)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _begin(timeout)
    if strategy == "fsdp":
        return Sharded(dist.get_rank(), dist.get_world_size(), shard_size, timeout)
    return Replicated(dist.get_rank(), dist.get_world_size(), timeout=timeout)


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
