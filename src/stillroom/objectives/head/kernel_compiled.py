"""The row kernel in C++ (native/rows.cpp), called through ctypes: no torch headers, no build tools beyond a compiler.

It serves FP32 rows on a CPU. Anything else (FP64, a GPU, a teacher that is being trained, a divergence registered by
another package) is left to the plain kernel.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from stillroom.objectives import divergences
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.head.kernel_plain import PlainKernel, finish, outside_vocabulary
from stillroom.objectives.head.row_kernel import Logits, RowPlan, RowRecord, TeacherRows
from stillroom.objectives.head.sparse import give_rest_to_label, keep_top_k, without_empty_tail
from stillroom.types import SampledSignal, TopKSignal


class _Head(ctypes.Structure):
    _fields_ = (
        ("raw", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_columns", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("student", _Head),
        ("teacher", _Head),
        ("ids", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("side", ctypes.c_void_p),
        ("num_kept", ctypes.c_int64),
        ("targets", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("kd_weights", ctypes.c_void_p),
        ("ce_weights", ctypes.c_void_p),
        ("kd", ctypes.c_void_p),
        ("ce", ctypes.c_void_p),
        ("is_bad", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("divergence", ctypes.c_int32),
        ("place", ctypes.c_float),
        ("rest", ctypes.c_float),
        ("has_ce", ctypes.c_int32),
        ("wants_gradient", ctypes.c_int32),
    )


_DENSE, _TOP_K, _SAMPLED = 1, 2, 3


class CompiledKernel:
    """The row kernel of a library that `kernel_build` made."""

    name = "compiled"

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).stillroom_rows
        self._run.argtypes, self._run.restype = (ctypes.POINTER(_Job),), ctypes.c_int32
        self._plain = PlainKernel()

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        code = _code_of(plan.divergence)
        raw = student.raw
        is_odd = code is None or plan.wants_teacher or student.clamp is not None or plan.label_margin is not None
        if is_odd or code is None or raw.dtype != torch.float32 or raw.device.type != "cpu":
            self._plain.run(student, teacher, rows, plan)
            return
        if isinstance(teacher, Logits) and plan.top_k:
            teacher = keep_top_k(finish(teacher), plan.top_k, rows.temperatures)
        if isinstance(teacher, TopKSignal):
            teacher = without_empty_tail(teacher, raw.shape[1])
            if plan.rest_to_label:
                teacher = give_rest_to_label(teacher, rows.targets)
        job, kept_alive = _job(student, teacher, rows, plan, code)
        status = self._run(ctypes.byref(job))
        del kept_alive  # the job holds addresses: the tensors must outlive the call
        if status != 0:
            raise outside_vocabulary(raw.shape[1])


def _job(
    student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan, code: tuple[int, float]
) -> tuple[_Job, list[Tensor]]:
    """The call's arguments, and the tensors they point into. Each has the length that the loops will read."""
    kept_alive: list[Tensor] = []
    num_rows, num_columns = student.raw.shape

    def address(tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> int:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"rows of the head: a tensor of shape {list(tensor.shape)} instead of {list(shape)}")
        tensor = tensor.to(dtype).contiguous()
        kept_alive.append(tensor)
        return tensor.data_ptr()

    def head(logits: Logits) -> _Head:
        if tuple(logits.raw.shape) != (num_rows, num_columns) or logits.raw.stride(1) != 1:
            raise ValueError(
                f"rows of the head: logits of shape {list(logits.raw.shape)} beside {list(student.raw.shape)}"
            )
        bias = None if logits.bias is None else address(logits.bias, num_columns)
        return _Head(logits.raw.data_ptr(), logits.raw.stride(0), bias, logits.scale, logits.softcap or 0.0)

    job = _Job(
        num_rows=num_rows,
        num_columns=num_columns,
        num_threads=torch.get_num_threads(),
        student=head(student),
        targets=address(rows.targets, num_rows, dtype=torch.int64),
        temperatures=address(rows.temperatures, num_rows),
        kd_weights=address(rows.kd_weights, num_rows),
        ce_weights=address(rows.ce_weights, num_rows),
        kd=rows.kd.data_ptr(),
        ce=rows.ce.data_ptr(),
        is_bad=rows.is_bad.data_ptr(),
        divergence=code[0],
        place=code[1],
        rest=1.0 - code[1],
        has_ce=plan.has_ce,
        wants_gradient=plan.wants_student,
    )
    if isinstance(teacher, Logits):
        job.kind, job.teacher = _DENSE, head(teacher)
    elif teacher is not None:
        job.kind = _TOP_K if isinstance(teacher, TopKSignal) else _SAMPLED
        kept = num_rows, teacher.ids.shape[-1]
        job.num_kept, job.ids = kept[1], address(teacher.ids, *kept, dtype=torch.int64)
        job.values = address(teacher.weights if isinstance(teacher, SampledSignal) else teacher.log_probs, *kept)
        job.side = address(teacher.entropy if isinstance(teacher, SampledSignal) else teacher.tail_log_mass, num_rows)
    return job, kept_alive


def knows(divergence: Divergence) -> bool:
    """Whether rows.cpp has that divergence; any other goes through the plain kernel."""
    return _code_of(divergence) is not None


def _code_of(divergence: Divergence | None) -> tuple[int, float] | None:
    """The number of a divergence in rows.cpp and its beta or alpha; None where rows.cpp does not have it."""
    match divergence:
        case None | divergences.ForwardKL():
            return 0, 0.0
        case divergences.ReverseKL():
            return 1, 0.0
        case divergences.JensenShannon(beta):
            return 2 if beta <= 0.5 else 3, beta
        case divergences.SkewForwardKL(alpha):
            return 4, alpha
        case divergences.SkewReverseKL(alpha):
            return 5 if alpha <= divergences.STEEP else 6, alpha
        case divergences.TotalVariation():
            return 7, 0.0
        case _:
            return None
