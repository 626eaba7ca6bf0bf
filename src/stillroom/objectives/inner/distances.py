"""Distances between hidden states, attention maps and pooled rows of two models.

Each function returns a value for every position (or row) and marks those where the teacher is unusable; none divides
by a count. Everything is FP32 or better: the square of an FP16 activation above 256 is infinite in FP16.

Legend: B rows, L positions, N scored positions, D width, H heads, K keys (= L).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.numerics import LOG_ZERO, work_dtype
from stillroom.objectives.arguments import check_number, check_tensor


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
