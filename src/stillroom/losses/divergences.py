"""Divergences between a teacher and a student, with closed-form slopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from stillroom.config.schema import DIVERGENCES, LEAST_TEMPERATURE
from stillroom.core.errors import ConfigError
from stillroom.core.numerics import LOG_PROB_FLOOR, Softmax, log1p_rest

# -- checks of single arguments; none reads a tensor's values ----------------------------------------------


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_number(name: str, value: object, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """A finite number, not a tensor, within its bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} is a {type(value).__name__}, not a number", where=name, advice=[f"{name} = 1.0"])
    number = float(value)
    if not (math.isfinite(number) and number >= least and number > above):
        bound = f"above {above:g}" if above > -math.inf else f"{least:g} or above" if least > -math.inf else "finite"
        raise ConfigError(f"{name} is {number:g}", where=name, advice=[f"a number that is {bound}"])


def check_count(name: str, value: object, *, advice: str) -> None:
    """A whole number, 0 or above."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {value!r}", where=name, advice=[advice])


def check_temperature(temperature: object) -> None:
    if isinstance(temperature, Tensor) or not isinstance(temperature, Real):
        raise ConfigError(
            f"temperature is a {type(temperature).__name__}, not a number",
            where="temperature",
            advice=["temperature = 2.0", "token_temperature takes one for each position"],
        )
    if not LEAST_TEMPERATURE <= float(temperature) < math.inf:
        raise ConfigError(
            f"temperature is {float(temperature):g}",
            where="temperature",
            advice=[f"{LEAST_TEMPERATURE:g} or above; 1 is neutral"],
        )


def check_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | str],
    *,
    device: torch.device,
    dtypes: str = "floating",
    advice: str = "one entry for each position of the student's hidden states, in the same order",
) -> None:
    """A tensor of that shape, on that device. A name in place of a length matches any length.

    `dtypes` is "floating", "integer" or "real" (either of them, or bool). `advice` is for a wrong shape.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}, not a tensor", where=name, advice=["torch.as_tensor"])
    lengths = tuple(tensor.shape)
    is_same = len(lengths) == len(shape) and all(
        isinstance(asked, str) or asked == length for asked, length in zip(shape, lengths, strict=True)
    )
    if not is_same:
        asked = ", ".join(f"{length}" for length in shape)
        raise ConfigError(
            f"{name} has shape {list(lengths)}, and [{asked}] is needed",
            where=name,
            advice=[advice],
        )
    is_integer, is_floating = tensor.dtype in _INTEGERS, tensor.dtype.is_floating_point
    is_right = {"floating": is_floating, "integer": is_integer}.get(dtypes, not tensor.dtype.is_complex)
    if not is_right:
        raise ConfigError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and {dtypes} numbers are needed",
            where=name,
            advice=[f"{name}.long()" if dtypes == "integer" else f"{name}.float()"],
        )
    if tensor.device != device:
        raise ConfigError(
            f"{name} is on {tensor.device}, the student on {device}", where=name, advice=[f"{name}.to('{device}')"]
        )


# -- the interface of a divergence between rows of probabilities -------------------------------------------
#
# Legend: ... rows, V vocabulary.


@dataclass(frozen=True)
class Slopes:
    """The value of a divergence for each row, dD/dlog q and, if wanted, dD/dlog p.

    A multiple of q may be added to the student's slope (of p to the teacher's): the softmax removes it.
    """

    value: Tensor  # [...]
    student: Tensor  # [..., V]
    teacher: Tensor | None  # [..., V]
    is_pulled: bool = False  # the student's slope sums to 0, so it is the gradient of the logits


class Divergence(Protocol):
    """A distance between teacher and student rows.

    `evaluate` may overwrite the `scores` it is given, to save memory, but not the `probs`.
    """

    @property
    def name(self) -> str: ...

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes: ...


# -- divergences by name: ours, and those of other packages (`config/schema.py`) ---------------------------


Factory = Callable[[Mapping[str, float]], Divergence]
_SETTINGS = ("beta", "alpha", "interpolation")


@dataclass(frozen=True)
class Member:
    """A registered divergence: its factory, and the settings of `objectives.kd` that the factory takes."""

    make: Factory
    settings: tuple[str, ...] = ()  # of beta, alpha, interpolation: each between 0 and 1, and possibly a ramp


def register(name: str, factory: Factory, settings: tuple[str, ...] = ()) -> None:
    """Make a divergence available by name in this process. Packages use an entry point that names a `Member`."""
    DIVERGENCES.register(name, Member(factory, settings))


def names() -> tuple[str, ...]:
    """The names of all divergences, those of packages included."""
    return DIVERGENCES.names()


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that the divergence of that name takes."""
    member: Member = DIVERGENCES.find(name)
    if strange := set(member.settings) - set(_SETTINGS):
        raise ConfigError(
            f"the divergence {name} asks for {', '.join(sorted(strange))}, which objectives.kd does not have",
            advice=[f"settings are {', '.join(_SETTINGS)}"],
        )
    return member.settings


def make(name: str, settings: Mapping[str, float] | None = None) -> Divergence:
    """The divergence of that name; missing settings take its defaults."""
    member: Member = DIVERGENCES.find(name)
    return member.make(settings or {})


# -- one family of divergences between a teacher p and a student q -----------------------------------------
#
# A member computes, for two rows, its value summed over the vocabulary and the slopes dD/dlog q and dD/dlog p. The
# slopes treat log q (log p) as free variables; `softmax_pullback` turns them into gradients of the logits, d/dz =
# (slope - q * sum(slope)) / T.
#
# | member              | D                                      | remarks                                          |
# |---------------------|----------------------------------------|--------------------------------------------------|
# | forward_kl          | KL(p, q)                               | covers the teacher's mass; default for base models |
# | reverse_kl          | KL(q, p)                               | seeks modes; log p is floored at -50             |
# | jsd(beta)           | [b KL(p, m) + (1-b) KL(q, m)] / b(1-b) | m = b p + (1-b) q; beta 0 forward, 1 reverse KL   |
# | skew_forward_kl(a)  | KL(p, a p + (1-a) q)                   | slope bounded by 1 / a                           |
# | skew_reverse_kl(a)  | KL(q, (1-a) p + a q)                   | log-ratio bounded by -log a                      |
# | total_variation     | sum |p - q| / 2                        | between 0 and 1; not smooth at p = q             |
# | alpha_beta(a, b)    | sum [a p^s + b q^s - s p^a q^b] / s a b | s = a + b; (1, 0) is forward, (0, 1) reverse KL   |
# | taid, todi, akl     | see below                              | weights or target depend on the rows             |
#
# The Jensen-Shannon divergence of Agarwal et al. (2024) vanishes like beta(1 - beta) at its ends; ours is divided by
# that, so its limits are forward and reverse KL (at beta = 0.5 it is 4 times theirs).
#
# Settings may be anywhere in [0, 1]; a ramp comes arbitrarily near to the ends. So the quotient of a small difference
# and a small setting is computed by log1p or expm1, and a slope that vanishes near an end is written as a product
# with the vanishing factor. `tests/losses/divergences/test_family_ends.py` compares values and gradients with 60
# digits.
#
# Floor of reverse KL: teacher probabilities below exp(-50) are read as exp(-50). The value is then finite, too small
# by at most q * (-50 - log p) for such a token, and the teacher's slope is 0 there. alpha_beta has the same floor
# where the student's probability is above exp(-50).
#
# Legend: ... rows, V vocabulary.


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
        if a + b < SMALL_POWER:  # the two slopes nearly cancel in the value: use FP64
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
SMALL_POWER = 0.05  # below it the difference of two powers loses digits


def _power_gap(upper: Tensor, lower: Tensor, log_ratio: Tensor, power: float) -> Tensor:
    """(x^c - y^c) / c from both powers and log x - log y; log x - log y itself at c = 0."""
    if power >= SMALL_POWER:
        return (upper - lower).div_(power)
    if power == 0.0:
        return log_ratio.clone()
    gap = torch.expm1(log_ratio.abs().mul_(-power)).neg_().copysign_(log_ratio)
    return gap.mul_(torch.maximum(upper, lower)).div_(power)


# -- making a member of the family from its settings -------------------------------------------------------


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


# -- divergences with a target or weights that depend on the two rows --------------------------------------
#
# | member | D                                           | what depends on the rows, held fixed for the gradient       |
# |--------|---------------------------------------------|-------------------------------------------------------------|
# | taid(t)| KL(r, q), r ~ q^(1-t) p^t                   | the target r, between student (t = 0) and teacher (t = 1) |
# | todi   | sum s p log(p/q) + (1-s) q log(q/p)         | s = p / (p + q) for each token |
# | akl    | w KL(p, q) + (1-w) KL(q, p)                 | w, the share of |p - q| in the teacher's top half |
#
# TAID: Shing et al. (2025); its t is a setting that the curriculum moves, so there is no hidden state. ToDi: Jung et
# al. (2025). AKL: Wu et al. (2024).
#
# Reverse terms read the teacher's log-probs with the floor of `reverse_kl`.
#
# Legend: ... rows, V vocabulary.


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
    """AKL: forward KL weighted by the share of |p - q| on the teacher's top half, reverse KL by the rest."""

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
    """The share of sum |p - q| on the top tokens with half of the teacher's mass. [...]"""
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


# -- a second derivative of hand-written gradients raises, instead of being 0 ------------------------------


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        raise ConfigError(
            "the second derivative of this loss was asked for, and only the first is known",
            where="stillroom.losses",
            advice=[
                "for gradient penalties and Hessians make the logits and use torch's own losses on them",
                "drop create_graph=True",
            ],
        )


def only_once(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients unchanged; under create_graph, differentiating them raises."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(
        None if gradient is None else _NoSecondDerivative.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]
        for gradient in gradients
    )


# -- a divergence as a differentiable function of two tensors of logits ------------------------------------
#
# Legend: ... rows, V vocabulary.


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
