"""Rows that a model cannot read are refused before training, with the number and what to set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
from refusals import refused

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.telemetry import read_events
from stillroom.training import student
from stillroom.training.distill import distill


def overrides(world: Path, **over: Any) -> dict[str, Any]:
    short = {"train.max_steps": 2, "train.batch_size": 2, "eval.samples": 0}
    return {
        "teacher.model": str(world / "teacher"),
        "student.model": str(world / "student"),
        "data.train": str(world / "train.jsonl"),
        **short,
        **over,
    }


def test_a_row_longer_than_the_models_positions_is_refused_with_the_number(world: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    lines = [{"text": " ".join(tiny.sentences(30, seed))} for seed in range(30)]
    long.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    config = load_config(overrides=overrides(world, **{"data.train": str(long), "data.max_length": 200}))
    with refused(ConfigError, "data.max_length", "200", "128") as caught:
        distill(config, tmp_path / "run")
    assert caught.value.exit_code == 2 and "--set data.max_length=128" in str(caught.value)


def test_packed_rows_are_trained_on_and_a_family_that_cannot_is_refused(world: Path, tmp_path: Path) -> None:
    packed = {"data.packing": "packed", "data.max_length": 96}
    distill(load_config(overrides=overrides(world, **packed)), tmp_path / "run")
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert any("several records share a training row" in str(event.get("text")) for event in events)
    families.build("bloom").save_pretrained(tmp_path / "bloom")
    tiny.tokenizer().save_pretrained(tmp_path / "bloom")
    config = load_config(overrides=overrides(world, **packed, **{"student.model": str(tmp_path / "bloom")}))
    with refused(ConfigError, "data.packing", "Bloom") as caught:
        distill(config, tmp_path / "other")
    assert caught.value.where == "data.packing" and "data.packing=rows" in str(caught.value)


def test_data_opened_to_choose_a_cut_is_not_opened_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    original = student.open_data

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(student, "open_data", counted)
    monkeypatch.setattr("stillroom.training.build.open_data", counted)
    cut = {"student.init": "shrink", "student.shrink.layers": 1, "student.shrink.method": "influence"}
    distill(load_config(overrides=overrides(world, **cut, **{"data.max_length": 64})), tmp_path / "run")
    assert len(opened) == 1
