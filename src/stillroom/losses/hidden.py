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

from stillroom.config.schema import AttentionConfig, ContrastiveConfig, FeatureConfig, LayerMap, LayerwiseConfig, Recipe
from stillroom.core.errors import ConfigError
from stillroom.core.numerics import LOG_ZERO, work_dtype
from stillroom.core.types import IGNORED, Batch, BothNeeds, LossWeights, Needs, Score, Signal, StudentView
from stillroom.losses.divergences import check_number, check_tensor
from stillroom.losses.mix import Objective, Plan, Shares, register

# -- distances between hidden states, attention maps and pooled rows ---------------------------------------
#
# Each function returns a value for every position (or row) and marks those where the teacher is unusable; none
# divides by a count. Everything is FP32 or better: the square of an FP16 activation above 256 is infinite in FP16.
#
# Legend: B rows, L positions, N scored positions, D width, H heads, K keys (= L).


@dataclass(frozen=True)
class Distances:
    """A value for each position or row, and where the teacher is unusable: there the value is 0."""

    values: Tensor  # [...]
    is_bad: Tensor  # [...], bool


def at_positions(states: Tensor, positions: Tensor) -> Tensor:
    """States [B, L, D] at the flat `positions`, in FP32 or better. [N, D]"""
    return states.reshape(-1, states.shape[-1]).index_select(0, positions).to(work_dtype(states))


def relative_error(student: Tensor, teacher: Tensor) -> Distances:
    """|s - t|^2 / |t|^2 of states [..., D].

    0 if and only if the two are equal, 1 for a student of zeros. The quotient does not depend on the width or the size
    of the activations, which differ a hundredfold between layers and models; a plain mean square would be dominated by
    the few positions with massive activations (Sun et al. 2024).
    """
    student, teacher = _alike(student, teacher)
    teacher, energy, is_bad = _usable(teacher)
    error = (student - teacher).square().sum(-1) / energy
    return Distances(torch.where(is_bad, torch.zeros_like(error), error), is_bad)


def cosine_distance(student: Tensor, teacher: Tensor) -> Distances:
    """1 - cos(s, t) of states [..., D]: 0 if and only if they have the same direction.

    A student's state of zeros has the distance 1 and the gradient 0.
    """
    student, teacher = _alike(student, teacher)
    teacher, energy, is_bad = _usable(teacher)
    product = (_unit(student) * (teacher * energy.rsqrt()[..., None])).sum(-1)
    return Distances(torch.where(is_bad, torch.zeros_like(product), 1.0 - product), is_bad)


def attention_distance(student: Tensor, teacher: Tensor, positions: Tensor) -> Distances:
    """Squared distance of attention maps [B, H, L, K] at the queries `positions` [N], mean over the student's heads.

    Each map is a distribution over the keys before the query, so the value is between 0 and 2 for any length, and
    padding after the query does not count. Where the numbers of heads differ, a student's head is compared with the
    mean of the teacher's heads at the same place, which is a distribution too.
    """
    check_tensor("student", student, ["B", "H", "L", "K"], device=student.device)
    shape: list[int | str] = [student.shape[0], "H", *student.shape[2:]]
    check_tensor("teacher", teacher, shape, device=student.device, advice="maps of the same queries and keys")
    student, teacher = _queries(student, positions), _queries(teacher, positions)
    is_bad = ~torch.isfinite(teacher).flatten(1).all(1)
    teacher = torch.where(is_bad[:, None, None], torch.zeros_like(teacher), teacher)
    if student.shape[1] != teacher.shape[1]:
        teacher = torch.einsum("st,ntk->nsk", head_map(student.shape[1], teacher.shape[1]).to(teacher), teacher)
    values = (student - teacher).square().sum(-1).mean(-1)
    return Distances(torch.where(is_bad, torch.zeros_like(values), values), is_bad)


def head_map(num_student: int, num_teacher: int) -> Tensor:
    """Weights of the teacher's heads for each student head [Hs, Ht]: those at the same place; rows sum to 1."""
    weights = torch.zeros(num_student, num_teacher)
    for head in range(num_student):
        start = head * num_teacher // num_student
        stop = -(-(head + 1) * num_teacher // num_student)
        weights[head, start:stop] = 1.0 / (stop - start)
    return weights


def pooled(states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The mean state of each row over its scored positions [B, D], and which rows have any [B]."""
    num_rows, length, _width = states.shape
    is_scored = torch.zeros(num_rows * length, dtype=torch.bool, device=states.device)
    is_scored = is_scored.index_fill(0, positions, True).view(num_rows, length)
    states = torch.where(is_scored[..., None], states.to(work_dtype(states)), 0.0)
    number = is_scored.sum(1)
    return states.sum(1) / number.clamp_min(1)[:, None], number > 0


def info_nce(student: Tensor, teacher: Tensor, is_row: Tensor, temperature: float) -> Distances:
    """-log softmax of cos(s_i, t_i) / T among all cos(s_i, t_j) of the batch's rows [B, D] (van den Oord et al. 2018).

    The other rows of the micro-batch are the negatives, so eight micro-batches of one do not equal one of eight. A
    batch of one has no negatives; its loss is 0.
    """
    check_number("temperature", temperature, above=0.0)
    check_tensor("student", student, ["B", "D"], device=student.device)
    check_tensor("is_row", is_row, [student.shape[0]], device=student.device, dtypes="real")
    student, teacher = _alike(student, teacher)
    teacher, energy, is_bad = _usable(teacher)
    is_bad = is_bad & is_row
    is_counted = is_row & ~is_bad
    logits = _unit(student) @ (teacher * energy.rsqrt()[:, None]).T / temperature
    logits = logits.masked_fill(~is_counted, LOG_ZERO)  # finite, so that a row without candidates is not NaN
    values = torch.logsumexp(logits, 1) - logits.diagonal()
    return Distances(torch.where(is_counted, values, torch.zeros_like(values)), is_bad)


def _queries(probs: Tensor, positions: Tensor) -> Tensor:
    """Attention maps [B, H, L, K] as [N, H, K] at the chosen queries, in FP32 or better."""
    chosen = probs.transpose(1, 2).flatten(0, 1).index_select(0, positions)
    return chosen.to(work_dtype(probs))


def _alike(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Both in FP32 or better. Raise for shapes that differ: they would be broadcast in silence."""
    check_tensor("student", student, [*student.shape], device=student.device)
    advice = "states of the same positions in the same width: a projector brings the student's to the teacher's"
    check_tensor("teacher", teacher, [*student.shape], device=student.device, advice=advice)
    return student.to(work_dtype(student)), teacher.to(work_dtype(teacher))


def _usable(teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The teacher's states with unusable ones (not finite, or zero) set to 0, their energy, and which those are.

    Set to 0 before they are combined with the student: a NaN masked afterwards still makes the gradient NaN.
    """
    energy = teacher.square().sum(-1)
    is_bad = ~torch.isfinite(energy) | (energy == 0)
    teacher = torch.where(is_bad[..., None], torch.zeros_like(teacher), teacher)
    return teacher, torch.where(is_bad, torch.ones_like(energy), energy), is_bad


def _unit(states: Tensor) -> Tensor:
    """States of norm 1; zeros stay 0, with gradient 0 instead of infinity."""
    energy = states.square().sum(-1, keepdim=True)
    tiny = torch.finfo(states.dtype).tiny
    return states * torch.where(energy > tiny, energy.clamp_min(tiny).rsqrt(), 0.0)


# -- pairing layers of the student with layers of the teacher ----------------------------------------------


Pairs = tuple[tuple[int, int], ...]


def resolve_pairs(
    spec: LayerMap, num_student: int, num_teacher: int, *, where: str, kept: Sequence[int] | None = None
) -> Pairs:
    """Pairs (student's layer, teacher's layer), counted from 0.

    `proportional` spaces the student's layers evenly over the teacher's, the last with the last. For a student cut
    from the teacher, `kept` gives the teacher's layer that each of its layers was.
    """
    if spec == "last":
        return ((num_student - 1, num_teacher - 1),)
    if spec == "proportional":
        if kept is not None:
            return tuple(enumerate(kept))
        return tuple((i, -(-(i + 1) * num_teacher // num_student) - 1) for i in range(num_student))
    if not spec:
        raise ConfigError("the map holds no pair of layers", where=where, advice=[f'set {where} = "proportional"'])
    return tuple(
        (_place(student, num_student, "student", where), _place(teacher, num_teacher, "teacher", where))
        for student, teacher in spec
    )


def _place(layer: int, number: int, role: str, where: str) -> int:
    if not -number <= layer < number:
        raise ConfigError(
            f"the {role} has {number} layers, 0 to {number - 1}, and no layer {layer}",
            where=where,
            advice=[
                f"choose from 0 to {number - 1}, or count from the end with -1",
                f'or set {where} = "proportional"',
            ],
        )
    return layer % number


# -- the objectives ----------------------------------------------------------------------------------------


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


Compared = tuple[Tensor, Tensor, dict[str, Tensor]]  # total over positions or rows, their count, counters


def mean_of_pairs(of_pairs: Sequence[Distances]) -> Compared:
    """Mean over pairs, sum over positions. Leave out and count positions with a bad teacher in any pair."""
    values = torch.stack([one.values for one in of_pairs]).mean(0)
    is_bad = torch.stack([one.is_bad for one in of_pairs]).any(0)
    total = torch.where(is_bad, torch.zeros_like(values), values).sum()
    return total, (~is_bad).sum().to(values.dtype), {"bad_teacher_rows": is_bad.sum()}


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
        if plan.student.width == plan.teacher.width:
            return {}
        return {pair: _projector(plan.student.width, plan.teacher.width) for pair in self.pairs}

    def _project(self, pair: tuple[int, int], states: Tensor) -> Tensor:
        """States in the teacher's width; unchanged without a projector."""
        if pair not in self._projectors:
            return states
        projected: Tensor = self._projectors[pair](states)
        return projected

    def compare(self, view: StudentView, signal: Signal) -> Compared:
        """Compare the paired layers."""
        raise NotImplementedError

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        assert signal is not None
        total, count, counters = self.compare(view, signal)
        return self.scored(total, count, shares[self.name], counters)


class States(InnerObjective):
    """Hidden states of paired layers at the scored positions."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.section, FeatureConfig)
        self._distance: Callable[[Tensor, Tensor], Distances] = (
            cosine_distance if plan.section.kind == "cosine" else relative_error
        )

    def compare(self, view: StudentView, signal: Signal) -> Compared:
        of_pairs = []
        for pair in self.pairs:
            student, teacher, positions = _taps(view, signal, "hidden", pair)
            states = self._project(pair, at_positions(student, positions))
            of_pairs.append(self._distance(states, at_positions(teacher, positions)))
        return mean_of_pairs(of_pairs)


class AttentionMaps(InnerObjective):
    """Attention maps of paired layers at the scored queries."""

    def _paired(self, plan: Plan) -> Pairs:
        assert isinstance(plan.section, AttentionConfig)
        return super()._paired(plan)[-plan.section.attention_layers :]

    def _side(self, layers: frozenset[int]) -> Needs:
        return Needs(attention_layers=layers)

    def _make_projectors(self, plan: Plan) -> dict[tuple[int, int], nn.Module]:
        return {}

    def compare(self, view: StudentView, signal: Signal) -> Compared:
        return mean_of_pairs([attention_distance(*_taps(view, signal, "attention", pair)) for pair in self.pairs])


class Contrast(InnerObjective):
    """Each row's mean state against the means of the other rows of its micro-batch."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        assert isinstance(plan.section, ContrastiveConfig)
        self._temperature = plan.section.temperature

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        rows = (int((batch.targets.cpu().numpy() != IGNORED).any(axis=1).sum()) for batch in batches)
        return {self.name: sum(rows)}

    def compare(self, view: StudentView, signal: Signal) -> Compared:
        of_pairs = []
        for pair in self.pairs:
            student, teacher, positions = _taps(view, signal, "hidden", pair)
            student, is_row = pooled(student, positions)
            teacher, _same = pooled(teacher, positions)
            student = self._project(pair, student)
            of_pairs.append(info_nce(student, teacher, is_row, self._temperature))
        total, _positions, counters = mean_of_pairs(of_pairs)
        num_rows = is_row.sum() - counters["bad_teacher_rows"]
        counters["rows_without_contrast"] = torch.where(num_rows == 1, num_rows, torch.zeros_like(num_rows))
        return total, num_rows.to(total.dtype), counters


def _projector(student_width: int, teacher_width: int) -> nn.Linear:
    """A semi-orthogonal matrix, scaled so that entries keep their size for any two widths."""
    linear = nn.Linear(student_width, teacher_width, bias=False)
    nn.init.orthogonal_(linear.weight, gain=max(1.0, teacher_width / student_width) ** 0.5)
    return linear


register("feature", Recipe(FeatureConfig, States))
register("layerwise", Recipe(LayerwiseConfig, States))
register("attention", Recipe(AttentionConfig, AttentionMaps))
register("contrastive", Recipe(ContrastiveConfig, Contrast))
