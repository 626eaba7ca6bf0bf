"""Schedule the learning rate and the weights of the terms, counted in applied optimizer steps.

A window of micro-batches is one optimizer step. Windows do not cross epochs; the last one of an epoch may be partial
and is applied like any other, with the mean over its own tokens. So an epoch of 74,823 batches at accumulation 16 has
ceil(74,823 / 16) = 4,677 optimizer steps, and a warm-up of 10 % is 467.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stillroom.config.schema import Config, PhaseConfig, Ramp, Scalar
from stillroom.core.types import LossWeights

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

    @staticmethod
    def of(config: Config, num_batches: int, num_processes: int = 1) -> Schedule:
        """Plan the steps and the warm-up of a run whose epoch has `num_batches` micro-batches."""
        train = config.train
        accumulation = train.gradient_accumulation_steps * num_processes
        num_steps = steps_of_run(num_batches, accumulation, train.epochs, train.max_steps)
        return Schedule(
            num_steps=num_steps,
            num_warmup=warmup_of_run(num_steps, train.warmup_steps, train.warmup_ratio, train.max_warmup_share),
            shape=train.schedule,
            floor=train.min_learning_rate_ratio,
        )

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


# ---- The curriculum: the weight of each term as a pure function of the run's progress
#
# Progress is the share of *applied* optimizer steps, so training and the evaluation that follows use the same loss
# weights, whatever the accumulation or the number of skipped steps.


NO_PHASE = "constant"  # the name of a run without phases


def value_at(scalar: Scalar, progress: float) -> float:
    """The value of a constant or a ramp at `progress` in [0, 1]."""
    if not isinstance(scalar, Ramp):
        return float(scalar)
    if progress <= scalar.begin and progress < scalar.until:
        return scalar.start
    if progress >= scalar.until:
        return scalar.end
    if scalar.shape == "step":
        return scalar.start
    share = (progress - scalar.begin) / (scalar.until - scalar.begin)
    if scalar.shape == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return scalar.start + share * (scalar.end - scalar.start)


@dataclass(frozen=True)
class Curriculum:
    """Weights and settings over a run."""

    weights: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    phases: tuple[PhaseConfig, ...] = ()
    unaided: frozenset[str] = frozenset({"ce"})  # terms that need no teacher

    @staticmethod
    def of(config: Config) -> Curriculum:
        """The weights and settings of the configuration's objectives."""
        sections = config.objectives.sections
        weights = config.objectives.weights
        return Curriculum(
            weights=weights,
            settings={
                f"{name}.{setting}": value for name in weights for setting, value in sections[name].settings.items()
            },
            phases=config.curriculum.phases,
            unaided=frozenset(name for name in weights if not sections[name].needs_teacher),
        )

    def at(self, progress: float) -> LossWeights:
        progress = min(max(progress, 0.0), 1.0)
        return LossWeights(
            phase=self.phase_at(progress),
            weights={name: value_at(scalar, progress) for name, scalar in self.weights.items()},
            settings={name: value_at(scalar, progress) for name, scalar in self.settings.items()},
            unaided=self.unaided,
        )

    def phase_at(self, progress: float) -> str:
        for phase in self.phases:
            if progress < phase.until:
                return phase.name
        return self.phases[-1].name if self.phases else NO_PHASE

    @property
    def uses_teacher(self) -> bool:
        """Whether the teacher is needed at any time of the run."""
        return any(weight != 0.0 for name, weight in self.weights.items() if name not in self.unaided)

    def without_teacher(self) -> Curriculum:
        """The same run on labels alone: all weight goes to cross-entropy."""
        return replace(self, weights={"kd": 0.0, "ce": 1.0})
