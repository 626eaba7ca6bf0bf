"""The learning rate, counted in applied optimizer steps.

A window of micro-batches is one optimizer step. Windows do not cross epochs; the last one of an epoch may be partial
and is applied like any other, with the mean over its own tokens. So an epoch of 74,823 batches at accumulation 16 has
ceil(74,823 / 16) = 4,677 optimizer steps, and a warm-up of 10 % is 467.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Shape = Literal["cosine", "linear", "constant"]


def windows_in(num_batches: int, accumulation: int) -> int:
    """Optimizer steps of one epoch, the last partial window included."""
    return -(-num_batches // accumulation)


def steps_of_run(num_batches: int, accumulation: int, epochs: float, max_steps: int) -> int:
    """Optimizer steps of the run: `max_steps` if given, else those of the epochs."""
    if max_steps:
        return max_steps
    return max(1, math.ceil(windows_in(num_batches, accumulation) * epochs))


def warmup_of_run(num_steps: int, warmup_steps: int, warmup_ratio: float, max_share: float = 1.0) -> int:
    """Warm-up in optimizer steps. An explicit number wins, within `max_share`; it is always shorter than the run."""
    wanted = min(warmup_steps or int(num_steps * warmup_ratio), int(num_steps * max_share))
    return min(wanted, max(num_steps - 1, 0))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a shape that ends at `floor`. Factors are relative to the peak learning rate."""

    num_steps: int
    num_warmup: int
    shape: Shape = "cosine"
    floor: float = 0.0

    def factor(self, applied: int) -> float:
        """The factor for the step after `applied` steps.

        The first step of a warm-up is 1/num_warmup, not 0, which would be a step without effect.
        """
        if applied < self.num_warmup:
            return (applied + 1) / self.num_warmup
        if self.shape == "constant":
            return 1.0
        remaining = max(self.num_steps - self.num_warmup, 1)
        share = min((applied - self.num_warmup) / remaining, 1.0)
        if self.shape == "linear":
            return 1.0 - (1.0 - self.floor) * share
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * share))
