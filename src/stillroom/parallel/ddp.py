"""Several processes with a replica of the student each: torch's DistributedDataParallel sums their gradients.

DDP wraps a module whose forward is whatever the step computes for one micro-batch, the loss included: the fused head
multiplies with the student's head outside of the student's own forward, and only what runs inside of the wrapped
forward is followed. Buckets of gradients are summed while the backward of the last micro-batch still runs; the other
micro-batches send nothing. Gradients are summed and not averaged, because counts of all processes divided them before.

A bucket of FP16 gradients is sent in FP32, together with the FP32 sums of the earlier micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stillroom.core.shortages import is_out_of_memory
from stillroom.parallel.base import Processes, peer_errors, peer_is_gone

if TYPE_CHECKING:
    from stillroom.precision import AdamW


class MicroBatch(nn.Module):
    """The trained parameters, and a forward that is given by the caller."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        # Where all parameters are used, torch advises against looking for unused ones. This one never is.
        self.unused = nn.Parameter(torch.zeros(1, device=parameters[0].device))

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class Replicated(Processes):
    """Replicas of the student whose gradients DDP sums."""

    strategy = "ddp"

    def prepare(self, optimizer: AdamW) -> None:
        """Hand the optimizer's parameters to DDP. Called again where a window was given up: that leaves DDP unusable.

        With `find_unused_parameters` buckets keep the order of the parameters, so nothing is sent in a forward.
        """
        optimizer.accumulate_in_fp32()
        self._optimizer = optimizer
        cells = [cell for cells in optimizer.cells.values() for cell in cells]
        parameters = [cell.parameter for cell in cells]
        for cell in cells:
            self._uses.watch(cell.name, cell.parameter)
        self._ddp = DistributedDataParallel(
            MicroBatch(parameters),
            init_sync=False,  # the replicas are compared at every evaluation, the first before the first step
            forward_sync_buffers=False,
            find_unused_parameters=True,  # experts that no token chose, projectors of a term that is not computed
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, lambda _state, bucket: self._send(bucket))  # torch reads annotations
        self._begin()

    def _begin(self) -> None:
        self._num_sent = 0  # buckets of the present window
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._loss_of_peer: RuntimeError | None = None

    # -- what a step asks --------------------------------------------------------------------------------

    @contextmanager
    def window(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if self._loss_of_peer is not None:
                raise peer_is_gone(self._loss_of_peer) from error
            if is_out_of_memory(error) and self.takes_smaller_parts:
                self._send_nothing()
            raise

    def forward(self, compute: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        self._optimizer.leave_gradients(is_last)
        self._uses.next_batch()
        with nullcontext() if is_last else self._ddp.no_sync():
            loss: Tensor = self._ddp(compute)
        return loss

    def sum_gradients(self, optimizer: AdamW) -> None:
        """Give the optimizer the sums. A parameter that no process used gets none, as in one process."""
        optimizer.take_sums(self._sums, self.used_anywhere(optimizer))
        self._sums = {}

    def mean_of_norms(self, squares: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every process has the same gradients: the sum over processes of these shares is one process's norm.

        A gradient that is damaged in one process alone damages the norm of all, and all refuse the step.
        """
        return {name: square / self.size for name, square in squares.items()}

    # -- what DDP asks -----------------------------------------------------------------------------------

    def _send(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket; DDP calls it as soon as all gradients of the bucket are there."""
        buffer: Tensor = bucket.buffer()
        summed = buffer if buffer.dtype != torch.float16 else self._in_fp32(bucket)
        parameters = bucket.parameters()
        parts = torch.split(summed, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            self._sums[parameter] = part.view(parameter.shape)
        self._num_sent += 1

        def check(future: torch.futures.Future[Any]) -> Tensor:
            try:
                future.value()
            except RuntimeError as error:
                self._loss_of_peer = error
                raise
            return buffer

        try:
            work = dist.all_reduce(summed, dist.ReduceOp.SUM, async_op=True)
        except RuntimeError as error:
            self._loss_of_peer = error
            raise
        future: torch.futures.Future[Tensor] = work.get_future().then(check)
        return future

    def _in_fp32(self, bucket: Any) -> Tensor:
        """The gradients of a bucket of FP16 parameters, with those of the earlier micro-batches."""
        flat: Tensor = bucket.buffer().float()
        parts = torch.split(flat, [parameter.numel() for parameter in bucket.parameters()])
        for parameter, part in zip(bucket.parameters(), parts, strict=True):
            earlier = self._optimizer.accumulated(parameter)
            if earlier is not None:
                part.add_(earlier.view(-1))
        return flat

    def _send_nothing(self) -> None:
        """Take part in the sums of the other processes with zeros: memory ran out here and not there.

        All of them then learn of the shortage and take the window again.
        """
        buckets = self._ddp.reducer._get_zeros_like_grad_buckets()
        if self._num_sent == len(buckets):
            return
        with peer_errors():
            for bucket in buckets[self._num_sent :]:
                buffer = bucket.buffer()
                dist.all_reduce(buffer.float() if buffer.dtype == torch.float16 else buffer, dist.ReduceOp.SUM)
            self._ddp._match_unused_params_allreduce()  # type: ignore[no-untyped-call]
