"""The weight of each term as a pure function of the run's progress.

Progress is the share of *applied* optimizer steps, so training and the evaluation that follows use the same lesson,
whatever the accumulation or the number of skipped steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stillroom.config.schema import Config, PhaseConfig
from stillroom.config.sections import Ramp, Scalar
from stillroom.core.types import Lesson

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

    def at(self, progress: float) -> Lesson:
        progress = min(max(progress, 0.0), 1.0)
        return Lesson(
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
