"""Bound how much updates can have changed the weights.

AdamW moves a weight by at most a few learning rates in one step: |m| / sqrt(v) is bounded by the betas (Cauchy-Schwarz
inequality). A larger change has another cause: a flipped bit, or a learning rate that is not the schedule's. The loss
of an untrained student may not show it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.precision.storage import local

if TYPE_CHECKING:
    from stillroom.engine.run import Run

_ROUNDING = 0.01  # of a weight, far more than FP16 storage adds
_MARGIN = 1.5  # on the longest step: moments in BF16 are rounded
_EARLY_STEPS = 1000  # in which the bias correction may lengthen a step


@cache
def longest_step(beta1: float, beta2: float) -> float:
    """The largest change of a weight in one AdamW update, in learning rates, for any gradients; inf if unbounded.

    With m and v as sums over past gradients and the bias correction of step t.
    """
    ratio = beta1 * beta1 / beta2 if beta2 else math.inf
    if ratio >= 1.0:
        return math.inf
    worst = gain = (1 - beta1) ** 2 / (1 - beta2) / (1 - ratio)  # after very many steps
    for t in range(1, _EARLY_STEPS + 1):
        worst = max(worst, gain * (1 - ratio**t) * (1 - beta2**t) / (1 - beta1**t) ** 2)
    return math.sqrt(worst)


class Reach:
    """The largest weight of each parameter at the last sound state, and the sum of update sizes since then."""

    def __init__(self) -> None:
        self._peaks: Tensor | None = None
        self._factors = 0.0  # of the schedule, summed over the updates since

    def begin(self, run: Run) -> None:
        """Take the present weights as sound."""
        self._peaks = weight_peaks(run)
        self._factors = 0.0

    def extend(self, rate_factor: float) -> None:
        self._factors += rate_factor

    def holds(self, run: Run) -> bool:
        """Whether every weight is within what updates can have made it. NaN is not."""
        if self._peaks is None:
            return True
        step = _MARGIN * longest_step(*run.optimizer.betas) * max(run.optimizer.rates.values())
        travel = step * self._factors if self._factors else 0.0
        return bool((weight_peaks(run) <= self._peaks * (1.0 + _ROUNDING) + travel).all())


@torch.no_grad()
def weight_peaks(run: Run) -> Tensor:
    """The largest magnitude in what this process holds of each parameter; NaN where one is NaN. [parameters]"""
    trained = (*run.student.model.parameters(), *run.mix.projectors.parameters())
    held = [local(parameter.detach()) for parameter in trained]
    return torch.stack([tensor.abs().amax().float() for tensor in held if tensor.numel()])
