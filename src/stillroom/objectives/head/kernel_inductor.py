"""The row kernel as torch.compile makes it: the plain kernel's formulas, fused into a few passes over the logits.

On a card the plain kernel reads and writes a chunk 25 to 60 times, and every trip is one to main memory. Inductor joins
these operations into loops over a row. It needs Triton there, which comes with torch for Linux and serves cards from
compute capability 7.0 on.

A compiled function belongs to one kind of pass: a divergence with its settings, a vocabulary, which gradients are
wanted. The number of rows may vary. Compiling takes half a minute on a card, so a process compiles a few kinds and no
more: a setting that moves with every step is left to the plain kernel, and so are kinds that come late.

Legend: C rows, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from stillroom.objectives.head.kernel_plain import PlainKernel, fill_values, leave_gradient
from stillroom.objectives.head.row_kernel import Logits, RowPlan, RowRecord, TeacherRows
from stillroom.types import SampledSignal, TopKSignal

LEAST_CAPABILITY = (7, 0)  # of a card, for Triton
_MOST_KINDS = 6  # dynamo gives a function up after eight
_LEAST_ROWS = 2  # dynamo compiles sizes of 0 and 1 apart

Run = Callable[[Logits, TeacherRows | None, RowRecord, RowPlan], None]


class InductorKernel:
    """Serves everything the plain kernel does, on the device of its tensors."""

    name = "inductor"

    def __init__(self) -> None:
        self._is_fused: dict[Hashable, bool] = {}  # by kind of pass
        self._plain = PlainKernel()
        self._fused: Run = torch.compile(_run_fused, fullgraph=True)

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        kind = _kind(student, teacher, rows, plan)
        if student.raw.shape[0] < _LEAST_ROWS or not self._admits(kind):
            self._plain.run(student, teacher, rows, plan)
            return
        # Imported where a first pass needs it: dynamo takes longer to import than torch itself.
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        for tensor in _tensors(student, teacher, rows):
            torch._dynamo.mark_dynamic(tensor, 0)
        try:
            self._fused(student, teacher, rows, plan)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # before anything ran: the rows are untouched
            first = str(error).strip().partition("\n")[0]
            warnings.warn(f"rows of the head: plain PyTorch (torch.compile failed: {first})", stacklevel=2)
            self._is_fused[kind] = False
            self._plain.run(student, teacher, rows, plan)

    def _admits(self, kind: Hashable) -> bool:
        try:
            hash(kind)
        except TypeError:  # a divergence of another package that has no hash
            return False
        if len(self._is_fused) < _MOST_KINDS:
            self._is_fused.setdefault(kind, True)
        return self._is_fused.get(kind, False)


def _run_fused(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
    """The plain kernel's block, its gradient written as one expression: a scatter would end the fusion."""
    logits, own, gradient, ce_weights = fill_values(student, teacher, rows, plan)
    if plan.wants_student:
        column = ce_weights[:, None]
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        is_label = tokens[None, :] == rows.targets[:, None]
        pull = own.probs * column - torch.where(is_label, column, torch.zeros_like(column))
        leave_gradient(student, logits, pull if gradient is None else pull + gradient)


def _kind(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> Hashable:
    """What a compiled function is bound to."""
    form: Hashable = None
    if isinstance(teacher, Logits):
        form = _layout(teacher)
    elif teacher is not None:
        form = type(teacher).__name__, teacher.ids.shape[1]
    return plan, _layout(student), form, rows.clamped is None, rows.corrected is None


def _layout(logits: Logits) -> Hashable:
    raw = logits.raw
    head = logits.bias is None, logits.scale, logits.softcap, logits.clamp
    return raw.device, raw.dtype, raw.shape[1], raw.stride(), head


def _tensors(student: Logits, teacher: TeacherRows | None, rows: RowRecord) -> list[Tensor]:
    """Those whose first axis is the chunk's rows."""
    found: list[Tensor | None] = [student.raw, rows.targets, rows.temperatures, rows.kd_weights, rows.ce_weights]
    found += [rows.kd, rows.ce, rows.is_bad, rows.clamped, rows.corrected]
    match teacher:
        case Logits():
            found.append(teacher.raw)
        case TopKSignal():
            found += [teacher.ids, teacher.log_probs, teacher.tail_log_mass]
        case SampledSignal():
            found += [teacher.ids, teacher.weights, teacher.entropy]
    return [tensor for tensor in found if tensor is not None]
