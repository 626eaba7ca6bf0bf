"""Laws of the measurement of each term's gradient: it adds up, and nobody notices it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.core.errors import Interrupted
from stillroom.precision.device import find_device
from stillroom.report import write_report
from stillroom.telemetry import EventLog, read_events
from stillroom.training.build import build_run
from stillroom.training.distill import distill, resume
from stillroom.training.gradients import term_gradients
from stillroom.training.models import load_models
from stillroom.training.run import RunState
from stillroom.training.step import attempt

MIXED = {"objectives__kd__weight": 0.6, "objectives__ce__weight": 0.4, "objectives__kd__temperature": 2.0}


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with dropout: whoever disturbs the random state is found out."""
    return tiny.save_model(tmp_path_factory.mktemp("gpt2") / "student", "gpt2", num_layers=1)


def distilled(world: Path, folder: Path, **over: Any) -> Path:
    return distill(load_config(overrides=tiny.settings(world, **{**MIXED, **over})), folder, device="cpu").folder


@pytest.mark.parametrize("precision", ["fp32", "fp16-master"])
def test_a_run_that_looks_ends_bit_for_bit_like_one_that_does_not(
    world: Path, dropping: Path, tmp_path: Path, precision: str
) -> None:
    over = {
        "student__model": str(dropping),
        "precision__mode": precision,
        "train__gradient_accumulation_steps": 2,
        "train__batch_size": 2,
        "student__gradient_checkpointing": precision == "fp32",
    }
    blind = distilled(world, tmp_path / "blind", **over)
    looking = distilled(world, tmp_path / "looking", telemetry__gradient_steps=2, **over)
    a, b = (load_file(folder / "student" / "model.safetensors") for folder in (blind, looking))
    assert all(torch.equal(a[name], b[name]) for name in a)
    losses = [
        [event["train_loss"] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]
        for folder in (blind, looking)
    ]
    assert losses[0] == losses[1]
    assert [e["step"] for e in read_events(looking / "events.jsonl") if e["event"] == "gradients"] == [1, 3, 5, 7]
    assert not [e for e in read_events(blind / "events.jsonl") if e["event"] == "gradients"]


def test_the_parts_add_up_to_the_gradient_of_the_step(world: Path, tmp_path: Path) -> None:
    config = load_config(overrides=tiny.settings(world, **MIXED))
    device = find_device("cpu")
    with EventLog(tmp_path / "events.jsonl") as log:
        run = build_run(config, tmp_path, log, device=device, models=load_models(config, device))
        run.student.train()
        window = run.loader.window(0)
        found = term_gradients(run, RunState(), window)
        assert not list(run.optimizer.named_gradients())
        evidence, _lesson = attempt(run, RunState(), window)
    kd, ce = found["terms"]["kd"]["norm"], found["terms"]["ce"]["norm"]
    whole = math.sqrt(kd**2 + ce**2 + 2 * kd * ce * found["cosines"]["kd.ce"])
    assert whole == pytest.approx(evidence.grad_norm, rel=1e-5)
    assert sum(term["share"] for term in found["terms"].values()) == pytest.approx(1.0)
    assert -1.0 <= found["cosines"]["kd.ce"] <= 1.0


def test_a_term_without_weight_has_no_gradient_to_measure(world: Path, tmp_path: Path) -> None:
    folder = distilled(world, tmp_path / "run", telemetry__gradient_steps=4, objectives__ce__weight=0.0)
    (event, *_) = [e for e in read_events(folder / "events.jsonl") if e["event"] == "gradients"]
    assert set(event["terms"]) == {"kd"} and event["cosines"] == {}


def test_a_resumed_run_writes_each_measurement_once(world: Path, tmp_path: Path) -> None:
    over = {"telemetry__gradient_steps": 1, "train__max_steps": 6, "train__save_steps": 2}
    config = load_config(overrides=tiny.settings(world, **{**MIXED, **over}))
    limited = config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": 1e-9})})
    with pytest.raises(Interrupted):
        distill(limited, tmp_path / "run", device="cpu")
    folder = resume(tmp_path / "run", device="cpu", max_minutes=0.0).folder
    assert [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "gradients"] == list(range(1, 7))
    assert "of the gradient at the end" in write_report(folder).read_text(encoding="utf-8")
