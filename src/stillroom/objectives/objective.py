"""What an objective is: its terms, what it asks of the models, what it counts, and its score.

An objective is planned once, when both models are known, by the recipe registered under its name
(`config/extensions.py`). The mix asks each for its counts and its score, and divides; it knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stillroom.config.extensions import OBJECTIVES
from stillroom.config.extensions import Recipe as Recipe
from stillroom.config.objectives import ObjectivesConfig
from stillroom.config.sections import ObjectiveSection, Ramp, Scalar
from stillroom.errors import ConfigError
from stillroom.objectives.head.sparse import SignalKind
from stillroom.types import Batch, BothNeeds, Lesson, Needs, Score, Signal, StudentView, Term


@dataclass(frozen=True)
class Inside:
    """What an objective must know of a model to be planned."""

    num_layers: int
    width: int


@dataclass(frozen=True)
class Plan:
    """What a recipe makes an objective from. Random numbers drawn meanwhile depend on the run's seed alone."""

    name: str
    section: ObjectiveSection
    student: Inside
    teacher: Inside | None  # None where no term of the run needs the teacher
    kept: Sequence[int] | None = None  # layers of the teacher that a student cut from it was made of


class Objective:
    """One or several terms of the loss. A subclass overrides `score`, and what else differs from the defaults.

    `asked` is what it asks of both models while it has a weight. `modules` are networks trained beside the student:
    they are in checkpoints, have the projectors' learning rate, stay FP32, and are no part of the exported student.
    """

    def __init__(self, name: str, section: ObjectiveSection) -> None:
        self.name = name
        self.section = section
        self.terms: tuple[str, ...] = (name,)
        self.asked = BothNeeds()
        self.modules: Mapping[str, nn.Module] = {}

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """What a curriculum may move."""
        return self.section.settings

    def setting(self, lesson: Lesson, name: str) -> float:
        """The curriculum's value of a setting; what the config says where the curriculum is silent."""
        key, configured = f"{self.name}.{name}", self.settings[name]
        if key in lesson.settings:
            return lesson.settings[key]
        if isinstance(configured, Ramp):
            raise ConfigError(f"objectives.{key} moves, but the lesson does not say where it is now")
        return configured

    def has_weight(self, lesson: Lesson) -> bool:
        return any(lesson.weight(term) != 0.0 for term in self.terms)

    def is_scored(self, lesson: Lesson, signal: Signal | None) -> bool:
        """Whether it has a say now: a term of weight 0 is not computed, nor is one whose teacher does not answer."""
        return self.has_weight(lesson) and (signal is not None or not self.section.needs_teacher)

    def needs(self, lesson: Lesson) -> BothNeeds:
        """What it asks of each model beyond the last hidden states."""
        return self.asked if self.has_weight(lesson) else BothNeeds()

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        """How many each term of a window is the mean over, known before any forward: scored positions, by default."""
        return dict.fromkeys(self.terms, num_scored(batches))

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        """The loss of a micro-batch, where one target of a term weighs `shares[term]`, and its unweighted terms."""
        raise NotImplementedError

    def scored(self, total: Tensor, count: Tensor, share: float, counters: Mapping[str, Tensor] | None = None) -> Score:
        """The score of one term from the sum that carries its gradient and how many are in it."""
        return Score(share * total, {self.name: Term(total.detach(), count)}, counters or {})

    def check_signal(self, kind: SignalKind, stored_temperature: float) -> None:
        """Refuse, when the run is built, what a cached signal of this kind cannot serve."""

    def notes(self, device_type: str) -> tuple[str, ...]:
        """What a person should know of it before hours are spent."""
        return ()


def num_scored(batches: Iterable[Batch]) -> int:
    return sum(batch.num_scored for batch in batches)


def union(asked: Iterable[BothNeeds]) -> BothNeeds:
    """Everything that any of several asks for."""
    found = list(asked)
    return BothNeeds(_union([both.student for both in found]), _union([both.teacher for both in found]))


def _union(needs: Sequence[Needs]) -> Needs:
    return Needs(
        frozenset(layer for need in needs for layer in need.hidden_layers),
        frozenset(layer for need in needs for layer in need.attention_layers),
    )


# -- by name ---------------------------------------------------------------------------------------------


def register(name: str, recipe: Recipe) -> None:
    """Make an objective available as `objectives.<name>`, in this process. Packages use an entry point instead."""
    OBJECTIVES.register(name, recipe)


@dataclass(frozen=True)
class Planned:
    """The objectives of a run beside `kd` and `ce`, and what there is to tell about them when it starts."""

    objectives: tuple[Objective, ...] = ()
    notes: tuple[str, ...] = ()
    projectors: nn.ModuleDict = field(init=False)  # all that they train, under one name each

    def __post_init__(self) -> None:
        named = {f"{one.name}_{key}": module for one in self.objectives for key, module in one.modules.items()}
        object.__setattr__(self, "projectors", nn.ModuleDict(named))

    def find(self, name: str) -> Objective | None:
        return next((objective for objective in self.objectives if objective.name == name), None)


def plan_objectives(
    config: ObjectivesConfig,
    student: Inside,
    teacher: Inside | None,
    *,
    seed: int = 0,
    kept: Sequence[int] | None = None,
) -> Planned:
    """The objectives that the configuration ever uses. What the models cannot serve is refused here, before training.

    In the order of registration, then of the configuration: the seed gives each the same random numbers every time.
    """
    used = [name for name in config.weights if name not in ("kd", "ce")]
    own = [name for name in OBJECTIVES.loaded() if name in used]
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in dict.fromkeys((*own, *used)):
            plan = Plan(name, config.sections[name], student, teacher, kept)
            made.append(_checked(OBJECTIVES.find(name).make(plan), name))
    return Planned(tuple(made))


def _checked(made: Objective, name: str) -> Objective:
    if not isinstance(made, Objective) or made.name != name or not made.terms:
        raise ConfigError(
            f"what was made for objectives.{name} is no objective of that name",
            where=type(made).__qualname__,
            advice=["return an Objective(plan.name, plan.section) from `make`: docs/extending.md shows one"],
        )
    return made
