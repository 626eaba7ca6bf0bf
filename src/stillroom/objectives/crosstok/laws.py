"""The maths of objectives for two tokenizers, on plain tensors.

Legend: N positions, C positions of a chunk, S slots for spans, V vocabulary of the student, U of the teacher, M tokens
that both have. A surprisal is -log probability, in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.numerics import LOG_ZERO
from stillroom.types import SampledSignal, TopKSignal

FLOOR = 1e-6  # nats, added to both surprisals: a certain span has no finite divergence (tokenkit uses the same)


def taken_log_probs(targets: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """The law of a row's log-probability of its target."""

    def law(logits: Tensor, part: slice) -> Tensor:
        taken = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return taken - torch.logsumexp(logits, -1)

    return law


def told_log_probs(targets: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """The same law for a teacher: a row that is no distribution gives NaN, and has a gradient of 0."""

    def law(logits: Tensor, part: slice) -> Tensor:
        logits, is_bad = usable(logits)
        return torch.where(is_bad, torch.nan, taken_log_probs(targets)(logits, part))

    return law


def usable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A teacher's logits with 0 in rows that are no distribution and without infinities, and which rows these are."""
    is_bad = ~torch.isfinite(torch.logsumexp(logits.detach(), -1))
    return torch.where(is_bad[:, None], torch.zeros_like(logits), logits).clamp_min(LOG_ZERO), is_bad


def binarised_kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T * KL of (p, 1 - p) against (q, 1 - q), where p = exp(-teacher / T) and q = exp(-student / T) (Minixhofer 2025).

    `teacher` and `student` are surprisals of a span. 0 if and only if they are equal. At T = 1 it is the KL between
    "this span comes" and "another does"; for large T it tends to a log(a / b) - a + b of the surprisals a and b, whose
    gradient does not vanish for unlikely spans.
    """
    a, b = teacher + FLOOR, student + FLOOR
    rest_a, rest_b = -torch.expm1(-a / temperature), -torch.expm1(-b / temperature)
    return torch.exp(-a / temperature) * (b - a) + temperature * rest_a * torch.log(rest_a / rest_b)


def binarised_total_variation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """T * |p - q| of the same two probabilities."""
    a, b = teacher + FLOOR, student + FLOOR
    return temperature * torch.exp(-a / temperature) * torch.expm1((a - b) / temperature).abs()


@dataclass(frozen=True)
class SharedTokens:
    """Ids of the tokens that both vocabularies have, in the same order, and of those that only one has."""

    student: Tensor  # [M]
    teacher: Tensor  # [M]
    student_rest: Tensor
    teacher_rest: Tensor

    @staticmethod
    def of(student: Tensor, teacher: Tensor, num_student: int, num_teacher: int) -> SharedTokens:
        return SharedTokens(student, teacher, _others(student, num_student), _others(teacher, num_teacher))

    def kl(self, teacher_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """KL(p || q) over the shared tokens and one bucket for all others [C], and where the teacher is unusable.

        A coarsening of both distributions, so it is at most the KL of any two that agree with them.
        """
        teacher_logits, is_bad = usable(teacher_logits)
        log_p, tail_p = _coarse(teacher_logits, self.teacher, self.teacher_rest)
        log_q, tail_q = _coarse(logits, self.student, self.student_rest)
        p = log_p.exp()
        value = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        if tail_p is not None and tail_q is not None:
            mass = tail_p.exp()
            value = value + torch.where(mass > 0, mass * (tail_p - tail_q), 0.0)
        return torch.where(is_bad, torch.zeros_like(value), value), is_bad

    def kl_of_few(self, few: TopKSignal | SampledSignal, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The same from a few of the teacher's tokens. One that the student lacks stands for all of those."""
        log_q, tail_q = _coarse(logits, self.student, self.student_rest)
        if tail_q is not None:
            log_q = torch.cat([log_q, tail_q[:, None]], 1)
        return few_kl(few, log_q, *self._places(few.ids))

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where the teacher's tokens stand among the shared ones, the others after them, and which have no place.

        None is without a place but where the student has nothing that stands for the others.
        """
        known, order = self.teacher.sort()
        found = torch.searchsorted(known, ids.contiguous()).clamp_max(len(known) - 1)
        is_known = known[found] == ids
        has_bucket = len(self.student_rest) > 0
        places = torch.where(is_known, order[found], len(known) if has_bucket else 0)
        return places, torch.zeros_like(is_known) if has_bucket else ~is_known


def few_kl(
    few: TopKSignal | SampledSignal, log_q: Tensor, places: Tensor, is_lost: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """KL(p || q) over coarse tokens from a few of the teacher's: from draws an unbiased estimate, from top-k a bound.

    `log_q` are the student's, `places` say where the ids of `few` stand among them; those that `is_lost` count for
    nothing. What depends on the student is linear in the teacher's probabilities, so draws serve; the entropy is that
    of the coarse distribution.
    """
    is_lost = torch.zeros_like(places, dtype=torch.bool) if is_lost is None else is_lost
    taken = log_q.gather(1, places)
    if isinstance(few, SampledSignal):
        is_bad = ~torch.isfinite(few.weights.sum(-1) + few.entropy)
        weights = torch.where(is_bad[:, None] | is_lost, 0.0, few.weights).to(log_q.dtype)
        value = -(weights * taken).sum(-1) - torch.where(is_bad, 0.0, few.entropy)
    else:
        log_p = torch.cat([few.log_probs, few.tail_log_mass[:, None]], 1).to(log_q.dtype)
        is_bad = ~torch.isfinite(torch.logsumexp(log_p, -1))
        is_nothing = is_bad[:, None] | torch.nn.functional.pad(is_lost, (0, 1))
        log_p = torch.where(is_nothing, LOG_ZERO, log_p).clamp_min(LOG_ZERO)
        others = torch.logsumexp(log_q.scatter(1, places, LOG_ZERO), -1)
        p = log_p.exp()
        value = torch.where(p > 0, p * (log_p - torch.cat([taken, others[:, None]], 1)), 0.0).sum(-1)
    return torch.where(is_bad, torch.zeros_like(value), value), is_bad


def sorted_distance(teacher_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over ranks of |p - q| of sorted probabilities, the shorter padded with 0 (Boizard et al. 2024). [C] twice.

    Which tokens the probabilities belong to is not looked at.
    """
    teacher_logits, is_bad = usable(teacher_logits)
    p, q = (torch.softmax(one, -1).sort(-1, descending=True).values for one in (teacher_logits, logits))
    width = max(p.shape[1], q.shape[1])
    p, q = (torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in (p, q))
    value = (p - q).abs().sum(-1)
    return torch.where(is_bad, torch.zeros_like(value), value), is_bad


def _coarse(logits: Tensor, kept: Tensor, rest: Tensor) -> tuple[Tensor, Tensor | None]:
    norm = torch.logsumexp(logits, -1, keepdim=True)
    tail = torch.logsumexp(logits.index_select(1, rest), -1) - norm[:, 0] if len(rest) else None
    return logits.index_select(1, kept) - norm, tail


def _others(kept: Tensor, size: int) -> Tensor:
    is_other = torch.ones(size, dtype=torch.bool, device=kept.device)
    return is_other.index_fill(0, kept, False).nonzero().squeeze(-1)
