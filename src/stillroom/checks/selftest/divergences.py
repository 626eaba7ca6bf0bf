"""Trials of every divergence as a function of two tensors of logits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stillroom.checks import textbook
from stillroom.checks.selftest.cases import draw, gradient, leaf, members, slope_error
from stillroom.checks.selftest.trial import Measured, Trial, away, worst
from stillroom.objectives.divergences import on_logits
from stillroom.objectives.divergences.base import Divergence

GROUP = "divergences"
_FP32 = 3e-5  # of values and gradients, of sums over 97 tokens
_DIFFERENCES = 1e-6
_TEMPERATURE = 2.0


def trials() -> list[Trial]:
    return [Trial(GROUP, name, functools.partial(_measure, member)) for name, member in members()]


def _measure(member: Divergence) -> Measured:
    student, teacher = draw(0, 7, 97), draw(1, 7, 97)
    parts = []
    for dtype in (torch.float32, torch.float64):
        ours = leaf(student, dtype), leaf(teacher, dtype)
        value = on_logits(member, *ours, _TEMPERATURE)
        own = gradient(value.sum(), *ours)
        bound = _FP32 if dtype == torch.float32 else 1e-8
        parts += _against_the_formula(member, value, own, (leaf(ours[0], torch.float64), leaf(ours[1], torch.float64)),
                                      bound, str(dtype).removeprefix("torch."))  # fmt: skip
    if textbook.is_smooth(member):
        error = slope_error(lambda logits: on_logits(member, logits, teacher, _TEMPERATURE).sum(), student)
        parts.append(Measured(error, _DIFFERENCES, "the gradient against finite differences"))
    return worst(*parts)


def _against_the_formula(
    member: Divergence, value: Tensor, own: list[Tensor], exact: tuple[Tensor, Tensor], bound: float, said: str
) -> list[Measured]:
    try:
        expected = textbook.divergence(member, *exact, _TEMPERATURE)
    except LookupError:  # of another package: finite differences alone
        return []
    theirs = gradient(expected.sum(), *exact)
    return [
        Measured(away(value, expected), bound, f"the {said} value"),
        Measured(away(own[0], theirs[0]), bound, f"the student's {said} gradient"),
        Measured(away(own[1], theirs[1]), bound, f"the teacher's {said} gradient"),
    ]
