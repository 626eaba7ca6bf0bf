"""Objectives on hidden states and attention maps, with the projectors they train.

A term of weight 0 needs nothing and is not computed. Distances are sums over positions (or rows), divided by the
window's counts like any other term.

    feature      hidden states of a few chosen layers        counted in scored positions
    layerwise    hidden states layer by layer                counted in scored positions
    attention    attention maps of chosen layers             counted in scored positions
    contrastive  each row's mean state against other rows'   counted in rows with a scored position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stillroom.config.extensions import Recipe
from stillroom.config.objectives import AttentionConfig, ContrastiveConfig, FeatureConfig, LayerMap, LayerwiseConfig
from stillroom.errors import ConfigError
from stillroom.objectives.inner import distances
from stillroom.objectives.inner.distances import Distances
from stillroom.objectives.inner.layer_map import Pairs, resolve_pairs
from stillroom.objectives.objective import Objective, Plan, register
from stillroom.types import IGNORED, Batch, BothNeeds, Lesson, Needs, Score, Signal, StudentView


def _taps(view: StudentView, signal: Signal, kind: str, pair: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Student's tap, teacher's tap (detached) and the scored positions."""
    student, teacher = view.taps[f"{kind}.{pair[0]}"], signal.taps[f"{kind}.{pair[1]}"].detach()
    axes = slice(0, 2) if kind == "hidden" else slice(2, 4)
    if view.positions is None or student.shape[0] != teacher.shape[0] or student.shape[axes] != teacher.shape[axes]:
        raise ConfigError(
            f"student and teacher answer on different positions: {list(student.shape)} and {list(teacher.shape)}",
            where="objectives",
            advice=["inner objectives need one tokenizer for both", "set the weights of the inner objectives to 0"],
        )
    return student, teacher, view.positions


@dataclass(frozen=True)
class _Mean:
    """The sum over positions (or rows) of the mean over pairs, their count, and how many had a bad teacher."""

    total: Tensor
    count: Tensor
    num_bad: Tensor


def _mean_of_pairs(of_pairs: Sequence[Distances]) -> _Mean:
    """Mean over pairs, sum over positions. Leave out and count positions with a bad teacher in any pair."""
    values = torch.stack([one.values for one in of_pairs]).mean(0)
    is_bad = torch.stack([one.is_bad for one in of_pairs]).any(0)
    total = torch.where(is_bad, torch.zeros_like(values), values).sum()
    return _Mean(total, (~is_bad).sum().to(values.dtype), is_bad.sum())


class InnerObjective(Objective):
    """A comparison of paired layers, through a projector where the widths differ or one is configured."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.name, plan.section)
        self.pairs = self._paired(plan)
        self.asked = BothNeeds(*(self._side(frozenset(side)) for side in zip(*self.pairs, strict=True)))
        self._projectors = self._make_projectors(plan)
        self.modules = {f"{pair[0]}_{pair[1]}": module for pair, module in self._projectors.items()}

    def _paired(self, plan: Plan) -> Pairs:
        assert plan.teacher is not None
        layers: LayerMap = plan.section.layers  # type: ignore[attr-defined]
        where = f"objectives.{plan.name}.layers"
        return resolve_pairs(layers, plan.student.num_layers, plan.teacher.num_layers, where=where, kept=plan.kept)

    def _side(self, layers: frozenset[int]) -> Needs:
        """What one model must provide: hidden states of these layers."""
        return Needs(hidden_layers=layers)

    def _make_projectors(self, plan: Plan) -> dict[tuple[int, int], nn.Module]:
        assert plan.teacher is not None
        if plan.student.width == plan.teacher.width and getattr(plan.section, "projector", "auto") == "auto":
            return {}
        return {pair: _projector(plan.student.width, plan.teacher.width) for pair in self.pairs}

    def _project(self, pair: tuple[int, int], states: Tensor) -> Tensor:
        """States in the teacher's width; unchanged without a projector."""
        if pair not in self._projectors:
            return states
        projected: Tensor = self._projectors[pair](states)
        return projected

    def compare(self, view: StudentView, signal: Signal) -> tuple[_Mean, Mapping[str, Tensor]]:
        """The distance of the paired layers, and further counters."""
        raise NotImplementedError

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        assert signal is not None
        mean, counters = self.compare(view, signal)
        return self.scored(mean.total, mean.count, shares[self.name], {"bad_teacher_rows": mean.num_bad, **counters})


class States(InnerObjective):
    """Hidden states of paired layers at the scored positions."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.section, FeatureConfig)
        self._distance: Callable[[Tensor, Tensor], Distances] = (
            distances.cosine_distance if plan.section.kind == "cosine" else distances.relative_error
        )

    def compare(self, view: StudentView, signal: Signal) -> tuple[_Mean, Mapping[str, Tensor]]:
        return _mean_of_pairs([self._distance_at(view, signal, pair) for pair in self.pairs]), {}

    def _distance_at(self, view: StudentView, signal: Signal, pair: tuple[int, int]) -> Distances:
        student, teacher, positions = _taps(view, signal, "hidden", pair)
        return self._distance(
            self._project(pair, distances.at_positions(student, positions)),
            distances.at_positions(teacher, positions),
        )


class AttentionMaps(InnerObjective):
    """Attention maps of paired layers at the scored queries."""

    def _paired(self, plan: Plan) -> Pairs:
        assert isinstance(plan.section, AttentionConfig)
        return super()._paired(plan)[-plan.section.attention_layers :]

    def _side(self, layers: frozenset[int]) -> Needs:
        return Needs(attention_layers=layers)

    def _make_projectors(self, plan: Plan) -> dict[tuple[int, int], nn.Module]:
        return {}

    def compare(self, view: StudentView, signal: Signal) -> tuple[_Mean, Mapping[str, Tensor]]:
        of_pairs = [distances.attention_distance(*_taps(view, signal, "attention", pair)) for pair in self.pairs]
        return _mean_of_pairs(of_pairs), {}


class Contrast(InnerObjective):
    """Each row's mean state against the means of the other rows of its micro-batch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.section, ContrastiveConfig)
        self._temperature = plan.section.temperature

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        rows = (int((batch.targets.cpu().numpy() != IGNORED).any(axis=1).sum()) for batch in batches)
        return {self.name: sum(rows)}

    def compare(self, view: StudentView, signal: Signal) -> tuple[_Mean, Mapping[str, Tensor]]:
        of_pairs = []
        for pair in self.pairs:
            student, teacher, positions = _taps(view, signal, "hidden", pair)
            student, is_row = distances.pooled(student, positions)
            teacher, _same = distances.pooled(teacher, positions)
            student = self._project(pair, student)
            of_pairs.append(distances.info_nce(student, teacher, is_row, self._temperature))
        mean = _mean_of_pairs(of_pairs)
        num_rows = is_row.sum() - mean.num_bad
        counters = {"rows_without_contrast": torch.where(num_rows == 1, num_rows, torch.zeros_like(num_rows))}
        return _Mean(mean.total, num_rows.to(mean.total.dtype), mean.num_bad), counters


def _projector(student_width: int, teacher_width: int) -> nn.Linear:
    """A semi-orthogonal matrix, scaled so that entries keep their size for any two widths."""
    linear = nn.Linear(student_width, teacher_width, bias=False)
    nn.init.orthogonal_(linear.weight, gain=max(1.0, teacher_width / student_width) ** 0.5)
    return linear


register("feature", Recipe(FeatureConfig, States))
register("layerwise", Recipe(LayerwiseConfig, States))
register("attention", Recipe(AttentionConfig, AttentionMaps))
register("contrastive", Recipe(ContrastiveConfig, Contrast))
