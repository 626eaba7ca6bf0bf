"""The row kernel in plain PyTorch: runs wherever torch runs, and is what other kernels must agree with.

Rows are taken in blocks, because there are up to 26 temporaries of a block's size.

Legend: C rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from stillroom.errors import DataError
from stillroom.numerics import Softmax, softcap, softcap_slope
from stillroom.objectives.divergences import softmax_pullback, student_gradient
from stillroom.objectives.head.chunks import TEMPORARIES
from stillroom.objectives.head.row_kernel import Logits, RowPlan, RowRecord, TeacherRows
from stillroom.objectives.head.sparse import (
    KdRows,
    give_rest_to_label,
    keep_top_k,
    sampled_rows,
    select_rows,
    topk_rows,
    without_empty_tail,
)
from stillroom.types import SampledSignal, TopKSignal

_BLOCK_ELEMENTS = 1 << 19  # on a CPU: 2 MB of FP32 for each temporary
_MOST_TEMPORARIES = 26  # [rows, V] of four bytes alive at once, in the divergence that has most of them
_LEAST_ELEMENTS = 1 << 20  # on a device: kernels on less take no longer to run than to launch
_KEPT_BYTES = 31 << 20  # glibc learns from blocks up to 32 MB


class PlainKernel:
    """Every divergence and every form of teacher, in any dtype, on any device."""

    name = "plain"

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        num_rows, num_tokens = student.raw.shape
        kind = student.raw.device.type
        if kind == "cpu":
            _keep_freed_memory()
            _check_inside(rows.targets, teacher, num_tokens)
        block = rows_at_once(num_rows, num_tokens, kind)
        for start in range(0, num_rows, block):
            part = slice(start, min(start + block, num_rows))
            _run_block(student.rows(part), _teacher_rows(teacher, part), rows.rows(part), plan)


def rows_at_once(num_rows: int, num_tokens: int, device_type: str) -> int:
    """Rows of a block. On a CPU its temporaries stay near the cache; on a device all of them fit `TEMPORARIES` chunks.

    A device's block has a million entries at least, even where the chunk is smaller than that.
    """
    if device_type == "cpu":
        return max(1, _BLOCK_ELEMENTS // num_tokens)
    share = num_rows * TEMPORARIES // _MOST_TEMPORARIES
    return max(1, share, min(num_rows, _LEAST_ELEMENTS // num_tokens))


def _check_inside(targets: Tensor, teacher: TeacherRows | None, num_tokens: int) -> None:
    """On a CPU reading ids is free. A GPU raises by itself, later and with a poorer message."""
    ids = [targets] if teacher is None or isinstance(teacher, Logits) else [targets, teacher.ids]
    for tensor in ids:
        numbers = tensor.numpy()
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_tokens:
            raise outside_vocabulary(num_tokens)


def outside_vocabulary(num_tokens: int) -> DataError:
    return DataError(
        f"a label or an id of the teacher lies outside the vocabulary of {num_tokens:,} tokens",
        where="labels, teacher.ids",
        advice=["data, teacher and student must have one tokenizer", "vocab_size may be too small"],
    )


@functools.cache
def _keep_freed_memory() -> None:
    """Free one large block, once: glibc then keeps freed memory of that size instead of returning it to the system.

    Otherwise every block of rows faults its temporaries in again, page by page, which takes longer than the arithmetic.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


def _teacher_rows(teacher: TeacherRows | None, part: slice) -> TeacherRows | None:
    if teacher is None:
        return None
    return teacher.rows(part) if isinstance(teacher, Logits) else select_rows(teacher, part)


def _run_block(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
    logits, own, gradient, ce_weights = fill_values(student, teacher, rows, plan)
    if plan.wants_student:
        column = ce_weights[:, None]
        out = student.raw if _is_bare(student) else own.probs
        if gradient is None:
            torch.mul(own.probs, column, out=out)
        else:
            torch.addcmul(gradient, own.probs, column, out=out)
        out.scatter_add_(-1, rows.targets[:, None], -column)
        leave_gradient(student, logits, out)


def fill_values(
    student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan
) -> tuple[Tensor, Softmax, Tensor | None, Tensor]:
    """Fill the values of a block's rows, and the teacher's gradient where wanted.

    Return what the student's gradient is made of: its logits, their softmax at T = 1, the weighted gradient of kd
    (None without kd), and what the cross-entropy of each row weighs.
    """
    logits = finish(student)
    if rows.clamped is not None and student.clamp is not None:
        rows.clamped.copy_((logits.abs() >= student.clamp).sum(-1))
    own = Softmax.of_logits(logits)
    rows.ce.copy_(own.log_norm - own.scores.gather(-1, rows.targets[:, None]).squeeze(-1))
    if teacher is None or plan.divergence is None:
        return logits, own, None, rows.ce_weights
    kd, gradient, is_bad = _kd_rows(logits, own, teacher, rows, plan)
    zeros = torch.zeros_like(kd)
    rows.kd.copy_(torch.where(is_bad, zeros, kd))
    rows.is_bad.copy_(is_bad)
    ce_weights = rows.ce_weights + torch.where(is_bad, rows.kd_weights, zeros)
    if gradient is not None:
        gradient.mul_((torch.where(is_bad, zeros, rows.kd_weights) * rows.temperatures)[:, None])
    return logits, own, gradient, ce_weights


def _is_bare(logits: Logits) -> bool:
    """Whether the products are the logits up to a bias, so that the gradient can be written over them directly."""
    return logits.scale == 1.0 and logits.softcap is None and logits.clamp is None


def _kd_rows(logits: Tensor, own: Softmax, teacher: TeacherRows, rows: RowRecord, plan: RowPlan) -> KdRows:
    assert plan.divergence is not None
    if isinstance(teacher, Logits):
        if not plan.top_k:
            return _dense_rows(own, teacher, rows, plan)
        teacher = keep_top_k(finish(teacher), plan.top_k, rows.temperatures)
    if isinstance(teacher, TopKSignal):
        teacher = without_empty_tail(teacher, logits.shape[-1])
        if plan.rest_to_label:
            teacher = give_rest_to_label(teacher, rows.targets)
        return topk_rows(logits, teacher, rows.temperatures, plan.divergence, wants_gradient=plan.wants_student)
    assert isinstance(teacher, SampledSignal)
    return sampled_rows(logits, teacher, rows.temperatures, wants_gradient=plan.wants_student)


def _dense_rows(own: Softmax, teacher_logits: Logits, rows: RowRecord, plan: RowPlan) -> KdRows:
    """`own` is the student's softmax at T = 1. Its scores may be overwritten, its probabilities not."""
    assert plan.divergence is not None
    temperatures = rows.temperatures[:, None]
    finished = finish(teacher_logits)
    teacher = Softmax.of_logits(finished, 1.0 if plan.is_unit_temperature else temperatures)
    is_bad = teacher.log_norm.isnan()
    _make_uniform(teacher, is_bad)
    if plan.label_margin is not None:
        _lead_to_label(teacher, rows, plan.label_margin)
    student = own if plan.is_unit_temperature else own.take_at(temperatures)
    slopes = plan.divergence.evaluate(student, teacher, wants_teacher=plan.wants_teacher)
    gradient = student_gradient(slopes, student) if plan.wants_student else None
    if slopes.teacher is not None:
        teacher_gradient = softmax_pullback(slopes.teacher, teacher.probs)
        kd_weights = torch.where(is_bad, torch.zeros_like(rows.kd_weights), rows.kd_weights) * rows.temperatures
        leave_gradient(teacher_logits, finished, teacher_gradient.mul_(kd_weights[:, None]))
    return slopes.value * rows.temperatures * rows.temperatures, gradient, is_bad


def _lead_to_label(teacher: Softmax, rows: RowRecord, margin: float) -> None:
    """Where the likeliest token is not the label, mix in the label until it leads by the margin, in place.

    p' = (1 - a) p + a [label] with a = (margin + max p - p_label) / (1 + max p - p_label): the corrective teacher of
    minifinetuning (Belcak et al. 2025).
    """
    targets = rows.targets[:, None]
    label, most = teacher.probs.gather(-1, targets), teacher.probs.amax(-1, keepdim=True)
    is_wrong = label < most
    share = torch.where(is_wrong, (margin + most - label) / (1.0 + most - label), torch.zeros_like(label))
    teacher.probs.mul_(1.0 - share).scatter_add_(-1, targets, share)
    led = teacher.probs.gather(-1, targets).log_() + teacher.log_norm[:, None]
    # Where nothing is mixed in, the label keeps its score: it may be that of an impossible token.
    led = torch.where(is_wrong, led, teacher.scores.gather(-1, targets))
    teacher.scores.add_(torch.log1p(-share)).scatter_(-1, targets, led)
    if rows.corrected is not None:
        rows.corrected.copy_(is_wrong.squeeze(-1))


def _make_uniform(softmax: Softmax, mask: Tensor) -> None:
    """Overwrite the masked rows: by index on a CPU, where reading the mask is free, else by a mask over all rows."""
    num_tokens = softmax.probs.shape[-1]
    fillings = ((softmax.scores, 0.0), (softmax.probs, 1.0 / num_tokens), (softmax.log_norm, math.log(num_tokens)))
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = mask.nonzero().squeeze(-1)
        if rows.numel():
            for values, filling in fillings:
                values.index_fill_(0, rows, filling)
    else:
        for values, filling in fillings:
            values.masked_fill_(mask if values.ndim == 1 else mask[:, None], filling)


def finish(logits: Logits) -> Tensor:
    """Bias, scale and cap of the head on a block of bare products."""
    finished = logits.raw
    if logits.bias is not None:
        finished = finished + logits.bias
    if logits.scale != 1.0:
        finished = finished * logits.scale
    if logits.softcap is not None:
        finished = softcap(finished, logits.softcap)
    return finished if logits.clamp is None else finished.clamp(-logits.clamp, logits.clamp)


def leave_gradient(logits: Logits, finished: Tensor, gradient: Tensor) -> None:
    """Overwrite the bare products with the gradient with respect to them. A bad row's slope may be NaN: `where`."""
    if logits.clamp is not None:
        gradient = torch.where(finished.abs() < logits.clamp, gradient, torch.zeros_like(gradient))
    if logits.softcap is not None:
        slope = softcap_slope(finished, logits.softcap)
        gradient = torch.where(gradient == 0, gradient, gradient * slope)
    if logits.scale != 1.0:
        gradient = gradient * logits.scale
    if gradient is not logits.raw:
        logits.raw.copy_(gradient)
