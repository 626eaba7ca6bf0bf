"""The mix: the weighted sum of the objectives, the same in training and evaluation.

loss = sum over terms of weight * total / count. The counts are those of the whole window (all micro-batches, all
processes), known before any forward. So eight micro-batches give the gradient of one, whatever their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stillroom.config.objectives import ObjectivesConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, BothNeeds, DenseSignal, Lesson, PairedSignal, Score, Signal, StudentView, Term
from stillroom.losses.head.kernel import KernelName
from stillroom.losses.head.rows import SignalKind
from stillroom.losses.kd import KdAndCe
from stillroom.losses.objective import Objective, Planned, union

# -- clamps ----------------------------------------------------------------------------------------
# Optional clamps on logits and loss, as older guides recommend. Off by default, because both do harm.
#
# A clamp of +-c on the logits bounds the largest probability over V tokens by 1 / (1 + (V - 1) e^-2c), so every
# token's cross-entropy has a floor. A clamp on the loss makes its gradient zero above the bound. Raise if the floor
# is above the bound: every gradient would be zero.


def perplexity_floor(logit_clamp: float, vocab_size: int) -> float:
    """The lowest perplexity that logits within +-logit_clamp can express over a vocabulary."""
    return 1.0 + (vocab_size - 1) * math.exp(-2.0 * logit_clamp)


@dataclass(frozen=True)
class Clamps:
    """Bounds on logits and loss; 0 means none."""

    logits: float = 0.0
    loss: float = 0.0

    def check(self, vocab_size: int) -> list[str]:
        """Notes for the log. Raise if every gradient would be zero."""
        notes = []
        if self.logits:
            floor = perplexity_floor(self.logits, vocab_size)
            if self.loss and math.log(floor) >= self.loss:
                raise ConfigError(
                    f"logits within +-{self.logits:g} cannot bring the loss of {vocab_size:,} tokens below "
                    f"{math.log(floor):.3g}, and the loss is cut at {self.loss:g}: every gradient would be zero",
                    where="guard.logit_clamp, guard.loss_clamp",
                    advice=[
                        "--set guard.logit_clamp=0 --set guard.loss_clamp=0",
                        "FP16 does not need either: `presets`",
                    ],
                )
            notes.append(
                f"logits are clamped to +-{self.logits:g}: over {vocab_size:,} tokens no perplexity below "
                f"{floor:.4g} can be reached, and clamped logits have no gradient"
            )
        if self.loss:
            notes.append(f"the loss is clamped at {self.loss:g}: batches above it have no gradient")
        return notes

    def on_view(self, view: StudentView) -> StudentView:
        return replace(view, head=replace(view.head, clamp=self.logits)) if self.logits else view

    def on_signal(self, signal: Signal | None) -> Signal | None:
        if not self.logits or not isinstance(signal, DenseSignal | PairedSignal):
            return signal
        return replace(signal, head=replace(signal.head, clamp=self.logits))

    def on_loss(self, loss: Tensor, share: float) -> tuple[Tensor, Tensor | None]:
        """The clamped loss of a micro-batch that is `share` of its window, and whether it was cut (0 or 1)."""
        if not self.loss:
            return loss, None
        bound = self.loss * share
        return loss.clamp(max=bound), (loss.detach() > bound).float()


class Mix:
    """The objectives of a run: `kd` and `ce`, and those planned beside them."""

    def __init__(
        self,
        config: ObjectivesConfig,
        *,
        kernel: KernelName | None = None,
        clamps: Clamps | None = None,
        planned: Planned | None = None,
    ) -> None:
        self.planned = planned or Planned()
        self.objectives: tuple[Objective, ...] = (KdAndCe(config, kernel), *self.planned.objectives)
        self._clamps = clamps or Clamps()
        _check_terms(self.objectives)

    @property
    def projectors(self) -> nn.ModuleDict:
        """Networks trained beside the student; not part of it."""
        return self.planned.projectors

    def check_signal(self, kind: SignalKind, stored_temperature: float = 1.0) -> None:
        """Raise for settings that a cached signal of this kind cannot serve."""
        for objective in self.objectives:
            objective.check_signal(kind, stored_temperature)

    def notes(self, device_type: str) -> tuple[str, ...]:
        """Notes of the objectives for the log, written when the run starts."""
        return (*(note for one in self.objectives for note in one.notes(device_type)), *self.planned.notes)

    def needs(self, lesson: Lesson) -> BothNeeds:
        """What the terms of this lesson ask of each model beyond its last hidden states."""
        return union(objective.needs(lesson) for objective in self.objectives)

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Targets of each term in a window, known before any forward."""
        return {term: count for one in self.objectives for term, count in one.counts(batches).items()}

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, counts: Mapping[str, float]
    ) -> Score:
        """The loss of one micro-batch, already divided by the counts of the window, and its terms."""
        view, signal = self._clamps.on_view(view), self._clamps.on_signal(signal)
        scores = [
            objective.score(view, signal, batch, lesson, _shares(objective, lesson, counts))
            for objective in self.objectives
            if objective.is_scored(lesson, signal)
        ]
        first, *others = scores
        loss, terms, counters = first.loss, dict(first.terms), dict(first.counters)
        for score in others:
            loss = loss + score.loss
            terms |= score.terms
            _add_counters(counters, score.counters)
        self._check_answer(terms)
        # The clamp is per target, whatever a term counts.
        loss, was_cut = self._clamps.on_loss(loss, batch.num_scored / max(1.0, counts["ce"]))
        if was_cut is not None:
            counters["clamped_losses"] = was_cut
        return Score(loss, terms, counters)

    def _check_answer(self, terms: Mapping[str, Term]) -> None:
        known = {term for objective in self.objectives for term in objective.terms}
        if strange := sorted(set(terms) - known):
            raise ConfigError(
                f"an objective scored {', '.join(strange)}, which none announces",
                where="objectives",
                advice=["list every name in the objective's `terms`"],
            )


def _check_terms(objectives: Sequence[Objective]) -> None:
    """Raise unless each term belongs to one objective, which counts it."""
    announced = [term for objective in objectives for term in objective.terms]
    twice = {term for term in announced if announced.count(term) > 1}
    uncounted = {term for objective in objectives for term in objective.terms if term not in objective.counts([])}
    if twice or uncounted:
        raise ConfigError(
            "two objectives have a term of the same name, or one does not count its own: "
            + ", ".join(sorted(twice | uncounted)),
            where="objectives",
            advice=["name a term for its objective, and give it a count in `counts`"],
        )


def _shares(objective: Objective, lesson: Lesson, counts: Mapping[str, float]) -> dict[str, float]:
    """The weight of one target of each term in the window. The only division by a count."""
    return {term: lesson.weight(term) / max(1.0, counts[term]) for term in objective.terms}


def _add_counters(counters: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add the counters of another objective. Rows with a bad teacher are the same for all: take the maximum."""
    for name, count in more.items():
        if name not in counters:
            counters[name] = count
        elif name == "bad_teacher_rows":
            counters[name] = torch.maximum(counters[name], count)
        else:
            counters[name] = counters[name] + count
