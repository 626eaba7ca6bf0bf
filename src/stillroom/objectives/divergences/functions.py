"""The divergences as functions of two tensors of logits, for use without the rest of the library."""

from __future__ import annotations

from torch import Tensor

from stillroom.objectives.divergences.family import ForwardKL, ReverseKL, TotalVariation
from stillroom.objectives.divergences.named import make
from stillroom.objectives.divergences.on_logits import on_logits


def forward_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(teacher, student) for each row."""
    return on_logits(ForwardKL(), student_logits, teacher_logits, temperature)


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL(student, teacher) for each row; the teacher's log-probs are floored at -50."""
    return on_logits(ReverseKL(), student_logits, teacher_logits, temperature)


def jsd(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, *, beta: float = 0.5) -> Tensor:
    """T^2 times the normalised Jensen-Shannon of each row: beta 0 is forward KL, beta 1 reverse KL."""
    return on_logits(make("jsd", {"beta": beta}), student_logits, teacher_logits, temperature)


def skew_forward_kl(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, *, alpha: float = 0.1
) -> Tensor:
    """T^2 KL(p, alpha p + (1 - alpha) q) for each row."""
    return on_logits(make("skew_forward_kl", {"alpha": alpha}), student_logits, teacher_logits, temperature)


def skew_reverse_kl(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, *, alpha: float = 0.1
) -> Tensor:
    """T^2 KL(q, (1 - alpha) p + alpha q) for each row."""
    return on_logits(make("skew_reverse_kl", {"alpha": alpha}), student_logits, teacher_logits, temperature)


def total_variation(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 times half the L1 distance of each row."""
    return on_logits(TotalVariation(), student_logits, teacher_logits, temperature)
