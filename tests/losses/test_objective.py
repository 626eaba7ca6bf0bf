"""Laws of the protocol: an objective that nobody here knows is weighed, counted, captured and saved like ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from head_cases import make_case
from refusals import refused
from torch import nn

from stillroom.config import Config, load_config
from stillroom.config.schema import OBJECTIVES, ObjectivesConfig, ObjectiveSection, Ramp, Recipe, Scalar
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, LossWeights, Score, Signal, StudentView
from stillroom.losses.mix import Mix, ModelDims, Objective, Plan, plan_objectives, register
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.models import load_models
from stillroom.training.run import Run, RunState, capture
from stillroom.training.schedule import Curriculum
from stillroom.training.step import attempt, train_step


class QuietConfig(ObjectiveSection):
    needs_teacher = False
    looks_inside = False
    power: Scalar = 2.0


class Quiet(Objective):
    """The size of a trained projection of the student's states; the teacher has no say."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.name, plan.section)
        self._matrix = nn.Linear(plan.student.width, 3, bias=False)
        self.modules = {"matrix": self._matrix}

    def score(
        self,
        view: StudentView,
        signal: Signal | None,
        batch: Batch,
        loss_weights: LossWeights,
        shares: Mapping[str, float],
    ) -> Score:
        sizes = self._matrix(view.hidden.float()).abs().pow(self.setting(loss_weights, "power")).mean(-1)
        return self.scored(sizes.sum(), torch.tensor(float(len(sizes))), shares[self.name])


@pytest.fixture(autouse=True)
def brought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECTIVES, "_things", dict(OBJECTIVES._things))
    register("quiet", Recipe(QuietConfig, Quiet))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "events.jsonl") as opened:
        yield opened


def make(world: Path, log: EventLog, **over: Any) -> Run:
    config = load_config(overrides=tiny.settings(world, objectives__quiet__weight=0.5, **over))
    device = find_device("cpu")
    return build_run(config, world, log, device=device, models=load_models(config, device))


def test_it_trains_what_it_brings_and_a_checkpoint_holds_it(world: Path, log: EventLog) -> None:
    run = make(world, log)
    before = {name: tensor.clone() for name, tensor in capture(run, RunState()).tensors["projectors"].items()}
    outcome = train_step(run, RunState(), run.loader.window(0))
    assert outcome.verdict.action == "keep" and outcome.terms["quiet"].raw > 0
    assert outcome.terms["quiet"].scaled == pytest.approx(0.5 * outcome.terms["quiet"].raw)
    after = capture(run, RunState()).tensors["projectors"]
    assert set(after) == {"quiet_matrix.weight"}
    assert not torch.equal(before["quiet_matrix.weight"], after["quiet_matrix.weight"])


def test_its_gradient_does_not_depend_on_micro_batches(world: Path, log: EventLog) -> None:
    one = make(world, log, train__batch_size=8, data__packing="rows")
    many = make(world, log, train__batch_size=1, train__gradient_accumulation_steps=8, data__packing="rows")
    found = [attempt(run, RunState(), run.loader.window(0))[0] for run in (one, many)]
    assert found[1].terms == pytest.approx(dict(found[0].terms), rel=1e-5)
    assert found[1].group_norms == pytest.approx(dict(found[0].group_norms), rel=1e-5)


def test_a_curriculum_moves_what_its_section_lets_move() -> None:
    ramp = {"start": 1.0, "end": 3.0}
    config = load_config(overrides={"objectives.quiet.weight": ramp, "objectives.quiet.power": ramp})
    loss_weights = Curriculum.of(config).at(0.5)
    assert loss_weights.weights["quiet"] == 2.0 and loss_weights.settings["quiet.power"] == 2.0
    objective = plan_objectives(config.objectives, ModelDims(1, 8), None).objectives[0]
    assert objective.setting(loss_weights, "power") == 2.0
    with refused(ConfigError, "", "objectives.quiet.power"):
        objective.setting(LossWeights("", {}), "power")


def test_the_settings_of_kd_that_move_are_those_that_take_a_ramp() -> None:
    moving = Curriculum.of(Config()).settings
    taken = [
        name
        for name in type(Config().objectives.kd).model_fields
        if f"kd.{name}" in moving or _takes_ramp({"kd": {name: {"start": 0.5, "end": 0.5}}})
    ]
    assert [f"kd.{name}" for name in taken if name != "weight"] == list(moving)


def _takes_ramp(table: dict[str, Any]) -> bool:
    try:
        section = ObjectivesConfig.model_validate(table).kd
    except ValueError:
        return False
    return isinstance(getattr(section, next(iter(table["kd"]))), Ramp)


def test_an_objective_without_a_teacher_asks_for_none() -> None:
    labels = {"objectives.kd.weight": 0.0, "objectives.ce.weight": 1.0}
    alone = Curriculum.of(load_config(overrides={**labels, "objectives.quiet.weight": 1.0}))
    assert not alone.uses_teacher and not alone.at(0.5).asks_teacher
    helped = Curriculum.of(load_config(overrides={**labels, "objectives.feature.weight": 1.0}))
    assert helped.uses_teacher and helped.at(0.5).asks_teacher


def test_a_weight_of_zero_is_not_computed_and_no_teacher_is_no_hindrance() -> None:
    config = ObjectivesConfig.model_validate({"quiet": {"weight": 1.0}})
    case = make_case(1, 16).copy(torch.float32)
    mix = Mix(config, planned=plan_objectives(config, ModelDims(1, case.hidden.shape[1]), None))
    counts = mix.counts([case.batch])
    for weights, signal, terms in (
        ({"ce": 1.0, "quiet": 0.0}, case.teacher, {"ce"}),
        ({"ce": 1.0, "quiet": 1.0}, None, {"ce", "quiet"}),
        ({"kd": 1.0, "quiet": 1.0}, case.teacher, {"kd", "quiet"}),
    ):
        assert set(mix.score(case.view, signal, case.batch, LossWeights("", weights), counts).terms) == terms


class Twin(Quiet):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.terms = ("quiet", "ce")


class Uncounted(Quiet):
    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        return {}


class Babbling(Quiet):
    def score(self, *args: Any) -> Score:
        score = super().score(*args)
        return Score(score.loss, {"babble": score.terms["quiet"]})


@pytest.mark.parametrize("kind", [Twin, Uncounted])
def test_a_term_belongs_to_one_objective_that_counts_it(kind: type[Objective]) -> None:
    OBJECTIVES._things["quiet"] = Recipe(QuietConfig, kind)  # type: ignore[arg-type]
    config = ObjectivesConfig.model_validate({"quiet": {"weight": 1.0}})
    with refused(ConfigError, "objectives"):
        Mix(config, planned=plan_objectives(config, ModelDims(1, 8), None))


def test_a_term_that_nobody_announced_is_refused() -> None:
    OBJECTIVES._things["quiet"] = Recipe(QuietConfig, Babbling)
    config = ObjectivesConfig.model_validate({"quiet": {"weight": 1.0}})
    case = make_case(1, 16).copy(torch.float32)
    mix = Mix(config, planned=plan_objectives(config, ModelDims(1, case.hidden.shape[1]), None))
    with refused(ConfigError, "objectives", "babble"):
        mix.score(case.view, case.teacher, case.batch, LossWeights("", {"quiet": 1.0}), mix.counts([case.batch]))


def test_what_a_recipe_makes_must_be_an_objective_of_its_name() -> None:
    OBJECTIVES._things["quiet"] = Recipe(QuietConfig, lambda plan: Objective("loud", plan.section))
    with refused(ConfigError, "Objective", "objectives.quiet"):
        plan_objectives(ObjectivesConfig.model_validate({"quiet": {"weight": 1.0}}), ModelDims(1, 8), None)
