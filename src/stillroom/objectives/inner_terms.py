"""The terms that look inside both models: what each asks for, what it counts, and the matrices it trains.

A term whose weight is 0 in a lesson asks for nothing and is not computed. Distances are sums over positions (or
rows), so the window's counts divide them like any other term's.

    feature      hidden states of a few chosen layers        counted in scored positions
    layerwise    hidden states layer by layer                counted in scored positions
    attention    attention maps of chosen layers             counted in scored positions
    contrastive  each row's mean state against other rows'   counted in rows with a scored position
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from stillroom.config.objectives import ObjectivesConfig
from stillroom.errors import ConfigError
from stillroom.objectives import inner
from stillroom.objectives.inner import Distances
from stillroom.objectives.layer_map import Pairs, resolve_pairs
from stillroom.types import IGNORED, Batch, BothNeeds, Lesson, Needs, Signal, StudentView, Term


@dataclass(frozen=True)
class Inside:
    """What a term must know of a model to be planned."""

    num_layers: int
    width: int


@dataclass(frozen=True)
class InnerScore:
    """One term of a micro-batch: a sum that carries the gradient, how many are in it, and what could not be used."""

    total: Tensor
    count: Tensor
    num_bad: Tensor
    counters: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def term(self) -> Term:
        return Term(self.total.detach(), self.count)


class InnerTerm(Protocol):
    """A comparison of paired layers: what it asks for, what it counts, what it makes of the answers."""

    @property
    def pairs(self) -> Pairs: ...
    @property
    def needs(self) -> BothNeeds: ...
    def count(self, batches: Iterable[Batch]) -> int: ...
    def score(self, view: StudentView, signal: Signal) -> InnerScore: ...


def _num_scored(batches: Iterable[Batch]) -> int:
    return sum(batch.num_scored for batch in batches)


def _taps(view: StudentView, signal: Signal, kind: str, pair: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Student's tap, teacher's tap and the scored places. The teacher is the goal: no gradient goes there."""
    student, teacher = view.taps[f"{kind}.{pair[0]}"], signal.taps[f"{kind}.{pair[1]}"].detach()
    axes = slice(0, 2) if kind == "hidden" else slice(2, 4)
    if view.positions is None or student.shape[0] != teacher.shape[0] or student.shape[axes] != teacher.shape[axes]:
        raise ConfigError(
            f"student and teacher answer on different positions: {list(student.shape)} and {list(teacher.shape)}",
            where="objectives",
            advice=["inner objectives need one tokenizer for both", "set the weights of the inner objectives to 0"],
        )
    return student, teacher, view.positions


def _mean_of_pairs(found: Sequence[Distances]) -> InnerScore:
    """Mean over pairs, sum over places; a place that the teacher spoiled in any pair is left out and counted."""
    values = torch.stack([distances.values for distances in found]).mean(0)
    is_bad = torch.stack([distances.is_bad for distances in found]).any(0)
    total = torch.where(is_bad, torch.zeros_like(values), values).sum()
    return InnerScore(total, (~is_bad).sum().to(values.dtype), is_bad.sum())


class StateTerm:
    """Hidden states of paired layers at the scored positions."""

    def __init__(self, pairs: Pairs, projectors: Mapping[tuple[int, int], nn.Module], kind: str) -> None:
        self.pairs = pairs
        self._projectors = projectors
        self._distance: Callable[[Tensor, Tensor], Distances] = (
            inner.cosine_distance if kind == "cosine" else inner.relative_error
        )
        self.needs = BothNeeds(*(Needs(hidden_layers=frozenset(side)) for side in zip(*pairs, strict=True)))

    def count(self, batches: Iterable[Batch]) -> int:
        return _num_scored(batches)

    def score(self, view: StudentView, signal: Signal) -> InnerScore:
        return _mean_of_pairs([self._compare(view, signal, pair) for pair in self.pairs])

    def _compare(self, view: StudentView, signal: Signal, pair: tuple[int, int]) -> Distances:
        student, teacher, positions = _taps(view, signal, "hidden", pair)
        return self._distance(
            _project(self._projectors, pair, inner.at_positions(student, positions)),
            inner.at_positions(teacher, positions),
        )


class AttentionTerm:
    """Attention maps of paired layers at the scored queries."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self.needs = BothNeeds(*(Needs(attention_layers=frozenset(side)) for side in zip(*pairs, strict=True)))

    def count(self, batches: Iterable[Batch]) -> int:
        return _num_scored(batches)

    def score(self, view: StudentView, signal: Signal) -> InnerScore:
        return _mean_of_pairs(
            [inner.attention_distance(*_taps(view, signal, "attention", pair)) for pair in self.pairs]
        )


class ContrastiveTerm:
    """Each row's mean state against the means of the other rows of its micro-batch."""

    def __init__(self, pairs: Pairs, projectors: Mapping[tuple[int, int], nn.Module], temperature: float) -> None:
        self.pairs = pairs
        self._projectors = projectors
        self._temperature = temperature
        self.needs = BothNeeds(*(Needs(hidden_layers=frozenset(side)) for side in zip(*pairs, strict=True)))

    def count(self, batches: Iterable[Batch]) -> int:
        return sum(int((batch.targets.cpu().numpy() != IGNORED).any(axis=1).sum()) for batch in batches)

    def score(self, view: StudentView, signal: Signal) -> InnerScore:
        found = []
        for pair in self.pairs:
            student, teacher, positions = _taps(view, signal, "hidden", pair)
            student, is_row = inner.pooled(student, positions)
            teacher, _same = inner.pooled(teacher, positions)
            student = _project(self._projectors, pair, student)
            found.append(inner.info_nce(student, teacher, is_row, self._temperature))
        score = _mean_of_pairs(found)
        num_rows = is_row.sum() - score.num_bad
        counters = {"rows_without_contrast": torch.where(num_rows == 1, num_rows, torch.zeros_like(num_rows))}
        return InnerScore(score.total, num_rows.to(score.total.dtype), score.num_bad, counters)


def _project(projectors: Mapping[tuple[int, int], nn.Module], pair: tuple[int, int], states: Tensor) -> Tensor:
    """States in the teacher's width. No projector means that the widths are equal and nothing stands between."""
    if pair not in projectors:
        return states
    projected: Tensor = projectors[pair](states)
    return projected


class Inner:
    """The inner terms of a run under their names, and the projectors they train.

    Projectors belong to training, not to the student: they are in checkpoints, and no exported model has them.
    """

    def __init__(self, terms: Mapping[str, InnerTerm], projectors: nn.ModuleDict, notes: tuple[str, ...] = ()) -> None:
        self.terms = terms
        self.projectors = projectors
        self.notes = notes  # what a person should know about these terms, said when the run starts

    def active(self, lesson: Lesson) -> dict[str, InnerTerm]:
        return {name: term for name, term in self.terms.items() if lesson.weight(name) != 0.0}

    def needs(self, lesson: Lesson) -> BothNeeds:
        asked = [term.needs for term in self.active(lesson).values()]
        return BothNeeds(_union([both.student for both in asked]), _union([both.teacher for both in asked]))

    @property
    def watched(self) -> BothNeeds:
        """Everything that any lesson may ask for."""
        asked = [term.needs for term in self.terms.values()]
        return BothNeeds(_union([both.student for both in asked]), _union([both.teacher for both in asked]))

    def scores(self, view: StudentView, signal: Signal | None, lesson: Lesson) -> dict[str, InnerScore]:
        """The terms of this lesson; none of them where the teacher does not answer."""
        if signal is None:
            return {}
        return {name: term.score(view, signal) for name, term in self.active(lesson).items()}

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        return {name: term.count(batches) for name, term in self.terms.items()}


def _union(needs: Sequence[Needs]) -> Needs:
    return Needs(
        frozenset(layer for need in needs for layer in need.hidden_layers),
        frozenset(layer for need in needs for layer in need.attention_layers),
    )


def plan_inner(
    config: ObjectivesConfig, student: Inside, teacher: Inside, *, seed: int = 0, kept: Sequence[int] | None = None
) -> Inner:
    """The terms that the configuration ever uses. Layers that do not exist are refused here, before any training.

    Projectors are drawn from the seed alone: semi-orthogonal, and scaled so that the size of an entry is kept
    whatever the two widths are.
    """
    used = config.inner_weights
    projectors = nn.ModuleDict()
    terms: dict[str, InnerTerm] = {}

    def pairs_of(name: str) -> Pairs:
        where = f"objectives.{name}.layers"
        return resolve_pairs(
            getattr(config, name).layers, student.num_layers, teacher.num_layers, where=where, kept=kept
        )

    def made(name: str, pairs: Pairs) -> dict[tuple[int, int], nn.Module]:
        if student.width == teacher.width and getattr(config, name).projector == "auto":
            return {}
        found: dict[tuple[int, int], nn.Module] = {}
        for pair in pairs:
            found[pair] = projectors[f"{name}_{pair[0]}_{pair[1]}"] = _projector(student.width, teacher.width)
        return found

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in ("feature", "layerwise"):
            if name in used:
                pairs = pairs_of(name)
                terms[name] = StateTerm(pairs, made(name, pairs), getattr(config, name).kind)
        if "attention" in used:
            terms["attention"] = AttentionTerm(pairs_of("attention")[-config.attention.attention_layers :])
        if "contrastive" in used:
            pairs = pairs_of("contrastive")
            terms["contrastive"] = ContrastiveTerm(pairs, made("contrastive", pairs), config.contrastive.temperature)
    return Inner(terms, projectors)


def _projector(student_width: int, teacher_width: int) -> nn.Linear:
    linear = nn.Linear(student_width, teacher_width, bias=False)
    nn.init.orthogonal_(linear.weight, gain=max(1.0, teacher_width / student_width) ** 0.5)
    return linear
