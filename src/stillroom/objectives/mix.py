"""The mix: the weighted sum of the objectives, the same in training and evaluation.

loss = sum over terms of weight * total / count. The counts are those of the whole window (all micro-batches, all
processes), known before any forward. So eight micro-batches give the gradient of one, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stillroom.config.objectives import ObjectivesConfig
from stillroom.errors import ConfigError
from stillroom.objectives.answers import KdAndCe
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.head.kernel import KernelName
from stillroom.objectives.head.sparse import SignalKind
from stillroom.objectives.objective import Objective, Planned, union
from stillroom.types import Batch, BothNeeds, Lesson, Score, Signal, StudentView, Term


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
