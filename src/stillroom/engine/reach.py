"""How large weights can have become by updates alone.

AdamW moves no weight further than a few learning rates in one step: by the inequality of Cauchy and Schwarz, |m| over
sqrt(v) is at most 1.2 at the usual betas, and 2.6 with the bias correction of the first steps. A weight that grew by
more was changed by something else: a flipped bit, or a learning rate that is not the schedule's. No loss need show it:
a student that knows nothing yet scores alike with such a weight and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stillroom.engine.run import Run

_LONGEST_STEP = 4.0  # in learning rates
_ROUNDING = 0.01  # of a weight, far more than FP16 storage or BF16 moments add


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
        way = _LONGEST_STEP * self._factors * max(run.optimizer.rates.values())
        return bool((weight_peaks(run) <= self._peaks * (1.0 + _ROUNDING) + way).all())


@torch.no_grad()
def weight_peaks(run: Run) -> Tensor:
    """The largest magnitude in each trained parameter; NaN where there is one. [parameters]"""
    found = (*run.student.model.parameters(), *run.mix.inner.projectors.parameters())
    return torch.stack([parameter.detach().abs().amax().float() for parameter in found if parameter.numel()])
