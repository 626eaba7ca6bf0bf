"""The benchmark on a pretrained model: its table is that of its files, and every arm of it can be run."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.training.distill import distill

PLACE = Path(__file__).resolve().parents[2] / "benchmarks" / "real"
# The arms' own settings, at the size of the tiny teacher.
SMALL = {"student.shrink.layers": 1, "student.shrink.width": 16, "student.shrink.mlp_width": 32}
ARMS = ["plain", "kl", "lora", "int8", "inner", "narrow-plain", "narrow-kl"]


@pytest.fixture
def arms(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PLACE))
    return importlib.import_module("arms")


@pytest.fixture
def drawing(arms: Any) -> Any:
    """By path: other benchmarks have a draw.py too."""
    spec = importlib.util.spec_from_file_location("draw_real", PLACE / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_drawn_from_the_files_of_the_arms(drawing: Any) -> None:
    results = PLACE / "results"
    found = drawing.read_arms(results)
    assert drawing.page(found, drawing.read_trials(results)) == (results / "real.md").read_text(encoding="utf-8")
    assert drawing.figures(found) == json.loads((results / "figures.json").read_text(encoding="utf-8"))


def test_what_is_won_back_is_a_share_of_what_the_cut_added(drawing: Any) -> None:
    def record(value: float) -> dict[str, Any]:
        return {"test": {"bits_per_byte": value}}

    found = {("teacher", 0): record(1.0), ("cut", 0): record(3.0), ("kl", 0): record(1.5), ("plain", 0): record(3.5)}
    assert drawing.won_back(found, "kl") == [0.75] and drawing.won_back(found, "plain") == [-0.25]


def test_arms_made_with_other_settings_are_not_put_into_one_table(drawing: Any, tmp_path: Path) -> None:
    path = drawing.arm_file(tmp_path, "kl", 0)
    path.parent.mkdir(parents=True)
    path.write_text('{"shared": {"steps": 3}}')
    with pytest.raises(SystemExit, match="other settings"):
        drawing.read_arms(tmp_path)


@pytest.mark.parametrize("name", ARMS)
def test_the_settings_of_an_arm_train_a_student(arms: Any, world: Path, tmp_path: Path, name: str) -> None:
    asked = {**tiny.settings(world), **arms.SHARED, **arms.ARMS[name].settings, "train.max_steps": 2}
    asked |= {key: value for key, value in SMALL.items() if key in asked}
    asked |= {"train.eval_steps": 2, "train.save_steps": 2, "data.max_length": 32}
    del asked["student.model"]
    summary = distill(load_config(overrides=asked), tmp_path / "run", device="cpu").summary
    assert summary["status"] == "done" and summary["steps"] == 2
    assert ("teacher_quantisation" in summary) == (name == "int8")


def test_every_arm_that_is_trained_has_a_trial_and_a_test(arms: Any) -> None:
    trained = {name: arm for name, arm in arms.ARMS.items() if not arm.is_reference}
    assert {arm.trial for arm in trained.values()} == set(arms.TRIALS)
    assert set(trained) - set(ARMS) == {"cached", "compute"}, "the same settings as kl and plain"
