"""The student-aware guide's JSON: its scheduler print and its table of the first phase, in our words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

from stillroom.config import load
from stillroom.telemetry.console import ConsoleView
from stillroom.telemetry.record import read_events
from stillroom.telemetry.wording import component_lines, start_lines
from stillroom.training.distill import distill
from stillroom.training.schedule import Curriculum, steps_of_run, warmup_of_run

GUIDE: dict[str, Any] = {
    "batch_size": 2,
    "gradient_accumulation_steps": 16,
    "learning_rate": 3e-5,
    "warmup_steps": 500,
    "max_length": 256,
    "temperature": 2.0,
    "kd_top_k": 256,
    "use_curriculum": True,
    "use_gradient_checkpointing": True,
    "eval_steps": 2000,
}


def written(folder: Path, **over: Any) -> Path:
    path = folder / "emergency_fix_config.json"
    path.write_text(json.dumps(GUIDE | over), encoding="utf-8")
    return path


def test_the_guides_scheduler_print_is_ours_with_the_last_window_named(tmp_path: Path) -> None:
    """The guide prints 74,823 batches, accumulation 16, 4,676 steps, warm-up 467 (10.0%), although it asks for 500."""
    train = load(written(tmp_path)).config.train
    steps = steps_of_run(74_823, train.gradient_accumulation_steps, train.epochs, train.max_steps)
    warmup = warmup_of_run(steps, train.warmup_steps, train.warmup_ratio, train.max_warmup_share)
    schedule = {
        "total_batches": 74_823,
        "gradient_accumulation": train.gradient_accumulation_steps,
        "optimizer_steps": steps,
        "warmup_steps": warmup,
        "learning_rate": train.learning_rate,
    }
    assert start_lines({"schedule": schedule})[:3] == [
        "total batches 74,823 | gradient accumulation 16 | optimizer steps 4,677 | warmup steps 467 (10.0%)",
        "optimizer steps of an epoch: 4,676 of 16 batches, and a last one of 7",
        "learning rate 3.00e-05 at its peak",
    ]


def test_a_longer_run_has_the_warmup_the_file_asks_for(tmp_path: Path) -> None:
    train = load(written(tmp_path)).config.train
    assert warmup_of_run(14_031, train.warmup_steps, train.warmup_ratio, train.max_warmup_share) == 500


def test_a_run_shorter_than_the_file_s_warmup_is_cut_to_a_tenth_and_not_refused(tmp_path: Path) -> None:
    train = load(written(tmp_path), overrides={"train.max_steps": 50}).config.train
    assert warmup_of_run(50, train.warmup_steps, train.warmup_ratio, train.max_warmup_share) == 5


def test_the_guides_table_of_phase_one_has_feature_and_attention_at_zero(tmp_path: Path) -> None:
    """The guide's step 2,000 of 74,823: kd 21.2 x 0.7 = 14.84; feature weight 0, scaled 0, of no part in the total."""
    loss_weights = Curriculum.of(load(written(tmp_path)).config).at(0.027)
    assert loss_weights.phase == "logits" and loss_weights.weights["kd"] == 0.7
    idle = [name for name, weight in loss_weights.weights.items() if weight == 0.0]
    terms = {"kd": {"raw": 21.2, "weight": 0.7, "scaled": 14.84, "share": 0.957}}
    event = {"step": 127, "train_loss": 15.5, "phase": loss_weights.phase, "terms": terms, "idle_terms": idle}
    assert component_lines(event, 2.0, 4_677) == [
        "  term                raw    weight      scaled   share",
        "  kd               21.200       0.7      14.840   95.7%",
        "  feature               -         0       0.000    0.0%",
        "  attention             -         0       0.000    0.0%",
        "  layerwise             -         0       0.000    0.0%",
        "  contrastive           -         0       0.000    0.0%",
        "  sum                                    15.500",
        "  phase logits, 2.7% of the run: a term of weight 0 is not computed",
        "  temperature 2  squared 4, part of raw kd",
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("legacy")
    tiny.save_trained(folder / "teacher", num_layers=1, steps=40)
    tiny.save_model(folder / "student", num_layers=1)
    tiny.save_text(folder / "train.jsonl")
    return folder


def test_a_run_of_the_guides_json_prints_both(world: Path, tmp_path: Path) -> None:
    names = {"teacher_model": str(world / "teacher"), "student_model": str(world / "student")}
    path = written(tmp_path, train_data=str(world / "train.jsonl"), max_length=32, epochs=3, **names)
    loaded, stream = load(path, overrides={"eval.samples": 0, "train.gradient_accumulation_steps": 8}), io.StringIO()
    view = ConsoleView("plain", stream, verbose=True)
    distill(loaded.config, tmp_path / "run", device="cpu", listeners=(view.handle,), notes=loaded.notes)
    steps = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["event"] == "step"]
    first = [step for step in steps if step["phase"] == "logits"]
    assert first and all(set(step["terms"]) == {"kd", "ce"} for step in first)
    assert all("feature" in step["idle_terms"] and "attention" in step["idle_terms"] for step in first)
    assert "idle_terms" not in steps[-1], "all terms have a weight in the last phase"
    printed = stream.getvalue()
    assert "| gradient accumulation 8 | optimizer steps" in printed and "and a last one of" in printed
    assert "  feature               -         0       0.000    0.0%" in printed
