"""Objectives that compare two models on spans: groups of tokens on each side that cover the same bytes.

    alm          likelihoods of spans                                 counted in spans
    exact_match  distributions over the tokens that both have         counted in spans of one token on each side
    uld          sorted probabilities where spans begin               counted in spans
    span_hidden  mean hidden states of spans                          counted in spans

A span whose teacher is not finite is left out and counted in `bad_teacher_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stillroom.config.extensions import Recipe
from stillroom.config.objectives import AlmConfig, ExactMatchConfig, SpanHiddenConfig, UldConfig
from stillroom.errors import ConfigError
from stillroom.numerics import work_dtype
from stillroom.objectives.crosstok import laws
from stillroom.objectives.crosstok.head_values import head_values
from stillroom.objectives.crosstok.slots import SpanSlots, num_exact, num_spans
from stillroom.objectives.head.chunks import choose_chunk
from stillroom.objectives.head.kernel_plain import finish
from stillroom.objectives.head.products import products_of
from stillroom.objectives.head.sparse import SignalKind, select_rows
from stillroom.objectives.inner import distances
from stillroom.objectives.inner.terms import InnerObjective
from stillroom.objectives.objective import Objective, Plan, register
from stillroom.types import (
    Batch,
    HeadWeights,
    Lesson,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Score,
    Signal,
    StudentView,
    TopKSignal,
)

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
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        assert isinstance(self.section, AlmConfig) and batch.other is not None
        slots = SpanSlots.of(batch)
        theirs, is_bad = teacher_surprisals(paired(signal), batch.other, slots, self._chunk_tokens)
        law = laws.taken_log_probs(batch.scored_targets)
        ours = slots.sum_student(-head_values(view.hidden, view.head, law, self._chunk_tokens))
        is_used = slots.is_span & ~is_bad
        kl = self.section.divergence == "kl"
        divergence = laws.binarised_kl if kl else laws.binarised_total_variation
        # Slots without a span get equal surprisals before the division, so that their gradient is 0 and not NaN.
        ours, theirs = torch.where(is_used, ours, 1.0), torch.where(is_used, theirs, 1.0).to(ours.dtype)
        values = divergence(theirs, ours, self.setting(lesson, "temperature"))
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
        law = laws.told_log_probs(other.scored_targets)
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
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
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
            raise ConfigError(
                f"objectives.exact_match cannot compare these vocabularies: {problem or 'their tokens are not known'}",
                where="objectives.exact_match.weight",
                advice=["set objectives.exact_match.weight = 0; objectives.alm compares any two tokenizers"],
            )
        self._matched = matched

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        return {self.name: num_exact(batches)}

    def positions(self, slots: SpanSlots) -> tuple[Tensor, Tensor]:
        return slots.first_positions(slots.is_exact)

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        return self._shared(device, num_student, num_teacher).kl

    def _shared(self, device: torch.device, num_student: int, num_teacher: int) -> laws.SharedTokens:
        ids = [torch.tensor(one, device=device) for one in (self._matched.student_ids, self._matched.teacher_ids)]
        return laws.SharedTokens.of(ids[0], ids[1], num_student, num_teacher)

    def few_law(self, device: torch.device, num_student: int) -> FewLaw:
        return self._shared(device, num_student, 1 + max(self._matched.teacher_ids)).kl_of_few


class SortedDistance(BothLogits):
    """Universal logit distillation (Boizard et al. 2024), where spans begin."""

    def law(self, device: torch.device, num_student: int, num_teacher: int) -> PairLaw:
        return laws.sorted_distance


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
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        answer, slots = whole(signal, self.name), SpanSlots.of(batch)
        assert batch.other is not None
        chosen = slots.is_span.nonzero().squeeze(-1)
        sizes = [
            slots.sum_student(torch.ones_like(slots.student)).index_select(0, chosen),
            slots.sum_teacher(torch.ones_like(slots.teacher)).index_select(0, chosen),
        ]
        of_pairs, is_bad = [], torch.zeros_like(chosen, dtype=torch.bool)
        for pair in self.pairs:
            student = distances.at_positions(view.taps[f"hidden.{pair[0]}"], batch.positions)
            teacher = distances.at_positions(answer.taps[f"hidden.{pair[1]}"], batch.other.positions)
            # Taken out before the sums: behind them the gradient of a trained teacher would be NaN.
            is_lost = ~torch.isfinite(teacher.detach()).all(-1)
            is_bad = is_bad | (slots.sum_teacher(is_lost.long()).index_select(0, chosen) > 0)
            teacher = torch.where(is_lost[:, None], torch.zeros_like(teacher), teacher)
            means = slots.sum_student(student), slots.sum_teacher(teacher)
            ours, theirs = (one.index_select(0, chosen) / size[:, None] for one, size in zip(means, sizes, strict=True))
            of_pairs.append(self._distance(self._project(pair, ours), theirs))
        values = torch.stack([one.values for one in of_pairs]).mean(0)
        is_bad = is_bad | torch.stack([one.is_bad for one in of_pairs]).any(0)
        total = torch.where(is_bad, torch.zeros_like(values), values).sum()
        count = (~is_bad).sum().to(values.dtype)
        return self.scored(total, count, shares[self.name], {"bad_teacher_rows": is_bad.sum()})


register("alm", Recipe(AlmConfig, SpanLikelihoods))
register("exact_match", Recipe(ExactMatchConfig, ExactMatch))
register("uld", Recipe(UldConfig, SortedDistance))
register("span_hidden", Recipe(SpanHiddenConfig, SpanStates))
