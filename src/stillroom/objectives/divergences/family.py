"""One family of divergences between a teacher p and a student q, with closed-form slopes.

A member computes, for two rows, its value summed over the vocabulary and the slopes dD/dlog q and dD/dlog p. The slopes
treat log q (log p) as free variables; `softmax_pullback` turns them into gradients of the logits,
d/dz = (slope - q * sum(slope)) / T.

| member              | D                                      | remarks                                          |
|---------------------|----------------------------------------|--------------------------------------------------|
| forward_kl          | KL(p, q)                               | covers the teacher's mass; default for base models |
| reverse_kl          | KL(q, p)                               | seeks modes; log p is floored at -50             |
| jsd(beta)           | [b KL(p, m) + (1-b) KL(q, m)] / b(1-b) | m = b p + (1-b) q; beta 0 forward, 1 reverse KL   |
| skew_forward_kl(a)  | KL(p, a p + (1-a) q)                   | slope bounded by 1 / a                           |
| skew_reverse_kl(a)  | KL(q, (1-a) p + a q)                   | log-ratio bounded by -log a                      |
| total_variation     | sum |p - q| / 2                        | between 0 and 1; not smooth at p = q             |
| alpha_beta(a, b)    | sum [a p^s + b q^s - s p^a q^b] / s a b | s = a + b; (1, 0) is forward, (0, 1) reverse KL   |
| taid, todi, akl     | see adaptive.py                        | weights or target depend on the rows             |

The Jensen-Shannon divergence of Agarwal et al. (2024) vanishes like beta(1 - beta) at its ends; ours is divided by
that, so its limits are forward and reverse KL (at beta = 0.5 it is 4 times theirs).

Settings may be anywhere in [0, 1]; a ramp comes arbitrarily near to the ends. So the quotient of a small difference and
a small setting is computed by log1p or expm1, and a slope that vanishes near an end is written as a product with the
vanishing factor. `tests/objectives/divergences/test_family_ends.py` compares values and gradients with 60 digits.

Floor of reverse KL: teacher probabilities below exp(-50) are read as exp(-50). The value is then finite, too small by
at most q * (-50 - log p) for such a token, and the teacher's slope is 0 there. alpha_beta has the same floor where the
student's probability is above exp(-50).

Legend: ... rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.numerics import LOG_PROB_FLOOR, Softmax, log1p_rest
from stillroom.objectives.divergences.base import Divergence, Slopes
from stillroom.objectives.divergences.named import register


@dataclass(frozen=True)
class ForwardKL:
    """KL(p, q) = sum p (log p - log q)."""

    name: ClassVar[str] = "forward_kl"

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        pointwise = teacher.scores.sub_(student.scores).mul_(teacher.probs)
        # Add the normalisers after the sum: they change the teacher's slope by a multiple of p, which the softmax
        # pull-back removes, like the +p that belongs to that slope.
        value = pointwise.sum(-1) + (student.log_norm - teacher.log_norm)
        if wants_teacher:
            return Slopes(value, -teacher.probs, pointwise)
        if teacher.sums_to_one:  # q - p sums to 0, so no pull-back is needed: two passes less
            return Slopes(value, torch.sub(student.probs, teacher.probs, out=pointwise), None, is_pulled=True)
        return Slopes(value, torch.neg(teacher.probs, out=pointwise), None)


@dataclass(frozen=True)
class ReverseKL:
    """KL(q, p) = sum q (log q - log p), with log p floored at -50 nats."""

    name: ClassVar[str] = "reverse_kl"

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        teacher_slope = None
        if wants_teacher:
            is_floored = teacher.scores < LOG_PROB_FLOOR + teacher.log_norm[..., None]
            teacher_slope = (-student.probs).masked_fill_(is_floored, 0.0)
        floored = teacher.take_log_probs().clamp_min_(LOG_PROB_FLOOR)
        pointwise = student.take_log_probs().sub_(floored).mul_(student.probs)
        # The +q that belongs to the slope is left out: the softmax pull-back removes it exactly.
        return Slopes(pointwise.sum(-1), pointwise, teacher_slope)


@dataclass(frozen=True)
class JensenShannon:
    """Normalised Jensen-Shannon with mixture m = beta p + (1 - beta) q, 0 < beta < 1.

    Its slopes are q (log q - log m) / beta and p (log p - log m) / (1 - beta). D is homogeneous in (p, q), so their
    sum is D (Euler).
    """

    beta: float
    name: ClassVar[str] = "jsd"

    def __post_init__(self) -> None:
        _check_inside("beta", self.beta, "for the two ends take forward_kl (0) or reverse_kl (1)")

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        if self.beta <= 0.5:
            student_slope, teacher_slope = _mixture_slopes(student, teacher, self.beta)
        else:
            teacher_slope, student_slope = _mixture_slopes(teacher, student, 1.0 - self.beta)
        value = student_slope.sum(-1) + teacher_slope.sum(-1)
        return Slopes(value, student_slope, teacher_slope if wants_teacher else None)


def _mixture_slopes(near: Softmax, far: Softmax, share: float) -> tuple[Tensor, Tensor]:
    """a (log a - log m) / share and b (log b - log m) / (1 - share), m = share b + (1 - share) a, share <= 1/2.

    log m - log a = log1p(share (b - a) / a) with an argument of at least -1/2, so dividing by a small share loses no
    digits.
    """
    base = near.probs.clamp_min(torch.finfo(near.probs.dtype).tiny)
    rise = torch.sub(far.probs, near.probs).div_(base).mul_(share).log1p_()
    log_near = torch.log(base, out=base)  # of the rounded probability, consistent with the other terms
    far_slope = far.take_log_of_probs().sub_(log_near).sub_(rise).mul_(far.probs).div_(1.0 - share)
    return rise.div_(-share).mul_(near.probs), far_slope


@dataclass(frozen=True)
class SkewForwardKL:
    """KL(p, m) with m = alpha p + (1 - alpha) q, 0 < alpha < 1 (Ko et al. 2024)."""

    alpha: float
    name: ClassVar[str] = "skew_forward_kl"

    def __post_init__(self) -> None:
        _check_inside("alpha", self.alpha, "for alpha 0 take forward_kl; alpha 1 compares a distribution with itself")

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        value, teacher_slope, student_slope = _skewed(teacher, student, self.alpha, wants_own=wants_teacher)
        return Slopes(value, student_slope, teacher_slope)


@dataclass(frozen=True)
class SkewReverseKL:
    """KL(q, m) with m = (1 - alpha) p + alpha q, 0 < alpha < 1 (Ko et al. 2024)."""

    alpha: float
    name: ClassVar[str] = "skew_reverse_kl"

    def __post_init__(self) -> None:
        _check_inside("alpha", self.alpha, "for alpha 0 take reverse_kl; alpha 1 compares a distribution with itself")

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        value, student_slope, teacher_slope = _skewed(student, teacher, self.alpha, wants_own=True)
        assert student_slope is not None
        return Slopes(value, student_slope, teacher_slope if wants_teacher else None)


STEEP = 0.9  # above it the two parts of a skewed slope nearly cancel


def _skewed(own: Softmax, other: Softmax, alpha: float, *, wants_own: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """KL(a, m) with m = alpha a + (1 - alpha) b, and its slopes in log a (where wanted) and in log b.

    Without the multiples of a and b that the softmax removes, the slopes are
    a (log a - log m) + alpha (1 - alpha) a (b - a) / m and (1 - alpha)^2 b (b - a) / m: near alpha = 1 a factor
    vanishes, not a difference.
    """
    tiny, rest = torch.finfo(own.probs.dtype).tiny, 1.0 - alpha
    mixture = (own.probs * alpha).add_(other.probs, alpha=rest).clamp_min_(tiny)
    gap = other.probs - own.probs
    slope = (gap / mixture).mul_(rest)  # (1 - alpha) (b - a) / m
    pointwise = own.take_log_of_probs().sub_(mixture.log_()).mul_(own.probs)
    value = pointwise.sum(-1)
    own_slope = None
    if wants_own and alpha <= STEEP:
        own_slope = pointwise.addcmul_(slope, own.probs, value=alpha)
    elif wants_own:
        # alpha x / (1 + x) - log1p(x) with x = m / a - 1, which is of second order in x and 1 - alpha.
        rise = gap.double().div_(own.probs.double().clamp_min_(tiny)).mul_(rest)
        near = log1p_rest(rise).sub_((rise + rest).div_(rise + 1.0).mul_(rise))
        own_slope = near.mul_(own.probs).to(own.probs.dtype)
    return value, own_slope, slope.mul_(other.probs).mul_(rest)


@dataclass(frozen=True)
class TotalVariation:
    """Half the L1 distance: the probability that the best coupling of p and q disagrees."""

    name: ClassVar[str] = "total_variation"

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        gap = torch.sub(student.probs, teacher.probs, out=student.scores)
        sign = torch.sign(gap, out=teacher.scores)
        teacher_slope = (teacher.probs * sign).mul_(-0.5) if wants_teacher else None
        return Slopes(gap.abs_().sum(-1) * 0.5, sign.mul_(student.probs).mul_(0.5), teacher_slope)


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta divergence: forward KL at (1, 0), reverse KL at (0, 1); where one is 0, the limit.

    Cichocki et al. (2011); for distillation Wang et al. (2025), who use (0.2, 0.7). A larger alpha stresses tokens that
    are likely for the teacher, a larger beta those that are likely for the student.
    """

    alpha: float
    beta: float
    name: ClassVar[str] = "alpha_beta"

    def __post_init__(self) -> None:
        unit_setting({"alpha": self.alpha}, "alpha", 0.0)
        unit_setting({"beta": self.beta}, "beta", 0.0)
        if self.alpha + self.beta < _LEAST_POWER:
            raise ConfigError(
                f"alpha_beta with alpha {self.alpha:g} and beta {self.beta:g} would weigh every token alike",
                advice=["set one of them well above 0, as alpha 0.2 and beta 0.7"],
            )

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes:
        a, b = self.alpha, self.beta
        log_p, log_q = teacher.take_log_probs(), student.take_log_probs()
        dtype = log_p.dtype
        if a + b < _SMALL_POWER:  # the two slopes nearly cancel in the value: use FP64
            log_p, log_q = log_p.double(), log_q.double()
        floor = log_q.clamp_max(LOG_PROB_FLOOR)  # no floor where the student's probability is below it too
        is_floored = log_p < floor if wants_teacher else None
        log_p = torch.maximum(log_p, floor, out=floor)
        p_a, p_b = (log_p * a).exp_(), (log_p * b).exp_()
        q_a, q_b = (log_q * a).exp_(), (log_q * b).exp_()
        log_ratio = log_p.sub_(log_q)
        # Differences that are exactly 0 where p = q.
        toward = _power_gap(p_b, q_b, log_ratio, b).mul_(p_a)  # the teacher's slope
        away = _power_gap(q_a, p_a, log_ratio.neg_(), a).mul_(q_b)  # the student's slope
        value = (toward.sum(-1) + away.sum(-1)) / (a + b)  # D is homogeneous of degree a + b (Euler)
        if is_floored is not None:
            toward.masked_fill_(is_floored, 0.0)
        return Slopes(value.to(dtype), away.to(dtype), toward.to(dtype) if wants_teacher else None)


_LEAST_POWER = 1e-6
_SMALL_POWER = 0.05  # below it the difference of two powers loses digits


def _power_gap(upper: Tensor, lower: Tensor, log_ratio: Tensor, power: float) -> Tensor:
    """(x^c - y^c) / c from both powers and log x - log y; log x - log y itself at c = 0."""
    if power >= _SMALL_POWER:
        return (upper - lower).div_(power)
    if power == 0.0:
        return log_ratio.clone()
    gap = torch.expm1(log_ratio.abs().mul_(-power)).neg_().copysign_(log_ratio)
    return gap.mul_(torch.maximum(upper, lower)).div_(power)


# -- by name ---------------------------------------------------------------------------------------------


def unit_setting(settings: Mapping[str, float], key: str, default: float) -> float:
    """A setting between 0 and 1."""
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} is {value!r}, not a number", advice=[f"set {key} between 0 and 1"])
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{key} is {value:g}", advice=[f"set {key} between 0 and 1"])
    return value


def _check_inside(key: str, value: float, advice: str) -> None:
    if unit_setting({key: value}, key, value) in (0.0, 1.0):
        raise ConfigError(f"{key} is {value:g}", advice=[advice])


_LEAST_SHARE = 2.0**-100  # FP32 cannot divide by less: read as 0


def _make_jsd(settings: Mapping[str, float]) -> Divergence:
    beta = unit_setting(settings, "beta", 0.5)
    ends: dict[float, Divergence] = {0.0: ForwardKL(), 1.0: ReverseKL()}
    return ends.get(0.0 if beta < _LEAST_SHARE else beta) or JensenShannon(beta)


def _make_alpha_beta(settings: Mapping[str, float]) -> Divergence:
    alpha, beta = unit_setting(settings, "alpha", 0.2), unit_setting(settings, "beta", 0.7)
    if (alpha, beta) in ((1.0, 0.0), (0.0, 1.0)):
        return ForwardKL() if alpha else ReverseKL()
    return AlphaBeta(alpha, beta)


def _make_skew(settings: Mapping[str, float], skewed: Callable[[float], Divergence], plain: Divergence) -> Divergence:
    alpha = unit_setting(settings, "alpha", 0.1)
    if alpha == 1.0:
        raise ConfigError("a skew of alpha = 1 compares a distribution with itself", advice=["set alpha to 0.1"])
    return plain if alpha == 0.0 else skewed(alpha)


register("forward_kl", lambda settings: ForwardKL())
register("reverse_kl", lambda settings: ReverseKL())
register("jsd", _make_jsd, ("beta",))
register("skew_forward_kl", lambda settings: _make_skew(settings, SkewForwardKL, ForwardKL()), ("alpha",))
register("skew_reverse_kl", lambda settings: _make_skew(settings, SkewReverseKL, ReverseKL()), ("alpha",))
register("total_variation", lambda settings: TotalVariation())
register("alpha_beta", _make_alpha_beta, ("alpha", "beta"))
