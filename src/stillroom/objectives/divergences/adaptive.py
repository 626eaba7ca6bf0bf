"""Divergences with a target or weights that depend on the two rows.

| member | D                                           | what depends on the rows, held fixed for the gradient       |
|--------|---------------------------------------------|-------------------------------------------------------------|
| taid(t)| KL(r, q), r ~ q^(1-t) p^t                   | the target r, between student (t = 0) and teacher (t = 1)    |
| todi   | sum s p log(p/q) + (1-s) q log(q/p)         | s = p / (p + q) for each token                               |
| akl    | w KL(p, q) + (1-w) KL(q, p)                 | w, the share of |p - q| in the teacher's likeliest half      |

TAID: Shing et al. (2025); its t is a setting that the curriculum moves, so there is no hidden state. ToDi: Jung et al.
(2025). AKL: Wu et al. (2024).

Reverse terms read the teacher's log-probs with the floor of `reverse_kl`.

Legend: ... rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stillroom.numerics import LOG_PROB_FLOOR, Softmax
from stillroom.objectives.divergences.base import Divergence, Slopes
from stillroom.objectives.divergences.family import ForwardKL, unit_setting
from stillroom.objectives.divergences.named import register

_HEAD_MASS = 0.5
_NEAR = 0.1  # below it the target is computed from its distance to the student
_MOST_STEP = 60.0  # in nats; exp of it times a probability of 0 is 0


@dataclass(frozen=True)
class Interpolated:
    """TAID: KL(r, q) with a target on the geometric path from the student's own row to the teacher's, 0 <= t < 1."""

    place: float
    name: ClassVar[str] = "taid"

    def __post_init__(self) -> None:
        unit_setting({"interpolation": self.place}, "interpolation", 1.0)

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        if self.place < _NEAR:
            target, log_ratio, slope = self._near_student(student, teacher)
        else:
            row = Softmax.of_logits(torch.lerp(student.scores, teacher.scores, self.place))
            target, log_ratio = row.probs, row.take_log_probs().sub_(student.take_log_probs())
            slope = None
        pointwise = log_ratio.mul_(target)
        value = pointwise.sum(-1)
        teacher_slope = None
        if wants_teacher:  # d KL(r, q) / d log p = t r (log r - log q - D)
            teacher_slope = pointwise.addcmul(target, value[..., None], value=-1.0).mul_(self.place)
        return Slopes(value, target.neg_() if slope is None else slope, teacher_slope)

    def _near_student(self, student: Softmax, teacher: Softmax) -> tuple[Tensor, Tensor, Tensor]:
        """r, log r - log q and q - r, from x = t (log p - log q): q - r would lose all digits by cancellation."""
        step = teacher.scores.sub_(student.scores).mul_(self.place)
        step.clamp_max_(_MOST_STEP)  # larger only where the student's probability is 0, and stays 0
        log_norm = torch.log1p((torch.expm1(step) * student.probs).sum(-1, keepdim=True))
        step.sub_(log_norm)
        slope = torch.expm1(step).mul_(student.probs).neg_()
        return student.probs - slope, step, slope


@dataclass(frozen=True)
class TokenWise:
    """ToDi: forward KL for tokens with p > q, reverse KL for tokens with p < q, by smooth weights.

    The value equals Jeffreys' divergence, sum (p - q) log(p / q); the slopes differ, because the weights are held
    fixed.
    """

    name: ClassVar[str] = "todi"

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        total = (student.probs + teacher.probs).clamp_min_(torch.finfo(student.probs.dtype).tiny)
        share = teacher.probs / total
        forward, reverse = teacher.probs * share, student.probs * (1.0 - share)
        log_q, log_p = student.take_log_probs(), teacher.take_log_probs()
        is_floored = log_p < LOG_PROB_FLOOR
        log_ratio = log_q - log_p.clamp_min(LOG_PROB_FLOOR)  # of student to teacher
        value = (forward * (log_p - log_q)).sum(-1) + (reverse * log_ratio).sum(-1)
        student_slope = (log_ratio + 1.0).mul_(reverse).sub_(forward)
        teacher_slope = None
        if wants_teacher:
            teacher_slope = (log_p - log_q + 1.0) * forward - reverse.masked_fill(is_floored, 0.0)
        return Slopes(value, student_slope, teacher_slope)


@dataclass(frozen=True)
class HeadAndTail:
    """AKL: forward KL weighted by the share of |p - q| on the teacher's likeliest half, reverse KL by the rest."""

    name: ClassVar[str] = "akl"

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        weight = _head_share(student.probs, teacher.probs)[..., None]
        log_q, log_p = student.take_log_probs(), teacher.take_log_probs()
        is_floored = log_p < LOG_PROB_FLOOR
        forward = (log_p - log_q).mul_(teacher.probs)
        reverse = (log_q - log_p.clamp_min(LOG_PROB_FLOOR)).mul_(student.probs)
        value = (weight * forward).sum(-1) + ((1.0 - weight) * reverse).sum(-1)
        # The +q and +p of the slopes are left out: the softmax pull-back removes them.
        student_slope = (1.0 - weight) * reverse - weight * teacher.probs
        teacher_slope = None
        if wants_teacher:
            teacher_slope = weight * forward - (1.0 - weight) * student.probs.masked_fill(is_floored, 0.0)
        return Slopes(value, student_slope, teacher_slope)


def _head_share(student_probs: Tensor, teacher_probs: Tensor) -> Tensor:
    """The share of sum |p - q| on the likeliest tokens with half of the teacher's mass. [...]"""
    ordered, order = teacher_probs.sort(dim=-1, descending=True)
    gap = (student_probs.gather(-1, order) - ordered).abs_()
    is_head = ordered.cumsum(-1) - ordered < _HEAD_MASS  # the mass before a token: the head has at least one
    head = (gap * is_head).sum(-1)
    total = gap.sum(-1)
    return torch.where(total > 0, head / total.clamp_min(torch.finfo(total.dtype).tiny), torch.full_like(total, 0.5))


def _make_taid(settings: Mapping[str, float]) -> Divergence:
    place = unit_setting(settings, "interpolation", 1.0)
    return ForwardKL() if place == 1.0 else Interpolated(place)


register("taid", _make_taid, ("interpolation",))
register("todi", lambda settings: TokenWise())
register("akl", lambda settings: HeadAndTail())
