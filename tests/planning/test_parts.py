"""Bytes by part: laws of the sums, on shapes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load_config
from stillroom.planning.parts import Layout, chosen_mode, lay_out
from stillroom.planning.shapes import Shapes
from stillroom.planning.target import find_target
from stillroom.precision.policy import POLICIES


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with configurations and no weights: nothing else is read."""
    folder = tmp_path_factory.mktemp("shapes")
    tiny.config("llama", width=64, num_layers=6).save_pretrained(folder / "teacher")
    tiny.config("llama", width=64, num_layers=4).save_pretrained(folder / "student")
    return folder


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return Shapes(find_target("cpu"))


def laid_out(world: Path, shapes: Shapes, mode: str = "fp32", **over: Any) -> Layout:
    return lay_out(load_config(overrides=tiny.settings(world, **over)), shapes, mode)


def test_the_parts_add_up_to_the_largest_moment(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes)
    assert sum(layout.device.values()) == max(layout.moments.values()) == layout.moments[layout.moment]
    assert layout.total == sum(layout.device.values()) + sum(layout.host.values())  # on a CPU both are main memory


def test_weights_and_moments_are_those_of_every_parameter(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes)
    count = layout.sizes.parameters
    assert layout.device["student weights"] == 4 * count
    assert layout.device["moments"] == 8 * count
    assert layout.teacher is not None
    assert layout.device["teacher"] == 4 * layout.teacher.parameters


def test_more_rows_keep_more_activations(world: Path, shapes: Shapes) -> None:
    one, four = (laid_out(world, shapes, train__batch_size=rows).trace.kept for rows in (2, 8))
    assert 3.5 * one < four < 4.1 * one


def test_checkpointing_keeps_less_than_half_of_the_activations(world: Path, shapes: Shapes) -> None:
    whole = laid_out(world, shapes, train__batch_size=16)
    less = laid_out(world, shapes, train__batch_size=16, student__gradient_checkpointing=True)
    assert less.trace.kept < 0.5 * whole.trace.kept
    assert less.total < whole.total


def test_an_adapter_shrinks_the_state(world: Path, shapes: Shapes) -> None:
    whole, adapted = laid_out(world, shapes), laid_out(world, shapes, student__adapter={"rank": 2})
    assert adapted.sizes.num_trained < 0.2 * whole.sizes.num_trained
    assert adapted.device["moments"] == 8 * adapted.sizes.num_trained
    assert adapted.disk["checkpoints"] < 0.2 * whole.disk["checkpoints"]


def test_stored_answers_leave_no_teacher_on_the_device(world: Path, shapes: Shapes) -> None:
    cached = laid_out(world, shapes, teacher__cache="answers")
    assert "teacher" not in cached.device
    assert "teacher answers" not in cached.moments


def test_a_streamed_teacher_is_there_two_layers_at_a_time(world: Path, shapes: Shapes) -> None:
    whole, streamed = laid_out(world, shapes), laid_out(world, shapes, teacher__placement="stream")
    assert streamed.moments["teacher answers"] < whole.moments["teacher answers"]
    assert streamed.total < whole.total


def test_an_offloaded_teacher_is_in_the_main_memory_of_a_card(world: Path) -> None:
    card = Shapes(find_target(card="T4"))
    whole, away = laid_out(world, card), laid_out(world, card, teacher__placement="offload")
    assert away.host["teacher"] == whole.moments["update"] - away.moments["update"] + 2 * 320 * 64
    assert away.moments["student learns"] < whole.moments["student learns"]


@pytest.mark.parametrize("mode", sorted(POLICIES))
def test_every_precision_has_a_layout(world: Path, shapes: Shapes, mode: str) -> None:
    layout = laid_out(world, shapes, mode)
    has_extra = bool({"masters", "residuals"} & set(layout.device))
    assert has_extra == POLICIES[mode].keeps_half_weights
    assert layout.device["student weights"] == (2 if has_extra else 4) * layout.sizes.parameters


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "granite", "mixtral"])
def test_families_are_followed_or_said_to_be_estimated(tmp_path: Path, family: str) -> None:
    for role in ("teacher", "student"):
        tiny.config(family).save_pretrained(tmp_path / role)
    shapes = Shapes(find_target("cpu"))
    layout = laid_out(tmp_path, shapes)
    assert layout.device["activations"] > 0
    is_estimated = any("estimated" in note for note in shapes.notes)
    assert is_estimated <= (family == "mixtral")


def test_a_cut_student_has_the_teachers_layers_that_are_kept(world: Path, shapes: Shapes) -> None:
    layout = laid_out(world, shapes, student__init="shrink", student__shrink={"layers": 2})
    assert layout.teacher is not None
    assert (layout.sizes.layers, layout.teacher.layers) == (2, 6)


def test_auto_chooses_as_the_run_would(world: Path) -> None:
    config = load_config(overrides=tiny.settings(world))
    chosen = {card: chosen_mode(config, Shapes(find_target(card=card)))[0] for card in ("T4", "P100", "A100")}
    assert chosen == {"T4": "fp16-mixed", "P100": "fp32", "A100": "bf16-mixed"}
