"""The chunked pass as one autograd node.

Gradients are computed in the forward, while the chunk's logits are in memory. The backward multiplies them by the
upstream scalar in FP32 and casts them to the input's dtype after that, so that a loss scale keeps FP16 gradients from
being flushed to zero.

Legend: N scored positions, V real vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.numerics import masked_sum, work_dtype
from stillroom.objectives.head.products import GivenLogits, Products, Wanted, products_of
from stillroom.objectives.head.row_kernel import RowKernel, RowPlan, RowRecord, TeacherRows
from stillroom.objectives.head.sparse import select_rows
from stillroom.objectives.second_derivative import only_once
from stillroom.types import DenseSignal, HeadWeights, SampledSignal, Signal, TopKSignal


@dataclass(frozen=True)
class HeadTask:
    """The inputs of a pass that autograd does not differentiate."""

    head: HeadWeights
    signal: Signal | None
    targets: Tensor  # [N]
    kd_weights: Tensor  # [N]
    ce_weights: Tensor  # [N]
    temperatures: Tensor  # [N]
    plan: RowPlan
    kernel: RowKernel
    chunk_tokens: int
    clamped: Tensor | None = None  # [N], filled by the pass where the head has a clamp
    corrected: Tensor | None = None  # [N], filled by the pass where the plan has a label margin


def run_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor | None, task: HeadTask
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The differentiable loss, and for each row its kd, its cross-entropy and whether its teacher was unusable."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _HeadPass.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, teacher_hidden, task
    )
    return result


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor | None, task: HeadTask
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head = replace(task.head, weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False):
            chunked = _ChunkedPass(hidden, head, teacher_hidden, task, ctx.needs_input_grad)
            chunked.run()
        ctx.save_for_backward(*chunked.gradients())
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias, teacher_hidden))
        rows = chunked.rows
        ctx.mark_non_differentiable(rows.kd, rows.ce, rows.is_bad)
        return chunked.loss(), rows.kd, rows.ce, rows.is_bad

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = [
                None if gradient is None else _multiplied(gradient, upstream[0]).to(dtype)
                for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        return (*only_once(results), None)


def _multiplied(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient * upstream, in place unless the graph is kept: a second weight gradient would double the memory."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps_graph is None or keeps_graph():
        return gradient * upstream
    # Reading a CPU scalar is free. On a GPU the read would wait for the device, and the product is cheap.
    if upstream.device.type == "cpu" and upstream.detach().numpy() == 1.0:
        return gradient
    return gradient.mul_(upstream)


class _ChunkedPass:
    """One pass over the chunks. Owns the scratch and the gradients."""

    def __init__(
        self,
        hidden: Tensor,
        head: HeadWeights,
        teacher_hidden: Tensor | None,
        task: HeadTask,
        needs_grad: tuple[bool, ...],
    ) -> None:
        self.task, plan = task, task.plan
        dtype = work_dtype(hidden, head.weight)
        self.rows = RowRecord(
            targets=task.targets,
            temperatures=task.temperatures,
            kd_weights=task.kd_weights,
            ce_weights=task.ce_weights,
            kd=torch.zeros_like(task.kd_weights),
            ce=torch.zeros_like(task.ce_weights),
            is_bad=torch.zeros_like(task.kd_weights, dtype=torch.bool),
            clamped=task.clamped,
            corrected=task.corrected,
        )
        wanted = Wanted(*needs_grad[:3]) if plan.wants_student else Wanted()
        self.student = products_of(hidden, head, dtype, task.chunk_tokens, wanted)
        self.teacher: Products | GivenLogits | None = None
        if isinstance(task.signal, DenseSignal) and teacher_hidden is not None:
            wanted = Wanted(hidden=plan.wants_teacher)
            self.teacher = products_of(teacher_hidden, task.signal.head, dtype, task.chunk_tokens, wanted)

    def run(self) -> None:
        plan = self.task.plan
        if plan.divergence is None and not plan.has_ce:
            return
        for part in self._parts():
            student = self.student.logits(part)
            self.task.kernel.run(student, self._teacher_rows(part), self.rows.rows(part), plan)
            if plan.wants_student:
                self.student.pull_back(part)
            if plan.wants_teacher and self.teacher is not None:
                self.teacher.pull_back(part)

    def loss(self) -> Tensor:
        """Weighted sum of the rows. A bad row's kd weight multiplies its cross-entropy."""
        rows = self.rows
        ce_weights = rows.ce_weights + torch.where(rows.is_bad, rows.kd_weights, torch.zeros_like(rows.kd_weights))
        # A row of weight 0 may have an infinite value, and 0 * inf is NaN.
        kd = masked_sum(rows.kd * rows.kd_weights, rows.kd_weights != 0)
        return kd + masked_sum(rows.ce * ce_weights, ce_weights != 0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        teacher = None if self.teacher is None else self.teacher.gradients()[0]
        return *self.student.gradients(), teacher

    def _parts(self) -> Iterator[slice]:
        num_rows = int(self.rows.targets.shape[0])
        for start in range(0, num_rows, self.task.chunk_tokens):
            yield slice(start, min(start + self.task.chunk_tokens, num_rows))

    def _teacher_rows(self, part: slice) -> TeacherRows | None:
        if self.teacher is not None:
            return self.teacher.logits(part)
        signal = self.task.signal
        return select_rows(signal, part) if isinstance(signal, TopKSignal | SampledSignal) else None
