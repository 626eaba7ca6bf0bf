"""Objectives that compare two models on spans: groups of tokens on each side that cover the same bytes.

    alm          likelihoods of spans                                 counted in spans
    exact_match  distributions over the tokens that both have         counted in spans of one token on each side
    uld          sorted probabilities where spans begin               counted in spans
    span_hidden  mean hidden states of spans                          counted in spans

A span whose teacher is not finite is left out and counted in `bad_teacher_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.config.schema import AlmConfig, ExactMatchConfig, PrefixMatchConfig, Recipe, SpanHiddenConfig, UldConfig
from stillroom.core.errors import ConfigError
from stillroom.core.numerics import LOG_ZERO, work_dtype
from stillroom.core.types import (
    Batch,
    HeadWeights,
    LossWeights,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Score,
    Signal,
    StudentView,
    TopKSignal,
)
from stillroom.losses import hidden as distances
from stillroom.losses.divergences import only_once
from stillroom.losses.head.products import Wanted, products_of
from stillroom.losses.head.rows import SignalKind, choose_chunk, finish, parts, select_rows
from stillroom.losses.hidden import InnerObjective
from stillroom.losses.mix import Objective, Plan, Shares, register

# -- a number for each position from its logits, a chunk of positions at a time ----------------------------
#
# The forward keeps the values [N] and drops the logits of each chunk; the backward makes them again. So no [N, V]
# tensor outlives its chunk, for any law of a row. Values and gradients are FP32 or better; a gradient is cast to its
# input's dtype after it was multiplied by the upstream one, which carries the loss scale.
#
# Legend: N positions, C positions of a chunk, V real vocabulary, D width.


RowLaw = Callable[[Tensor, slice], Tensor]  # logits [C, V] of these positions -> values [C]


@dataclass(frozen=True)
class _Task:
    head: HeadWeights
    law: RowLaw
    chunk_tokens: int


def head_values(hidden: Tensor, head: HeadWeights, law: RowLaw, chunk_tokens: int = 0) -> Tensor:
    """`law` at every position of `hidden` [N, D]: [N], differentiable in hidden states, weight and bias."""
    task = _Task(head, law, choose_chunk(chunk_tokens, hidden, head.num_real))
    values: Tensor = _HeadValues.apply(hidden, head.weight, head.bias, task)  # type: ignore[no-untyped-call]
    return values


class _HeadValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.task = task
        head = replace(task.head, weight=weight, bias=bias)
        dtype = work_dtype(hidden, weight)
        values = torch.zeros(hidden.shape[0], dtype=dtype, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            products = products_of(hidden, head, dtype, task.chunk_tokens)
            for part in parts(len(hidden), task.chunk_tokens):
                values[part] = task.law(finish(products.logits(part)), part)
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        task: _Task = ctx.task
        head = replace(task.head, weight=weight, bias=bias)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            wanted = Wanted(*ctx.needs_input_grad[:3])
            products = products_of(hidden, head, work_dtype(hidden, weight), task.chunk_tokens, wanted)
            for part in parts(len(hidden), task.chunk_tokens):
                logits = products.logits(part)
                raw = logits.raw.clone().requires_grad_()
                with torch.enable_grad():
                    values = task.law(finish(replace(logits, raw=raw)), part)
                (gradient,) = torch.autograd.grad(values, raw, upstream[0][part].to(values.dtype))
                logits.raw.copy_(gradient)
                products.pull_back(part)
            found = zip(products.gradients(), (hidden, weight, bias), strict=True)
            results = [None if gradient is None else gradient.to(given.dtype) for gradient, given in found]
        return (*only_once(results), None)


# -- the maths, on plain tensors ---------------------------------------------------------------------------
#
# Legend: N positions, C positions of a chunk, S slots for spans, V vocabulary of the student, U of the teacher, M
# tokens that both have. A surprisal is -log probability, in nats.


FLOOR = 1e-6  # nats, added to both surprisals: a certain span has no finite divergence (tokenkit uses the same)


def taken_log_probs(targets: Tensor) -> RowLaw:
    """The law of a row's log-probability of its target."""

    def law(logits: Tensor, part: slice) -> Tensor:
        taken = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        return taken - torch.logsumexp(logits, -1)

    return law


def told_log_probs(targets: Tensor) -> RowLaw:
    """The same law for a teacher: a row that is not a distribution gives NaN, and has a gradient of 0."""

    def law(logits: Tensor, part: slice) -> Tensor:
        logits, is_bad = usable(logits)
        return torch.where(is_bad, torch.nan, taken_log_probs(targets)(logits, part))

    return law


def usable(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A teacher's logits with 0 in rows that are not distributions and without infinities, and which rows these are."""
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


# -- the spans of a batch as slots -------------------------------------------------------------------------
#
# There is one slot for each position of the student's rows, as no row has more spans than that. So sums
# over spans have a shape that is known without asking the device, and both sides find a span under one number.
#
# Legend: B rows, L positions of the student's rows, N and M scored positions of student and teacher, S = B * L slots.


@dataclass(frozen=True)
class SpanSlots:
    """The slot of each scored position of both sides; positions in no span have the slot S."""

    num_slots: int
    student: Tensor  # [N]
    teacher: Tensor  # [M]
    is_exact: Tensor  # [S], bool

    @staticmethod
    def of(batch: Batch) -> SpanSlots:
        other = batch.other
        if other is None or batch.spans is None or other.spans is None or batch.is_exact is None:
            raise ConfigError(
                "a batch without the teacher's rows has no spans to compare",
                where="objectives",
                advice=["open the data with both tokenizers", "use objectives.kd for models with one tokenizer"],
            )
        num_slots = batch.input_ids.numel()
        width = batch.input_ids.shape[1]
        student, teacher = (_slots(one, width, num_slots) for one in (batch, other))
        exact = batch.is_exact.reshape(-1).index_select(0, batch.positions)
        flags = torch.zeros(num_slots + 1, dtype=torch.long, device=student.device)
        flags = flags.index_add(0, student, exact.long())[:-1]
        return SpanSlots(num_slots, student, teacher, flags > 0)

    def sum_student(self, values: Tensor) -> Tensor:
        """The sum of values [N, ...] over each span. [S, ...]"""
        return self._sum(self.student, values)

    def sum_teacher(self, values: Tensor) -> Tensor:
        return self._sum(self.teacher, values)

    def _sum(self, slots: Tensor, values: Tensor) -> Tensor:
        room = torch.zeros(self.num_slots + 1, *values.shape[1:], dtype=values.dtype, device=values.device)
        return room.index_add(0, slots, values)[:-1]

    @property
    def is_span(self) -> Tensor:
        """[S]"""
        return self.sum_student(torch.ones_like(self.student)) > 0

    def first_positions(self, is_wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For each (wanted) span, in order, the scored position of student and teacher that its first token is at."""
        found = []
        for slots in (self.student, self.teacher):
            is_first = slots != torch.cat([slots.new_full((1,), -1), slots[:-1]])
            is_first &= slots < self.num_slots
            if is_wanted is not None:
                is_first &= torch.cat([is_wanted, is_wanted.new_zeros(1)]).index_select(0, slots)
            found.append(is_first.nonzero().squeeze(-1))
        return found[0], found[1]


def num_spans(batches: Iterable[Batch]) -> int:
    """Spans of several batches: a span is a run of positions with one number."""
    return sum(int((_is_first(batch)).sum()) for batch in batches if batch.spans is not None)


def num_exact(batches: Iterable[Batch]) -> int:
    return sum(int((_scored(batch) & batch.is_exact).sum()) for batch in batches if batch.is_exact is not None)


def _slots(batch: Batch, width: int, num_slots: int) -> Tensor:
    assert batch.spans is not None
    numbers = batch.spans.reshape(-1).index_select(0, batch.positions)
    slots = batch.positions // batch.input_ids.shape[1] * width + numbers
    return torch.where(numbers >= 0, slots, num_slots)


def _scored(batch: Batch) -> Tensor:
    assert batch.spans is not None
    is_scored = torch.zeros_like(batch.spans, dtype=torch.bool).reshape(-1)
    return is_scored.index_fill(0, batch.positions, True).view_as(batch.spans) & (batch.spans >= 0)


def _is_first(batch: Batch) -> Tensor:
    assert batch.spans is not None
    before = torch.nn.functional.pad(batch.spans[:, :-1], (1, 0), value=-1)
    return _scored(batch) & (batch.spans != before)


# -- the objectives ----------------------------------------------------------------------------------------


FewLaw = Callable[[TopKSignal | SampledSignal, Tensor], tuple[Tensor, Tensor]]  # the same, of a few tokens' answers
PairLaw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # logits of teacher and student -> values, is unusable


def paired(signal: Signal | None) -> PairedSignal | PairedTokens:
    """Raise unless the teacher answered on its own tokens."""
    if not isinstance(signal, PairedSignal | PairedTokens):
        raise ConfigError(
            f"objectives on spans need a teacher that reads its own tokens, and its answer is {type(signal).__name__}",
            where="objectives",
            advice=["use objectives.kd for models with one tokenizer"],
        )
    return signal


def whole(signal: Signal | None, name: str) -> PairedSignal:
    """Raise unless the teacher's network answered: what is stored of an answer does not serve every objective."""
    answer = paired(signal)
    if isinstance(answer, PairedTokens):
        raise needs_live_teacher(name)
    return answer


def needs_live_teacher(name: str) -> ConfigError:
    return ConfigError(
        f"objectives.{name} needs the live teacher: a stored or sparse answer has the probabilities of a few tokens",
        where=f"objectives.{name}.weight",
        advice=[
            f"set objectives.{name}.weight = 0: stored answers serve objectives.alm, and prefix_match or exact_match",
            "leave teacher.cache and teacher.signal.kind out",
        ],
    )


class SpanObjective(Objective):
    """An objective on spans, with gradient to a teacher that is being trained."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.name, plan.section)
        self._chunk_tokens = plan.chunk_tokens

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        return {self.name: num_spans(batches)}

    def check_signal(self, kind: SignalKind, stored_temperature: float) -> None:
        raise ConfigError(
            f"objectives.{self.name} compares spans with a live teacher, and this one answers with a few tokens",
            where=f"objectives.{self.name}.weight",
            advice=["leave teacher.cache out", "set teacher.signal.kind = 'dense'"],
        )

    def _finished(self, values: Tensor, is_bad: Tensor, share: float) -> Score:
        """The sum of values of spans. Those that are bad are 0 already."""
        count = (~is_bad).sum().to(values.dtype)
        return self.scored(values.sum(), count, share, {"bad_teacher_rows": is_bad.sum()})


class SpanLikelihoods(SpanObjective):
    """Approximate likelihood matching (Minixhofer et al. 2025)."""

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        assert isinstance(self.section, AlmConfig) and batch.other is not None
        slots = SpanSlots.of(batch)
        theirs, is_bad = teacher_surprisals(paired(signal), batch.other, slots, self._chunk_tokens)
        law = taken_log_probs(batch.scored_targets)
        ours = slots.sum_student(-head_values(view.hidden, view.head, law, self._chunk_tokens))
        is_used = slots.is_span & ~is_bad
        kl = self.section.divergence == "kl"
        divergence = binarised_kl if kl else binarised_total_variation
        # Slots without a span get equal surprisals before the division, so that their gradient is 0 and not NaN.
        ours, theirs = torch.where(is_used, ours, 1.0), torch.where(is_used, theirs, 1.0).to(ours.dtype)
        values = divergence(theirs, ours, self.setting(loss_weights, "temperature"))
        values = torch.where(is_used, values, torch.zeros_like(values))
        count = is_used.sum().to(values.dtype)
        return self.scored(values.sum(), count, shares[self.name], {"bad_teacher_rows": is_bad.sum()})


def teacher_surprisals(
    signal: PairedSignal | PairedTokens, other: Batch, slots: SpanSlots, chunk_tokens: int = 0
) -> tuple[Tensor, Tensor]:
    """The teacher's surprisal of each span [S], and which spans it cannot tell."""
    if isinstance(signal, PairedTokens):
        log_probs = signal.target_log_probs
    else:
        law = told_log_probs(other.scored_targets)
        log_probs = head_values(signal.hidden, signal.head, law, chunk_tokens)
    is_bad = ~torch.isfinite(log_probs)
    surprisals = slots.sum_teacher(torch.where(is_bad, torch.zeros_like(log_probs), -log_probs))
    return surprisals, slots.sum_teacher(is_bad.long()) > 0


class BothLogits(SpanObjective):
    """A law of both models' logits where a span begins."""

    def positions(self, slots: SpanSlots) -> tuple[Tensor, Tensor]:
        return slots.first_positions()

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        """A function of teacher's and student's logits that gives values and which are unusable."""
        raise NotImplementedError

    def few_law(self, device: torch.device, num_student: int) -> FewLaw | None:
        """The same of a few of the teacher's tokens; None where they do not serve."""
        return None

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        answer = paired(signal)
        if isinstance(answer, PairedTokens):
            return self._score_few(view, answer.few, batch, shares[self.name])
        ours, theirs = self.positions(SpanSlots.of(batch))
        hidden, told = view.hidden.index_select(0, ours), answer.hidden.index_select(0, theirs)
        compare = self.law(hidden.device, view.head.num_real, answer.head.num_real)
        is_bad = torch.zeros(len(ours), dtype=torch.bool, device=hidden.device)
        chunk = choose_chunk(self._chunk_tokens, hidden, max(view.head.num_real, answer.head.num_real))
        teacher_logits = _logits_by_chunk(told, answer.head, work_dtype(hidden, view.head.weight), chunk)

        def law(logits: Tensor, part: slice) -> Tensor:
            value, is_bad[part] = compare(teacher_logits(part), logits)
            return value

        values = head_values(hidden, view.head, law, chunk)
        if told.requires_grad:
            # The same values once more as a function of the teacher, for their gradient alone.
            logits_of = _logits_by_chunk(hidden, view.head, work_dtype(told, answer.head.weight), chunk)
            mirrored = head_values(told, answer.head, lambda logits, part: compare(logits, logits_of(part))[0], chunk)
            values = values + (mirrored - mirrored.detach())
        return self._finished(values, is_bad, shares[self.name])

    def _score_few(
        self, view: StudentView, few: TopKSignal | SampledSignal | None, batch: Batch, share: float
    ) -> Score:
        ours, theirs = self.positions(SpanSlots.of(batch))
        hidden = view.hidden.index_select(0, ours)
        compare = self.few_law(hidden.device, view.head.num_real)
        if few is None or compare is None:
            raise needs_live_teacher(self.name)
        chosen = select_rows(few, theirs)
        is_bad = torch.zeros(len(ours), dtype=torch.bool, device=hidden.device)

        def law(logits: Tensor, part: slice) -> Tensor:
            value, is_bad[part] = compare(select_rows(chosen, part), logits)
            return value

        return self._finished(head_values(hidden, view.head, law, self._chunk_tokens), is_bad, share)


def _logits_by_chunk(
    hidden: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int
) -> Callable[[slice], Tensor]:
    """The logits of a chunk of positions, as constants."""
    bias = None if head.bias is None else head.bias.detach()
    head = replace(head, weight=head.weight.detach(), bias=bias)
    products = products_of(hidden.detach(), head, dtype, chunk_tokens)

    def logits(part: slice) -> Tensor:
        with torch.no_grad():
            return finish(products.logits(part))

    return logits


def _cannot_compare(name: str, problem: str) -> ConfigError:
    return ConfigError(
        f"objectives.{name} cannot compare these vocabularies: {problem or 'their tokens are not known'}",
        where=f"objectives.{name}.weight",
        advice=[f"set objectives.{name}.weight = 0; objectives.alm compares any two tokenizers"],
    )


class ExactMatch(BothLogits):
    """Forward KL over tokens of the same bytes, with all others as one, where a span is one token on each side."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        matched = plan.matched
        problem = "" if matched is None else matched.problem
        if matched is not None and not problem:
            if not len(matched.student_ids):
                problem = "no token of one stands for the bytes of a token of the other"
            elif matched.teacher_rest and not matched.student_rest:
                problem = (
                    "every token of the student is one of the teacher's, and nothing stands for the teacher's others"
                )
        if matched is None or problem:
            raise _cannot_compare(plan.name, problem)
        self._matched = matched

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        return {self.name: num_exact(batches)}

    def positions(self, slots: SpanSlots) -> tuple[Tensor, Tensor]:
        return slots.first_positions(slots.is_exact)

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        return self._shared(device, num_student, num_teacher).kl

    def _shared(self, device: torch.device, num_student: int, num_teacher: int) -> SharedTokens:
        ids = [torch.tensor(one, device=device) for one in (self._matched.student_ids, self._matched.teacher_ids)]
        return SharedTokens.of(ids[0], ids[1], num_student, num_teacher)

    def few_law(self, device: torch.device, num_student: int) -> FewLaw:
        return self._shared(device, num_student, 1 + max(self._matched.teacher_ids)).kl_of_few


class SortedDistance(BothLogits):
    """Universal logit distillation (Boizard et al. 2024), where spans begin."""

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        return sorted_distance


class SpanStates(InnerObjective):
    """Mean hidden states of spans, the student's through a projector where the widths differ."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.section, SpanHiddenConfig)
        is_cosine = plan.section.kind == "cosine"
        self._distance = distances.cosine_distance if is_cosine else distances.relative_error

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        return {self.name: num_spans(batches)}

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        answer, slots = whole(signal, self.name), SpanSlots.of(batch)
        assert batch.other is not None
        chosen = slots.is_span.nonzero().squeeze(-1)
        sizes = [
            slots.sum_student(torch.ones_like(slots.student)).index_select(0, chosen),
            slots.sum_teacher(torch.ones_like(slots.teacher)).index_select(0, chosen),
        ]
        of_pairs = []
        for pair in self.pairs:
            student = distances.at_positions(view.taps[f"hidden.{pair[0]}"], batch.positions)
            teacher = distances.at_positions(answer.taps[f"hidden.{pair[1]}"], batch.other.positions)
            # Taken out before the sums: behind them the gradient of a trained teacher would be NaN.
            is_lost = ~torch.isfinite(teacher.detach()).all(-1)
            is_bad = slots.sum_teacher(is_lost.long()).index_select(0, chosen) > 0
            teacher = torch.where(is_lost[:, None], torch.zeros_like(teacher), teacher)
            means = slots.sum_student(student), slots.sum_teacher(teacher)
            ours, theirs = (one.index_select(0, chosen) / size[:, None] for one, size in zip(means, sizes, strict=True))
            distance = self._distance(self._project(pair, ours), theirs)
            of_pairs.append(replace(distance, is_bad=distance.is_bad | is_bad))
        total, count, counters = distances.mean_of_pairs(of_pairs)
        return self.scored(total, count, shares[self.name], counters)


register("alm", Recipe(AlmConfig, SpanLikelihoods))
register("exact_match", Recipe(ExactMatchConfig, ExactMatch))
register("uld", Recipe(UldConfig, SortedDistance))
register("span_hidden", Recipe(SpanHiddenConfig, SpanStates))


# -- forward KL over groups of tokens that begin a text alike, wherever a span begins ----------------------
#
# `exact_match` compares tokens that both vocabularies have and calls all others one. But a teacher's " therefore" is
# no other: a student without that token writes " there" first. Here its mass counts where the student writes it
# (`data/two_tokenizers/align.py`), and every beginning of a span is compared, not only spans of one token on each side.
#
# Legend: C positions of a chunk, V tokens, G groups.


@dataclass(frozen=True)
class GroupSums:
    """The groups of one vocabulary: the first token of each, the other tokens, and the groups of those."""

    first: Tensor  # [G]
    others: Tensor
    of_others: Tensor

    @staticmethod
    def of(groups: Sequence[int], num_groups: int, size: int, device: torch.device) -> GroupSums:
        """`size` is that of the head. Its rows beyond the tokenizer's ids are not tokens: they join the last group."""
        numbers = torch.tensor([*groups[:size], *[num_groups - 1] * (size - len(groups))])
        order = torch.argsort(numbers, stable=True)
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), numbers[order].diff() > 0])
        others = order[~is_first].sort().values
        return GroupSums(order[is_first].to(device), others.to(device), numbers[others].to(device))

    def log_masses(self, logits: Tensor) -> Tensor:
        """The log of the probability of each group. [C, G]

        A group of one token stays in log space. One of several whose sum underflows counts its first token alone.
        """
        norm = torch.logsumexp(logits, -1, keepdim=True)
        first = logits.index_select(1, self.first) - norm
        if not len(self.others):
            return first
        others = torch.exp(logits.index_select(1, self.others) - norm)
        sums = first.exp().index_add(1, self.of_others, others)
        is_sum = torch.zeros_like(self.first, dtype=torch.bool).index_fill(0, self.of_others, True) & (sums > 0)
        return torch.where(is_sum, torch.where(is_sum, sums, 1.0).log(), first)


def group_kl(teacher_logits: Tensor, logits: Tensor, teacher: GroupSums, student: GroupSums) -> tuple[Tensor, Tensor]:
    """KL(p || q) over groups [C], and where the teacher is unusable. A coarsening, so at most the KL of the models."""
    teacher_logits, is_bad = usable(teacher_logits)
    log_p = teacher.log_masses(teacher_logits)
    p, log_q = log_p.exp(), student.log_masses(logits)
    value = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    return torch.where(is_bad, torch.zeros_like(value), value), is_bad


class PrefixMatch(BothLogits):
    """Forward KL over groups of tokens, where spans begin."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        matched = plan.matched
        if matched is None or matched.problem or not matched.num_groups:
            raise _cannot_compare(plan.name, matched.problem if matched is not None else "")
        self._matched = matched

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        matched = self._matched
        student = GroupSums.of(matched.student_groups, matched.num_groups, num_student, device)
        teacher = GroupSums.of(matched.teacher_groups, matched.num_groups, num_teacher, device)
        return lambda teacher_logits, logits: group_kl(teacher_logits, logits, teacher, student)

    def few_law(self, device: torch.device, num_student: int) -> FewLaw:
        matched = self._matched
        student = GroupSums.of(matched.student_groups, matched.num_groups, num_student, device)
        groups = torch.tensor([*matched.teacher_groups, matched.num_groups - 1], device=device)

        def law(few: TopKSignal | SampledSignal, logits: Tensor) -> tuple[Tensor, Tensor]:
            return few_kl(few, student.log_masses(logits), groups[few.ids.clamp_max(len(groups) - 1)])

        return law


register("prefix_match", Recipe(PrefixMatchConfig, PrefixMatch))
