"""Inner objectives in whole runs: one step, phases, projectors in state, and what is left of them at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config import load_config
from stillroom.config.load import unread
from stillroom.core.errors import ConfigError, Interrupted
from stillroom.telemetry import read_events
from stillroom.training.checkpoint import CheckpointStore
from stillroom.training.distill import distill, resume
from stillroom.training.evaluate import evaluate
from stillroom.training.run import Run, RunState, capture, restore
from stillroom.training.step import attempt, train_step

ALL = {f"objectives.{name}.weight": 0.1 for name in ("feature", "attention", "layerwise", "contrastive")}
ALL |= {"objectives.ce.weight": 0.3, "objectives.kd.weight": 0.7}
RAMPS = {
    f"objectives.{name}.weight": {"start": 0.0, "end": 0.1, "begin": begin, "until": begin + 0.2}
    for name, begin in (("feature", 0.3), ("attention", 0.3), ("layerwise", 0.6), ("contrastive", 0.6))
}
PHASES = [{"name": "logits", "until": 0.3}, {"name": "features", "until": 0.6}, {"name": "all", "until": 1.0}]


def projectors(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.mix.projectors.state_dict().items()}


# -- one step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-split"])
def test_a_step_with_inner_terms_reads_from_the_device_once(make_run: Any, count_reads: Any, precision: str) -> None:
    run, state = make_run({**ALL, "precision.mode": precision}), RunState()
    train_step(run, state, run.loader.window(0))
    reads = count_reads()
    outcome = train_step(run, state, run.loader.window(1))
    assert outcome.verdict.action == "keep" and len(outcome.terms) == 6
    assert reads == ["tolist"]


@pytest.mark.parametrize("precision", ["fp32", "fp16-master", "fp16-split", "fp16-sr", "fp16-mixed"])
def test_projectors_are_trained_in_fp32_whatever_the_student_is_kept_in(make_run: Any, precision: str) -> None:
    run, state = make_run({**ALL, "precision.mode": precision}), RunState()
    before = projectors(run)
    for index in range(3):
        assert train_step(run, state, run.loader.window(index)).verdict.action == "keep"
    after = projectors(run)
    assert set(before) == {f"{name}_0_1.weight" for name in ("feature", "layerwise", "contrastive")}
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_projectors_have_a_rate_of_their_own(make_run: Any) -> None:
    assert make_run({**ALL, "train.projector_learning_rate": 0.5}).optimizer.rates == {
        "student": 3e-3,
        "projectors": 0.5,
    }
    assert make_run(ALL).optimizer.rates == {"student": 3e-3, "projectors": 3e-3}


@pytest.mark.parametrize("packing", ["blocks", "rows"])
def test_accumulated_gradients_equal_those_of_one_batch(make_run: Any, packing: str) -> None:
    over = {**ALL, "objectives.contrastive.weight": 0.0, "data.packing": packing}
    one = make_run({**over, "train.batch_size": 8})
    many = make_run({**over, "train.batch_size": 1, "train.gradient_accumulation_steps": 8})
    seen = [attempt(run, RunState(), run.loader.window(0))[0] for run in (one, many)]
    for name, value in seen[0].terms.items():
        assert seen[1].terms[name] == pytest.approx(value, rel=1e-6), name
    for (name, a), (_same, b) in zip(one.optimizer.named_gradients(), many.optimizer.named_gradients(), strict=True):
        assert torch.allclose(a, b, atol=1e-5 * float(a.abs().max()), rtol=0), name


@pytest.mark.parametrize("applied", [0, 4, 7])
def test_eval_equals_train_in_every_phase(make_run: Any, applied: int) -> None:
    run = make_run({**RAMPS, "objectives.ce.weight": 0.3, "curriculum.phases": PHASES})
    state = RunState(applied=applied)
    window = run.loader.window(0)
    evidence, loss_weights = attempt(run, state, window)
    result = evaluate(
        run.student, window, precision=run.precision, teacher=run.teacher, mix=run.mix, loss_weights=loss_weights
    )
    assert loss_weights.phase == {0: "logits", 4: "features", 7: "all"}[applied]
    assert result.terms.keys() == evidence.terms.keys()
    assert len(result.terms) == {0: 2, 4: 4, 7: 6}[applied]
    for name, term in result.terms.items():
        assert term.raw == pytest.approx(evidence.terms[name], rel=1e-6)
    assert result.objective == pytest.approx(evidence.loss, rel=1e-6)


# -- state -----------------------------------------------------------------------------------------------


def test_a_rollback_takes_the_projectors_back(make_run: Any) -> None:
    run, state = make_run(ALL), RunState()
    train_step(run, state, run.loader.window(0))
    saved, before = capture(run, state).copied(), projectors(run)
    train_step(run, state, run.loader.window(1))
    assert any(not torch.equal(before[name], tensor) for name, tensor in projectors(run).items())
    restore(run, state, saved, keeps_history=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in projectors(run).items())


def test_a_projector_that_is_not_finite_is_a_broken_state_and_not_a_bad_batch(make_run: Any) -> None:
    run, state = make_run(ALL), RunState()
    run.snapshots.keep(capture(run, state))
    train_step(run, state, run.loader.window(0))
    with torch.no_grad():
        next(run.mix.projectors.parameters())[0, 0] = float("nan")
    outcome = train_step(run, state, run.loader.window(1))
    assert outcome.verdict.action == "rollback"
    assert train_step(run, state, run.loader.window(0)).verdict.action == "keep"


def test_a_resumed_run_is_the_same_to_the_last_bit(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), **RAMPS, "train.max_steps": 10, "train.save_steps": 5, "train.eval_steps": 5}
    config = load_config(overrides={**over, "curriculum.phases": PHASES})
    whole = distill(config, tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        distill(
            config.model_copy(update={"train": config.train.model_copy(update={"max_minutes": 1e-6})}),
            tmp_path / "parts",
            device="cpu",
        )
    for _part in range(12):
        try:
            resume(tmp_path / "parts", device="cpu", max_minutes=1e-6)
            break
        except Interrupted:
            continue
    ends = [CheckpointStore(folder / "checkpoints").load_newest() for folder in (whole.folder, tmp_path / "parts")]
    assert ends[0] is not None and ends[1] is not None and ends[0].step == ends[1].step == 10
    assert set(ends[0].tensors) >= {"student", "projectors", "optimizer"}
    for group in ("student", "projectors", "optimizer"):
        for name, tensor in ends[0].tensors[group].items():
            assert torch.equal(tensor, ends[1].tensors[group][name]), f"{group} {name}"


# -- whole runs ------------------------------------------------------------------------------------------


def test_the_student_aware_preset_runs_its_three_phases(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), "train.gradient_accumulation_steps": 1, "train.max_steps": 20}
    config = load_config(preset="student-aware", overrides={**over, "train.eval_steps": 10})
    result = distill(config, tmp_path / "run", device="cpu")
    events = read_events(result.folder / "events.jsonl")
    steps = {event["step"]: event for event in events if event["event"] == "step"}
    assert set(steps[1]["terms"]) == {"kd", "ce"} == set(steps[6]["terms"]), "phase 1 looks inside neither model"
    assert steps[1]["terms"]["kd"]["weight"] == 0.7
    assert set(steps[10]["terms"]) == {"kd", "ce", "feature", "attention"}
    assert set(steps[20]["terms"]) == {"kd", "ce", "feature", "attention", "layerwise", "contrastive"}
    changes = [(event["from"], event["to"]) for event in events if event["event"] == "phase"]
    assert changes == [("logits", "features"), ("features", "all")]
    assert result.summary["status"] == "done"
    student = AutoModelForCausalLM.from_pretrained(result.folder / "student")
    assert not [name for name, _tensor in student.named_parameters() if "projector" in name]
    assert sum(p.numel() for p in student.parameters()) == result.summary["student"]["parameters"]


def test_a_run_whose_teacher_and_student_differ_in_everything(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "teacher", "gpt2", width=48, num_layers=3)
    tiny.save_model(tmp_path / "student", "qwen3", width=32, num_layers=2)
    tiny.save_text(tmp_path / "train.jsonl")
    over = {**tiny.settings(tmp_path), **ALL, "precision.mode": "fp16-split", "student.gradient_checkpointing": True}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    events = read_events(result.folder / "events.jsonl")
    kept = [event for event in events if event["event"] == "step" and event["verdict"] == "keep"]
    assert len(kept) == 8 and len(kept[-1]["terms"]) == 6 and result.summary["skipped"] == 0
    assert kept[-1]["terms"]["layerwise"]["raw"] < kept[0]["terms"]["layerwise"]["raw"]


def test_rows_without_contrast_are_counted_and_said(world: Path, tmp_path: Path) -> None:
    over = {**tiny.settings(world), "objectives.contrastive.weight": 0.1, "train.batch_size": 1, "train.max_steps": 2}
    result = distill(load_config(overrides=over), tmp_path / "run", device="cpu")
    events = read_events(result.folder / "events.jsonl")
    assert [event["rows_without_contrast"] for event in events if event["event"] == "step"] == [1, 1]
    assert any("nothing to contrast" in event["text"] for event in events if event["event"] == "note")


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "name"),
    [
        ({"objectives.feature.weight": -1.0}, "objectives.feature.weight"),
        ({"objectives.feature.layers": "first"}, "objectives.feature.layers"),
        ({"objectives.feature.layers": [[1, 2, 3]]}, "objectives.feature.layers.0"),
        ({"student.init": "shrink", "student.shrink.layers": "two"}, "student.shrink.layers"),
        ({"student.init": "shrink", "student.shrink.layers": -1}, "student.shrink.layers"),
        ({"objectives.contrastive.temperature": 0}, "temperature"),
        ({"objectives.layerwise.weight": 0.1, "teacher.cache": "somewhere"}, "layerwise"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_read(over: dict[str, Any], name: str) -> None:
    with refused(ConfigError, "", name):
        load_config(overrides=over)


def test_a_layer_that_does_not_exist_is_refused_before_training(make_run: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        make_run({"objectives.feature.weight": 0.1, "objectives.feature.layers": [[0, 2]]})
    assert "no layer 2" in caught.value.what and caught.value.where == "objectives.feature.layers"


def test_settings_without_effect_are_said(make_run: Any) -> None:
    run = make_run({"objectives.attention.weight": 0.1, "objectives.attention.attention_layers": 0})
    assert "the attention term is off" in run.mix.planned.notes[0] and not run.mix.planned.objectives
    unread_keys = [key for key, _why in unread(make_run({"train.projector_learning_rate": 0.1}).config)]
    assert "train.projector_learning_rate" in unread_keys
