"""How large weights can have become by updates alone.

AdamW moves no weight further than a few learning rates in one step: |m| / sqrt(v) is bounded by its betas alone, by the
inequality of Cauchy and Schwarz. A weight that grew by more was changed by something else: a flipped bit, or a learning
rate that is not the schedule's. No loss need show it: a student that knows nothing yet scores alike with such a weight
and without.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stillroom.engine.run import Run

_ROUNDING = 0.01  # of a weight, far more than FP16 storage adds
_MARGIN = 1.5  # on the longest step: moments in BF16 are rounded
_EARLY_STEPS = 1000  # in which the bias correction may lengthen a step


@cache
def longest_step(beta1: float, beta2: float) -> float:
    """The most that one update of AdamW moves a weight, in learning rates, whatever the gradients; inf where nothing
    bounds it. With m and v as sums over past gradients and the bias correction of step t."""
    ratio = beta1 * beta1 / beta2 if beta2 else math.inf
    if ratio >= 1.0:
        return math.inf
    worst = gain = (1 - beta1) ** 2 / (1 - beta2) / (1 - ratio)  # after very many steps
    for t in range(1, _EARLY_STEPS + 1):
        worst = max(worst, gain * (1 - ratio**t) * (1 - beta2**t) / (1 - beta1**t) ** 2)
    return math.sqrt(worst)


class Reach:
    """The largest weight of each parameter when it was last seen to be sound, and how far updates went since."""

    def __init__(self) -> None:
        self._peaks: Tensor | None = None
        self._factors = 0.0  # of the schedule, summed over the updates since

    def begin(self, run: Run) -> None:
        """The weights as they stand are sound."""
        self._peaks = weight_peaks(run)
        self._factors = 0.0

    def extend(self, rate_factor: float) -> None:
        self._factors += rate_factor

    def holds(self, run: Run) -> bool:
        """Whether no parameter has a weight that updates cannot have made. NaN is none that they can."""
        if self._peaks is None:
            return True
        step = _MARGIN * longest_step(*run.optimizer.betas) * max(run.optimizer.rates.values())
        way = step * self._factors if self._factors else 0.0
        return bool((weight_peaks(run) <= self._peaks * (1.0 + _ROUNDING) + way).all())


@torch.no_grad()
def weight_peaks(run: Run) -> Tensor:
    """The largest magnitude in each trained parameter; NaN where there is one. [parameters]"""
    found = (*run.student.model.parameters(), *run.mix.projectors.parameters())
    return torch.stack([parameter.detach().abs().amax().float() for parameter in found if parameter.numel()])
