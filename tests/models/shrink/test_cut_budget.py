"""Laws of students cut to a number of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from test_cut import WIDE, batches, teacher_of, wide_teacher

from stillroom.config import load_config
from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.models.shrink import cut as cutting
from stillroom.models.shrink.cut import built, cut
from stillroom.models.shrink.cut_budget import Counter, candidates, parse_budget
from stillroom.models.shrink.layer_choice import mean_loss, passages
from stillroom.models.shrink.width import shrink_config
from stillroom.training.distill import resume, steps


def size_of(teacher: Any, wanted: ShrinkConfig) -> int:
    """The parameters of a student, by building it without weights."""
    with torch.device("meta"):
        student = built(teacher, tuple(range(int(wanted.layers))), lambda text: shrink_config(text, wanted))  # type: ignore[arg-type]
    return int(student.num_parameters())


@pytest.mark.parametrize(
    ("text", "count"),
    [("80M", 80_000_000), ("1.5b", 1_500_000_000), ("640k", 640_000), ("7000", 7_000), ("0.6", 60), ("1", 100)],
)
def test_a_budget_is_a_number_or_a_share(text: str, count: int) -> None:
    assert parse_budget(ShrinkConfig(to=text).to, 100) == count


@pytest.mark.parametrize("to", ["80MB", "-5", "half", "M", "80 M G"])
def test_another_text_is_no_budget(to: str) -> None:
    with pytest.raises(ValueError, match="to"):
        ShrinkConfig(to=to)


@pytest.mark.parametrize("other", [{"layers": 2}, {"width": 8}, {"experts": 2}])
def test_a_budget_chooses_alone(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="leave"):
        ShrinkConfig(to="80M", **other)


@pytest.mark.parametrize("family", WIDE)
def test_counts_are_exact_and_no_candidate_exceeds_the_budget(family: str) -> None:
    teacher = wide_teacher(family)
    whole, count = teacher.num_parameters(), Counter(teacher)
    for to in ("0.9", "0.7", "0.5", "0.35"):
        budget = parse_budget(to, whole)
        found = candidates(teacher, ShrinkConfig(to=to))
        assert found and len({one.model_dump_json() for one in found}) == len(found) <= 13
        for one in found:
            assert count(one) == size_of(teacher, one) <= budget


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_a_family_whose_widths_are_unknown_is_cut_in_depth_alone(family: str) -> None:
    teacher = teacher_of(family)
    found = cut(teacher, ShrinkConfig(to="0.8", method="loss"), batches())
    assert found.model.num_parameters() <= 0.8 * teacher.num_parameters() and not found.choice.sizes
    larger = Counter(teacher)(ShrinkConfig(layers=len(found.kept_layers) + 1))
    assert larger > 0.8 * teacher.num_parameters(), "no more layers would fit"


def test_a_budget_that_cannot_be_met_is_refused_with_one_that_can() -> None:
    teacher = wide_teacher("llama")
    with refused(ConfigError, "student.shrink.to") as caught:
        cut(teacher, ShrinkConfig(to="100"), batches())
    nearest = caught.value.advice[0].rpartition("=")[2]
    assert cut(teacher, ShrinkConfig(to=nearest), batches()).model.num_parameters() <= int(nearest)
    with pytest.raises(ConfigError):
        candidates(teacher, ShrinkConfig(to=str(int(nearest) - 1)))


def test_the_student_with_the_lowest_loss_is_taken_and_all_are_recorded() -> None:
    teacher = wide_teacher("llama")
    found = cut(teacher, ShrinkConfig(to="0.7", method="loss"), batches())
    texts = passages(batches(), cutting.CHOICE_TOKENS, torch.device("cpu"))
    rows = found.choice.candidates
    assert mean_loss(found.model, texts) == pytest.approx(min(row["loss"] for row in rows), rel=1e-5)
    assert len(rows) > 3 and all(row["parameters"] <= 0.7 * teacher.num_parameters() for row in rows)
    assert len({round(row["loss"], 4) for row in rows}) > 1
    again = cut(teacher, ShrinkConfig(to="0.7", method="loss"), batches())
    assert again.choice == found.choice


def test_a_width_that_the_family_refuses_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        cut(wide_teacher("llama"), ShrinkConfig(width=30), batches())


def test_a_resumed_run_does_not_choose_again(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {**tiny.settings(world), "student.init": "shrink", "student.shrink.to": 0.7, "train.max_steps": 2}
    over |= {"student.model": "builtin:student", "student.shrink.method": "loss"}
    taken = steps(load_config(overrides=over), tmp_path / "run", device="cpu")
    next(taken).stop()
    with pytest.raises(Exception, match="stopped"):
        next(taken)
    record = json.loads((tmp_path / "run" / "cut.json").read_text(encoding="utf-8"))
    assert record["candidates"] and set(record["sizes"]) == {"width", "mlp_width", "heads"}

    def fail(*_args: Any, **_options: Any) -> Any:
        raise AssertionError("chosen again")

    monkeypatch.setattr(cutting, "candidates", fail)
    student = resume(tmp_path / "run", device="cpu").summary["student"]
    chosen = [row for row in record["candidates"] if row["layers"] == len(record["layers"])]
    assert student["parameters"] in {row["parameters"] for row in chosen}
