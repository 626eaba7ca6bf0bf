"""What each term weighs now: a pure function of the run's progress.

Progress is the share of *applied* optimizer steps, so the same lesson is used in training and in the
evaluation that follows it, whatever the accumulation or the number of skipped steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stillroom.config.schema import Config, PhaseConfig
from stillroom.config.sections import Ramp, Scalar
from stillroom.types import Lesson


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

    @staticmethod
    def of(config: Config) -> Curriculum:
        kd, ce = config.objectives.kd, config.objectives.ce
        return Curriculum(
            weights={"kd": kd.weight, "ce": ce.weight, **config.objectives.inner_weights},
            settings={
                "kd.temperature": kd.temperature,
                "kd.beta": kd.beta,
                "kd.alpha": kd.alpha,
                "kd.interpolation": kd.interpolation,
                "kd.top_k": kd.top_k if isinstance(kd.top_k, Ramp) else float(kd.top_k),
                "kd.token_fraction": kd.token_fraction,
                "kd.token_temperature": kd.token_temperature,
            },
            phases=config.curriculum.phases,
        )

    def at(self, progress: float) -> Lesson:
        progress = min(max(progress, 0.0), 1.0)
        return Lesson(
            phase=self.phase_at(progress),
            weights={name: value_at(scalar, progress) for name, scalar in self.weights.items()},
            settings={name: value_at(scalar, progress) for name, scalar in self.settings.items()},
        )

    def phase_at(self, progress: float) -> str:
        for phase in self.phases:
            if progress < phase.until:
                return phase.name
        return self.phases[-1].name if self.phases else "constant"

    @property
    def uses_teacher(self) -> bool:
        """Whether any moment of the run asks for the teacher."""
        return any(weight != 0.0 for name, weight in self.weights.items() if name != "ce")

    def without_teacher(self) -> Curriculum:
        """The same run on labels alone: all weight goes to cross-entropy."""
        return Curriculum({"kd": 0.0, "ce": 1.0}, self.settings, self.phases)
