"""A divergence as a differentiable function of two tensors of logits.

Legend: ... rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.numerics import Softmax
from stillroom.objectives.arguments import check_temperature, check_tensor
from stillroom.objectives.divergences.base import Divergence, Slopes
from stillroom.objectives.second_derivative import only_once


def student_gradient(slopes: Slopes, student: Softmax) -> Tensor:
    """dD/d(z / T) for the student's logits z. Overwrites the slope."""
    return slopes.student if slopes.is_pulled else softmax_pullback(slopes.student, student.probs)


def softmax_pullback(slope: Tensor, probs: Tensor) -> Tensor:
    """dD/dz = slope - softmax(z) * sum(slope). Overwrites `slope`."""
    return slope.addcmul_(probs, slope.sum(-1, keepdim=True), value=-1.0)


class _OnLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_logits: Tensor, teacher_logits: Tensor, temperature: float, divergence: Divergence
    ) -> Tensor:
        student = Softmax.of_logits(student_logits, temperature)
        teacher = Softmax.of_logits(teacher_logits, temperature)
        slopes = divergence.evaluate(student, teacher, wants_teacher=ctx.needs_input_grad[1])
        gradient = student_gradient(slopes, student)
        teacher_gradient = None if slopes.teacher is None else softmax_pullback(slopes.teacher, teacher.probs)
        ctx.save_for_backward(gradient, teacher_gradient)
        ctx.temperature, ctx.dtypes = temperature, (student_logits.dtype, teacher_logits.dtype)
        return slopes.value * temperature**2

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            scale = (upstream[0] * ctx.temperature)[..., None]  # T^2 of the term times 1/T of the softmax
            gradients = [
                None if saved is None else (saved * scale).to(dtype)
                for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        return (*only_once(gradients), None, None)


def on_logits(
    divergence: Divergence, student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0
) -> Tensor:
    """T^2 * D(softmax(teacher / T), softmax(student / T)) for each row of [..., V]; differentiable in both, once.

    Hinton et al. (2015) give the T^2: the gradient then keeps its size when T changes. A row with NaN, with +inf, or
    with -inf only has the value NaN.
    """
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not isinstance(logits, Tensor) or logits.ndim == 0 or logits.shape[-1] == 0:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(f"{name} is {shape}, not logits [..., V]", where=name, advice=["at least one token"])
    shape = list(student_logits.shape)
    check_tensor("student_logits", student_logits, shape, device=student_logits.device)
    check_tensor("teacher_logits", teacher_logits, shape, device=student_logits.device)
    check_temperature(temperature)
    result: Tensor = _OnLogits.apply(student_logits, teacher_logits, float(temperature), divergence)  # type: ignore[no-untyped-call]
    return result
