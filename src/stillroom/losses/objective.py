"""The base class of objectives: terms, needs, counts and score.

An objective is made once, when both models are known, by the recipe registered under its name
(`config/registry.py`). The mix loops over the objectives and divides; it knows none by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stillroom.config.objectives import ObjectivesConfig
from stillroom.config.registry import OBJECTIVES
from stillroom.config.registry import Recipe as Recipe
from stillroom.config.sections import ObjectiveSection, Ramp, Scalar
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, BothNeeds, Lesson, Needs, Score, Signal, StudentView, Term
from stillroom.losses.head.rows import SignalKind


@dataclass(frozen=True)
class Inside:
    """The sizes of a model that an objective is made from."""

    num_layers: int
    width: int


@dataclass(frozen=True)
class Matched:
    """The pairs of tokens of two vocabularies that stand for the same bytes, and what is left over on each side."""

    student_ids: Sequence[int]
    teacher_ids: Sequence[int]
    student_rest: int  # ordinary tokens without a partner
    teacher_rest: int
    problem: str = ""  # why tokens of these vocabularies cannot be compared by their bytes
    student_groups: Sequence[int] = ()  # the group of each id: tokens that begin a text alike
    teacher_groups: Sequence[int] = ()
    num_groups: int = 0


@dataclass(frozen=True)
class Plan:
    """The arguments of a recipe. Random numbers drawn in it depend on the run's seed alone."""

    name: str
    section: ObjectiveSection
    student: Inside
    teacher: Inside | None  # None where no term of the run needs the teacher
    kept: Sequence[int] | None = None  # the teacher's layers that a cut student consists of
    matched: Matched | None = None  # tokens of the same bytes, where each model has a tokenizer of its own
    chunk_tokens: int = 0  # positions the head handles at once; 0: chosen


class Objective:
    """One or several terms of the loss. A subclass overrides `score` and whatever else differs.

    `asked` is what it needs of both models while it has a weight. `modules` are networks trained beside the student:
    they are in checkpoints, have the projectors' learning rate, stay FP32, and are not part of the exported student.
    """

    def __init__(self, name: str, section: ObjectiveSection) -> None:
        self.name = name
        self.section = section
        self.terms: tuple[str, ...] = (name,)
        self.asked = BothNeeds()
        self.modules: Mapping[str, nn.Module] = {}

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """The settings that a curriculum may change."""
        return self.section.settings

    def setting(self, lesson: Lesson, name: str) -> float:
        """The lesson's value of a setting, else the configured one."""
        key, configured = f"{self.name}.{name}", self.settings[name]
        if key in lesson.settings:
            return lesson.settings[key]
        if isinstance(configured, Ramp):
            raise ConfigError(f"objectives.{key} moves, but the lesson does not say where it is now")
        return configured

    def has_weight(self, lesson: Lesson) -> bool:
        return any(lesson.weight(term) != 0.0 for term in self.terms)

    def is_scored(self, lesson: Lesson, signal: Signal | None) -> bool:
        """Whether it is computed now: not at weight 0, and not without a signal if it needs the teacher."""
        return self.has_weight(lesson) and (signal is not None or not self.section.needs_teacher)

    def needs(self, lesson: Lesson) -> BothNeeds:
        """What it needs of each model beside the last hidden states."""
        return self.asked if self.has_weight(lesson) else BothNeeds()

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        """What each term's total over a window is divided by, known before any forward: scored positions by default."""
        return dict.fromkeys(self.terms, num_scored(batches))

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        """The loss of a micro-batch, with weight `shares[term]` for one target of a term, and its unweighted terms."""
        raise NotImplementedError

    def scored(self, total: Tensor, count: Tensor, share: float, counters: Mapping[str, Tensor] | None = None) -> Score:
        """The score of a single term from its sum, which carries the gradient, and its count."""
        return Score(share * total, {self.name: Term(total.detach(), count)}, counters or {})

    def check_signal(self, kind: SignalKind, stored_temperature: float) -> None:
        """Raise for settings that a cached signal of this kind cannot serve."""

    def notes(self, device_type: str) -> tuple[str, ...]:
        """Notes for the log, written when the run starts."""
        return ()


def num_scored(batches: Iterable[Batch]) -> int:
    return sum(batch.num_scored for batch in batches)


def union(asked: Iterable[BothNeeds]) -> BothNeeds:
    """The union of several needs."""
    needs = list(asked)
    return BothNeeds(_union([both.student for both in needs]), _union([both.teacher for both in needs]))


def _union(needs: Sequence[Needs]) -> Needs:
    return Needs(
        frozenset(layer for need in needs for layer in need.hidden_layers),
        frozenset(layer for need in needs for layer in need.attention_layers),
    )


# -- by name ---------------------------------------------------------------------------------------------


def register(name: str, recipe: Recipe) -> None:
    """Make an objective available as `objectives.<name>` in this process. Packages use an entry point instead."""
    OBJECTIVES.register(name, recipe)


@dataclass(frozen=True)
class Planned:
    """The objectives of a run beside `kd` and `ce`, and notes for the log."""

    objectives: tuple[Objective, ...] = ()
    notes: tuple[str, ...] = ()
    projectors: nn.ModuleDict = field(init=False)  # all modules of the objectives, by name

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
    matched: Matched | None = None,
) -> Planned:
    """Make the objectives that the configuration uses. Raise if the models cannot serve them.

    The order is that of registration, then of the configuration, so the seed gives each the same random numbers.
    """
    used = [name for name in config.weights if name not in ("kd", "ce")]
    own = [name for name in OBJECTIVES.loaded() if name in used]
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in dict.fromkeys((*own, *used)):
            plan = Plan(name, config.sections[name], student, teacher, kept, matched, config.chunk_tokens)
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
