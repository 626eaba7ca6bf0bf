"""Whole runs with a mixture of experts: every mode, faults in gates, resumption, the alarm and the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from stillroom.cli import app
from stillroom.config import load_config
from stillroom.config.schema import RouterConfig
from stillroom.core.errors import BrokenAtStart, Interrupted
from stillroom.report import write_report
from stillroom.teachers import GateOptions, RouterTeacher, merge_gates
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result

TRAINED = ["truth", "sar", "sar-joint"]
BASE = {"teacher__router__every": 1, "teacher__router__max_degradation": 5.0, "train__max_steps": 8}


def run(world: Path, out: Path, inject: str = "", preset: str | None = None, **over: Any) -> Result:
    config = load_config(preset=preset, overrides=tiny.settings(world, **{**BASE, **over}))
    return distill(config, out, device="cpu", inject=inject)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def notes(folder: Path) -> str:
    return "\n".join(event["text"] for event in events(folder, "note"))


def student_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


@pytest.mark.parametrize("mode", ["all-experts", "knowledge-augmentation", *TRAINED, "sar-transient", "sar-meta"])
def test_every_mode_runs_to_the_end(moe_world: Path, tmp_path: Path, mode: str) -> None:
    result = run(moe_world, tmp_path / "run", teacher__router__mode=mode)
    assert result.summary["status"] == "done" and result.summary["steps"] == 8
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    assert "2 gates that choose 2 of 4 experts" in notes(tmp_path / "run")
    told = events(tmp_path / "run", "router")
    assert [event["step"] for event in told] == [0, 4, 8]
    # Before the student's first update there is no step for sar-meta to look along.
    assert told[-1]["updates"] == (8 if mode in TRAINED else 7 if mode == "sar-meta" else 0)
    assert [len(layer["usage"]) for layer in told[-1]["layers"]] == [4, 4]
    assert all(sum(layer["usage"]) == pytest.approx(1.0, abs=1e-4) for layer in told[-1]["layers"])
    is_trained = told[-1]["updates"] > 0
    assert (told[-1]["kl_to_original"] > 0) == is_trained
    assert all((layer["drift"] > 0) == is_trained for layer in told[-1]["layers"])
    assert ("experimental" in notes(tmp_path / "run")) == (mode in ("sar-transient", "sar-meta"))


def test_a_dense_teacher_cannot_train_a_router(world: Path, tmp_path: Path) -> None:
    with refused(BrokenAtStart, "teacher.model", "LlamaForCausalLM") as caught:
        run(world, tmp_path / "run", teacher__router__mode="sar")
    assert caught.value.exit_code == 20


def test_a_gate_at_rest_leaves_the_student_as_a_frozen_teacher_does(moe_world: Path, tmp_path: Path) -> None:
    """With a learning rate of nothing, sar is a frozen teacher: what trains the gates never changes the targets."""
    run(moe_world, tmp_path / "frozen")
    run(moe_world, tmp_path / "sar", teacher__router__mode="sar", train__router_learning_rate=1e-30)
    frozen, sar = student_of(tmp_path / "frozen"), student_of(tmp_path / "sar")
    assert all(torch.equal(tensor, sar[name]) for name, tensor in frozen.items())


@pytest.mark.parametrize("precision", ["fp32", "fp16-split"])
@pytest.mark.parametrize("mode", ["sar", "sar-joint", "knowledge-augmentation"])
def test_a_resumed_run_equals_a_whole_one(moe_world: Path, tmp_path: Path, mode: str, precision: str) -> None:
    over = {"teacher__router__mode": mode, "precision__mode": precision, "teacher__router__load_balance_weight": 0.01}
    whole = run(moe_world, tmp_path / "whole", **over)
    with pytest.raises(Interrupted):
        run(moe_world, tmp_path / "parts", **over, train__max_minutes=1e-9)
    config = json.loads((tmp_path / "parts" / "config.json").read_text())
    config["config"]["train"]["max_minutes"] = 0.0
    (tmp_path / "parts" / "config.json").write_text(json.dumps(config))
    parts = resume(tmp_path / "parts", device="cpu")
    assert parts.summary["student"] == whole.summary["student"]
    first, second = student_of(tmp_path / "whole"), student_of(tmp_path / "parts")
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    if mode != "knowledge-augmentation":
        gates = [load_file(tmp_path / part / "router" / "gates.safetensors") for part in ("whole", "parts")]
        assert all(torch.equal(tensor, gates[1][name]) for name, tensor in gates[0].items())


@pytest.mark.parametrize("precision", ["fp32", "fp16-split"])
@pytest.mark.parametrize("mode", TRAINED)
def test_a_nan_in_a_gate_is_survived(moe_world: Path, tmp_path: Path, mode: str, precision: str) -> None:
    out = tmp_path / "run"
    result = run(moe_world, out, "router_nan@4", teacher__router__mode=mode, precision__mode=precision)
    assert result.summary["status"] == "done" and result.summary["steps"] == 8
    assert result.summary["router"]["mended"] == 1 and result.summary["router"]["skipped"] == 1
    assert result.summary["router"]["updates"] == 7, "those before the fault are counted too"
    assert result.summary["skipped"] == 0, "the student's step is kept: its labels are sound"
    mended = next(event for event in events(out, "router") if event["step"] == 4)
    assert mended["kl_to_original"] > 0 and mended["updates"] == 3, "mended gates are not the original ones"
    assert "a gate was not finite" in notes(out) and "injected router_nan" in notes(out)
    for path in [*out.glob("checkpoints/step-*/*.safetensors"), out / "router" / "gates.safetensors"]:
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), f"{path}: {name}"


@pytest.mark.parametrize("mode", ["all-experts", "knowledge-augmentation", *TRAINED, "sar-transient", "sar-meta"])
def test_a_teacher_that_answers_nan_is_counted_in_every_mode(moe_world: Path, tmp_path: Path, mode: str) -> None:
    run(moe_world, tmp_path / "run", "teacher_nan@2", teacher__router__mode=mode, train__max_steps=3)
    bad = [event["bad_teacher_rows"] for event in events(tmp_path / "run", "step")]
    assert bad[0] == bad[2] == 0 and bad[1] > 0
    assert "injected teacher_nan" in notes(tmp_path / "run")


def test_the_alarm_restores_and_freezes_a_teacher_that_got_worse(moe_world: Path, tmp_path: Path) -> None:
    """Pulled to an untrained student with nothing to hold it, a teacher gets worse at once."""
    result = run(
        moe_world, tmp_path / "run", teacher__router__mode="sar", teacher__router__truth_weight=0.0,
        teacher__router__anchor_weight=0.0, teacher__router__student_weight=3.0, train__router_learning_rate=0.5,
        teacher__router__max_degradation=0.02, train__max_steps=12,
    )  # fmt: skip
    told = events(tmp_path / "run", "router")
    alarms = [event for event in told if event["alarm"]]
    assert len(alarms) == 1 and alarms[0]["teacher_nll"] > alarms[0]["teacher_nll_start"] + 0.02
    assert result.summary["router"]["is_frozen"]
    assert told[-1]["is_frozen"] and told[-1]["teacher_nll"] == pytest.approx(told[0]["teacher_nll"], abs=1e-6)
    assert all(layer["drift"] == 0.0 for layer in told[-1]["layers"])
    assert "restored and stay frozen" in notes(tmp_path / "run")


def test_a_rollback_takes_the_gates_back_too(moe_world: Path, tmp_path: Path) -> None:
    over = {"teacher__router__mode": "sar", "guard__snapshot_steps": 2}
    clean = run(moe_world, tmp_path / "clean", **over)
    hurt = run(moe_world, tmp_path / "hurt", "nan_weight@6", **over)
    assert hurt.summary["rollbacks"] == 1
    assert hurt.summary["student"]["perplexity"] == clean.summary["student"]["perplexity"]
    gates = [load_file(tmp_path / name / "router" / "gates.safetensors") for name in ("clean", "hurt")]
    assert all(torch.equal(tensor, gates[1][name]) for name, tensor in gates[0].items())


@pytest.mark.parametrize("mode", ["sar", "sar-joint", "knowledge-augmentation"])
def test_looking_at_term_gradients_leaves_gates_and_student_alone(moe_world: Path, tmp_path: Path, mode: str) -> None:
    over = {"teacher__router__mode": mode, "objectives__ce__weight": 0.5, "objectives__kd__weight": 0.5}
    run(moe_world, tmp_path / "blind", **over)
    run(moe_world, tmp_path / "looking", telemetry__gradient_steps=2, **over)
    assert len(events(tmp_path / "looking", "gradients")) == 4
    sides = [tmp_path / "blind", tmp_path / "looking"]
    files = ["student/model.safetensors"] + (["router/gates.safetensors"] if mode in TRAINED else [])
    for file in files:
        one, two = (load_file(side / file) for side in sides)
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items()), file


@pytest.mark.parametrize("precision", ["fp32", "fp16-split"])
def test_the_builtin_mixture_survives_a_nan_and_resumes_bit_for_bit(
    moe_world: Path, tmp_path: Path, precision: str
) -> None:
    over = {
        "teacher__model": "builtin:moe-teacher", "student__model": "builtin:student", "precision__mode": precision,
        "teacher__router__probe_steps": 2, "teacher__router__force": True, "train__save_steps": 2,
        "eval__max_batches": 1, "eval__samples": 0,
    }  # fmt: skip
    whole = run(moe_world, tmp_path / "whole", "router_nan@1", preset="sar", **over)
    assert whole.summary["router"]["mended"] == 1 and whole.summary["router"]["updates"] == 7
    with pytest.raises(Interrupted):
        run(moe_world, tmp_path / "parts", "router_nan@1", preset="sar", train__max_minutes=1e-9, **over)
    parts = resume(tmp_path / "parts", device="cpu", max_minutes=0.0)
    assert parts.summary["student"] == whole.summary["student"]
    for file in ("student/model.safetensors", "router/gates.safetensors"):
        one, two = (load_file(tmp_path / side / file) for side in ("whole", "parts"))
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items()), file


def test_trained_gates_can_be_merged_into_the_teacher(moe_world: Path, tmp_path: Path) -> None:
    run(moe_world, tmp_path / "run", teacher__router__mode="truth")
    model = AutoModelForCausalLM.from_pretrained(moe_world / "teacher")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert merge_gates(model, tmp_path / "run" / "router") == 2
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"}
    with refused(BrokenAtStart, "router"):
        merge_gates(model, tmp_path / "run" / "router")


def test_the_probe_says_when_router_training_is_pointless(moe_world: Path, tmp_path: Path) -> None:
    over = {"teacher__router__mode": "sar", "teacher__router__probe_steps": 6}
    pointless = run(moe_world, tmp_path / "a", **over, teacher__router__probe_threshold=1.0)
    assert "pointless" in notes(tmp_path / "a") and "1.7 times" in notes(tmp_path / "a")
    assert pointless.summary["router"]["is_frozen"] and pointless.summary["router"]["updates"] == 0
    frozen = run(moe_world, tmp_path / "b")
    assert pointless.summary["student"] == frozen.summary["student"], "the run itself is that of a frozen teacher"
    forced = run(moe_world, tmp_path / "c", **over, teacher__router__probe_threshold=1.0, teacher__router__force=True)
    plain = run(moe_world, tmp_path / "d", teacher__router__mode="sar")
    assert forced.summary["router"]["updates"] == 8
    assert forced.summary["student"] == plain.summary["student"], "the probe leaves nothing behind"
    assert events(tmp_path / "c", "router_probe")[0]["steps"] == 6


def test_in_domain_the_probe_finds_nothing_to_gain(moe_world: Path, tmp_path: Path) -> None:
    """A teacher that knows the text well: no gate that would choose better is left to find."""
    teacher = tiny.save_trained(tmp_path / "teacher", "mixtral", width=32, num_layers=2, steps=400)
    over = {"teacher__model": str(teacher), "teacher__router__probe_steps": 40, "train__learning_rate": 5e-3}
    result = run(moe_world, tmp_path / "run", preset="sar", **over)
    found = result.summary["router"]["probe"]
    assert found["updates"] == 40 and not found["is_worthwhile"] and found["gain"] < 0.01
    assert result.summary["router"]["is_frozen"]


@pytest.mark.parametrize("option", ["teacher.placement=offload", "teacher.router.gradient_checkpointing=true"])
@pytest.mark.parametrize("mode", ["sar", "sar-joint"])
def test_offload_and_recomputation_change_no_number(moe_world: Path, tmp_path: Path, mode: str, option: str) -> None:
    run(moe_world, tmp_path / "plain", teacher__router__mode=mode)
    key, value = option.split("=")
    over = {key.replace(".", "__"): value if value == "offload" else True}
    run(moe_world, tmp_path / "other", teacher__router__mode=mode, **over)
    one, two = student_of(tmp_path / "plain"), student_of(tmp_path / "other")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


# -- the preset, what is told, and the report ------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16-split"])
def test_the_preset_runs_from_the_command_line(moe_world: Path, tmp_path: Path, precision: str) -> None:
    over = {"teacher__router__probe_steps": 4, "teacher__router__force": True, "precision__mode": precision}
    settings = tiny.settings(moe_world, **over)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={_toml(value)}")]
    out = CliRunner().invoke(
        app, ["distill", "--preset", "sar", "--out", str(tmp_path / "run"), "--no-progress", *words]
    )
    assert out.exit_code == 0, out.output
    assert "router at step 8" in out.output and "router probe" in out.output and "gates that choose" in out.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["router"]["updates"] == 4, "every second step"
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="router"' in page and "model.layers.1.mlp.gate" in page and "The probe found" in page
    assert "figure-router" in page


def _toml(value: object) -> str:
    return json.dumps(value)


def test_a_report_without_gates_does_not_speak_of_them(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run")
    write_report(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="router"' not in page and "figure-router" not in page


def test_a_gate_that_cannot_be_trained_is_said(tmp_path: Path) -> None:
    """Phi's weights depend on the logits only where two experts are close: with no such share, not at all."""
    said: list[str] = []
    torch.manual_seed(0)
    config = tiny.config("phimoe")
    config.router_jitter_noise = 0.0
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    RouterTeacher(
        model, RouterConfig(mode="truth"), vocab_size=tiny.VOCAB, device=torch.device("cpu"),
        options=GateOptions(learning_rate=1e-3), is_described=True, tell=said.append,
    )  # fmt: skip
    assert any("do not depend on the logits of 2 of 2 gates" in text for text in said)
