"""Several processes with a part of the student each: torch's FSDP2 gathers a layer for its forward and backward.

`fully_shard` is applied to each layer and to a root that holds the rest: embeddings, the last norm and the head. The
root's forward is whatever the step computes for one micro-batch, the loss included, so the fused head sees its whole
weight. The root is gathered once a step and its gradient is reduced once; layers are gathered for each micro-batch,
and their gradients reduced after it, so that no process ever holds all of them. Gradients are summed and not averaged,
because counts of all processes divided them before. The optimizer works on the parts that this process holds.

With `shard_size` below the number of processes, groups of so many hold a copy of the student each. Gradients are
reduced inside a group after each micro-batch, and summed between the groups once a step.

What is trained with the student, the projectors of objectives, is whole in every process and its gradients are
summed once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.parallel.base import (
    Processes,
    fingerprint,
    is_of_peer,
    peer_errors,
    peer_is_gone,
    replicas_differ,
    same_in,
)
from stillroom.precision.storage import local

if TYPE_CHECKING:
    from stillroom.core.types import Batch
    from stillroom.precision import AdamW


# -- mesh ------------------------------------------------------------------------------------------
# Which processes hold parts of one copy of a model: groups that share a copy, and copies between the groups.
#
# Processes 0 to S - 1 share the first copy, the next S the second. Torch numbers the processes of a machine one after
# another, so with S processes on each machine layers are gathered inside of it, and only gradients go between
# machines.


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


class Root(nn.Module):
    """The student, with a forward that is given by the caller."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        return compute()


class Gather(DefaultAllGather):
    def __call__(self, *arguments: Any, **named: Any) -> dist.Work | None:
        with peer_errors():
            return super().__call__(*arguments, **named)


class _Reduce(DefaultReduceScatter):
    """On a CPU gloo reduces everything everywhere and drops the rest: each process sends its parts to their owners
    instead, which is half of the bytes, and sums those it is sent."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        with peer_errors():
            if input_tensor.device.type != "cpu" or op != dist.ReduceOp.SUM:
                return super().__call__(output_tensor, input_tensor, group, op, async_op)
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
            torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor.view(-1))
        return None


class Sharded(Processes):
    """Parts of the student, gathered when they are used."""

    strategy = "fsdp"
    is_sharded = True
    takes_smaller_parts = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options: dict[str, Any] = {}  # of fully_shard

    @property
    def num_copies(self) -> int:
        return self.size // self.shard_size

    def gather_in(self, dtype: torch.dtype) -> None:
        """Gradients are in this dtype too, and are added up in FP32."""
        self._options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)

    def place(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Shard the weights, and raise where any of them is still whole."""
        mesh = make_mesh(next(model.parameters()).device.type, self.size, self.shard_size, self.timeout)
        root: Any = Root(model)
        for block in blocks:
            fully_shard(block, mesh=mesh, **self._options)
        fully_shard(root, mesh=mesh, reshard_after_forward=False, **self._options)
        for module in [root, *blocks]:
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(Gather())
                module.set_custom_reduce_scatter(_Reduce())
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        whole = [name for name, parameter in self._parameters.items() if not is_sharded(parameter)]
        if whole:
            raise BrokenAtStart(
                f"fsdp was asked for and {len(whole)} parameters are not sharded, {whole[0]} among them",
                where="train.strategy",
                advice=["--set train.strategy=ddp"],
            )
        with torch.no_grad():
            root(lambda: None)  # FSDP2 takes the first module that runs as its root
        root.reshard()
        self._root = root
        self._blocks: list[Any] = [block for block in blocks if isinstance(block, FSDPModule)]
        self._mesh = mesh
        self._is_gathered = False
        self._is_kept_gathered = False  # between the micro-batches of a window

    def prepare(self, optimizer: AdamW) -> None:
        """Find what is trained and not sharded, and watch which parameters a window uses."""
        cells = [(group, cell) for group, cells in optimizer.cells.items() for cell in cells]
        whole = [(group, cell) for group, cell in cells if not is_sharded(cell.parameter)]
        self._whole_groups = {group for group, _cell in whole}
        self._whole = [cell.parameter for _group, cell in whole]
        for _group, cell in whole:
            self._uses.watch(cell.name, cell.parameter)
        self._watch_gathered()
        _send_zeros_for_unused(self._root)

    def _watch_gathered(self) -> None:
        """Watch the gathered parameters, which stay the same objects. Each part is gathered for a moment."""
        for module in self._root.modules():
            if not isinstance(module, FSDPModule):
                continue
            module.unshard()
            for name, parameter in self._root.student.named_parameters():
                if parameter.requires_grad and not is_sharded(parameter):
                    self._uses.watch(name, parameter)
            module.reshard()

    # -- what a step asks --------------------------------------------------------------------------------

    def scored(self, window: Sequence[Batch]) -> list[Batch]:
        """As many micro-batches as any process has: a layer is gathered by all processes or by none."""
        return self.equally_many(window)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Torch itself sums gradients between copies: its error for a missing process is recognised here."""
        try:
            yield
        except RuntimeError as error:
            if is_of_peer(error):
                raise peer_is_gone(error) from error
            raise

    def forward(self, compute: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        if self.num_copies > 1:
            for block in self._blocks:
                block.set_requires_all_reduce(is_last, recurse=False)
        self._root.set_requires_gradient_sync(is_last, recurse=False)
        self._root.set_reshard_after_backward(is_last, recurse=False)
        self._uses.next_batch()
        self._is_kept_gathered = not is_last
        loss: Tensor = self._root(compute)
        return loss

    def trial(self, compute: Callable[[], Tensor]) -> Tensor:
        return self.forward(compute, is_last=True)

    def trial_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        return self.counts(counts)

    def gradients_of(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """Summed over the processes, each of which has its own micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        found = [None if one.grad is None else local(one.grad) for one in parameters]
        for one in (*parameters, *self._whole):
            one.grad = None
        return found

    def sum_parts(self, tensor: Tensor) -> None:
        self.sum_(tensor)
        tensor.div_(self.num_copies)

    def sum_gradients(self, optimizer: AdamW) -> None:
        """Each process has the sums of its parts. Sum what is whole; drop the zeros of what no process used."""
        cells = [cell for cells in optimizer.cells.values() for cell in cells]
        is_used = self.used_anywhere(optimizer)
        used = [cell.parameter for cell, has_use in zip(cells, is_used.tolist(), strict=True) if has_use]
        sums = {one: one.grad for one in used if is_sharded(one) and one.grad is not None}
        optimizer.take_sums(sums | self._summed([one for one in used if not is_sharded(one)]), is_used)

    def _summed(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The gradients of parameters that every process holds whole, summed in one tensor."""
        if not parameters:
            return {}
        own = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        self.sum_(flat)
        parts = torch.split(flat, [one.numel() for one in parameters])
        return {one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)}

    def mean_of_norms(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """A part is held once in each copy of the student, what is whole once in each process: each adds its share."""
        shares = {name: self.size if name in self._whole_groups else self.num_copies for name in squares}
        return {name: square / shares[name] for name, square in squares.items()}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        if self._is_gathered or self._is_kept_gathered:
            yield
            return
        self._root.unshard()
        self._is_gathered = True
        try:
            yield
        finally:
            self._is_gathered = False
            self._root.reshard()

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        """Compare what every process holds whole, and the parts of processes that hold the same one, if there are."""
        super().check_replicas({name: tensor for name, tensor in tensors.items() if name not in self._parameters})
        if self.num_copies == 1:
            return
        parts = {name: tensor for name, tensor in tensors.items() if name in self._parameters}
        if not self.all_of(same_in(self._mesh.get_group(COPIES), fingerprint(parts), self._device)):
            raise replicas_differ(f"the {self.num_copies} copies of the student")

    # -- state -------------------------------------------------------------------------------------------

    def as_global(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts of this process as DTensors of the whole; what every process holds alike stays as it is."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            like = self._parameters.get(name.rpartition(".")[0] if group == "optimizer" else name)
            if like is None:
                found[name] = tensor
            else:
                found[name] = DTensor.from_local(
                    tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
                )
        return found

    @torch.no_grad()
    def load(self, group: str, present: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        places = self.as_global(group, present)
        if hasattr(saved, "into"):
            super().load(group, places, saved)
            return
        super().load(group, present, {name: _own_part(tensor, places.get(name)) for name, tensor in saved.items()})


def _send_zeros_for_unused(root: Any) -> None:
    """Processes that used other experts of a layer must still send the same tensors."""
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)


def is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def _own_part(whole: Tensor, place: Tensor | None) -> Tensor:
    """Return this process's part of a whole tensor, or the tensor itself where it is a part already."""
    if not isinstance(place, DTensor) or whole.shape != place.shape:
        return whole
    shape, offset = compute_local_shape_and_global_offset(place.shape, place.device_mesh, place.placements)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


# -- frozen ----------------------------------------------------------------------------------------
# A frozen network in parts: each process holds a part of every weight, and all of them ask it at the same time.
#
# A layer is gathered for its forward and freed after it. What is outside of layers (embeddings, last norm, head) is
# gathered by `gather` and freed by `release`. Torch's FSDP2 does both. Every process has to take part in every
# forward, or the others wait for it.


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
