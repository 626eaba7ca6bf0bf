"""Faults on purpose: the run ends well, says what happened, and nothing bad is saved."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from stillroom.config import load_config
from stillroom.config.schema import FAULTS, parse
from stillroom.core.errors import CheckpointUnusable, ConfigError, Diverged, LossScaleAtFloor, TooManySkips
from stillroom.core.types import Evidence
from stillroom.telemetry import read_events
from stillroom.training import recover
from stillroom.training.distill import distill, resume
from stillroom.training.faults import Injector
from stillroom.training.finish import Result
from stillroom.training.run import Hooks

Runs = Callable[..., Result]

BASE = {
    "train__max_steps": 40,
    "train__eval_steps": 20,
    "train__learning_rate": 1e-2,
    "guard__snapshot_steps": 5,
    "objectives__ce__weight": 0.5,
    "objectives__kd__weight": 0.5,
}


def run(world: Path, out: Path, inject: str = "", **over: Any) -> Result:
    config = load_config(overrides=tiny.settings(world, **{**BASE, **over}))
    return distill(config, out, device="cpu", inject=inject)


def guard_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "guard"]


def assert_all_saved_tensors_finite(folder: Path) -> None:
    files = [*folder.glob("checkpoints/step-*/*.safetensors"), *folder.glob("student/*.safetensors")]
    assert files
    for path in files:
        for name, tensor in load_file(path).items():
            assert not tensor.is_floating_point() or torch.isfinite(tensor).all(), f"{path.name}: {name}"


@pytest.mark.parametrize(
    ("fault", "actions"),
    [
        ("nan_weight@20", {"rollback"}),
        ("nan_embedding@17", {"rollback"}),
        ("huge_weight@20", {"rollback"}),
        ("inf_logit@20", {"skip"}),
        ("teacher_nan@20x3", set()),
        ("teacher_nan@15x22", {"fallback"}),
        ("all_masked@20", {"skip"}),
        ("bad_batch@20x3", {"skip"}),
        ("inf_grad@20", {"skip"}),
        ("nan_grad@20", {"skip"}),
        ("nan_moment@20", {"rollback"}),
        ("lr_spike@20x3", {"rollback"}),
    ],
)
def test_after_a_single_fault_the_student_is_better_than_before_and_all_saved_tensors_are_finite(
    world: Path, tmp_path: Path, fault: str, actions: set[str]
) -> None:
    result = run(world, tmp_path / "run", fault)
    assert result.summary["status"] == "done" and result.summary["steps"] == 40
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    events = guard_events(tmp_path / "run")
    assert {event["action"] for event in events} == actions
    assert_all_saved_tensors_finite(tmp_path / "run")
    notes = [e["text"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "note"]
    assert any(fault.split("@")[0] in text for text in notes), "the injection itself is in the log"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_nan_among_moments_in_eight_bits_is_rolled_back(world: Path, tmp_path: Path, optimizer: str) -> None:
    over = {
        "precision__moments": "int8",
        "train__optimizer": optimizer,
        "train__max_steps": 20,
        "train__eval_steps": 20,
    }
    result = run(world, tmp_path / "run", "nan_moment@12", **over)
    assert result.summary["status"] == "done" and result.summary["steps"] == 20
    assert [event["action"] for event in guard_events(tmp_path / "run")] == ["rollback"]
    assert_all_saved_tensors_finite(tmp_path / "run")


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"])
def test_after_many_faults_in_fp16_the_student_is_better_and_all_saved_tensors_are_finite(
    world: Path, tmp_path: Path, precision: str
) -> None:
    faults = "inf_logit@8,nan_weight@12,bad_batch@16x2,inf_grad@20,teacher_nan@24x2,nan_moment@28"
    result = run(world, tmp_path / "run", faults, precision__mode=precision)
    assert result.summary["steps"] == 40 and result.summary["success_rate"] < 1.0
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    assert_all_saved_tensors_finite(tmp_path / "run")


# The compiled kernel has a pass of its own for another temperature than one.
@pytest.mark.parametrize(("kernel", "temperature"), [("plain", 3.0), ("auto", 1.0), ("auto", 3.0)])
def test_random_tokens_are_skipped_where_labels_have_no_weight(
    world: Path, tmp_path: Path, kernel: str, temperature: float
) -> None:
    over = {"objectives__ce__weight": 0.0, "objectives__kd__weight": 1.0, "objectives__kd__temperature": temperature}
    over |= {"train__learning_rate": 6e-3, "train__max_steps": 45, "train__eval_steps": 45}
    run(world, tmp_path / "run", "bad_batch@40x2", objectives__kernel=kernel, **over)
    found = [(event["step"], event["action"]) for event in guard_events(tmp_path / "run")]
    assert found == [(40, "skip"), (40, "skip")], "the batches at fault, and no other"


@pytest.mark.parametrize("ce_weight", [0.0, 0.5])
def test_positions_taught_by_their_labels_are_told_once_and_counted(
    world: Path, tmp_path: Path, ce_weight: float
) -> None:
    over = {"objectives__ce__weight": ce_weight, "train__max_steps": 8, "train__eval_steps": 8}
    result = run(world, tmp_path / "run", "teacher_nan@3x2,teacher_nan@6", **over)
    events = read_events(tmp_path / "run" / "events.jsonl")
    bad = [event for event in events if event["event"] == "step" and event["bad_teacher_rows"]]
    assert [event["step"] for event in bad] == [3, 4, 6]
    assert result.summary["label_taught_rows"] == sum(event["bad_teacher_rows"] for event in bad) > 0
    told = [event["text"] for event in events if event["event"] == "note" and "by their labels" in event["text"]]
    assert len(told) == 1 and ("though" in told[0]) == (ce_weight == 0.0)
    for event in bad:
        assert event["fallback_loss"] > 0
        if not ce_weight:  # all of the step's loss: the teacher said nothing
            assert event["train_loss"] == pytest.approx(event["fallback_loss"] * 0.5, rel=1e-4)


def test_the_tutorial_s_faults_end_as_it_says(shared_run: Runs) -> None:
    """Its command with the demo's own models is run by the tests of the pages."""
    page = (Path(__file__).parents[2] / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8")
    (faults,) = re.findall(r"--inject (\S+)", page)
    folder = shared_run(faults, **BASE).folder
    events = [(event["step"], event["action"]) for event in guard_events(folder)]
    assert events == [(20, "rollback"), (30, "skip"), (30, "skip")]
    assert len(list((folder / "quarantine").glob("*.safetensors"))) == 2
    assert "step 20" in page and "step 30" in page


def test_a_clean_run_has_nothing_to_report(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", train__max_steps=60)
    assert guard_events(tmp_path / "run") == []
    assert result.summary["success_rate"] == 1.0
    assert not (tmp_path / "run" / "quarantine").exists()


def test_a_refused_attempt_does_not_count_as_an_update(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", "nan_grad@41", train__max_steps=41, train__eval_steps=40, checkpoint__keep=9)
    folder = tmp_path / "run" / "checkpoints"
    assert any(event["action"] == "skip" and event["step"] == 41 for event in guard_events(tmp_path / "run"))
    before = json.loads((folder / "step-000040" / "state.json").read_text())
    after = json.loads((folder / "step-000041" / "state.json").read_text())
    assert after["num_updates"] == before["num_updates"] + 1


def test_the_report_of_a_bad_step_names_tensor_and_samples(shared_run: Runs) -> None:
    first, second = guard_events(shared_run("nan_weight@10,nan_grad@20", **BASE).folder)
    assert "weight model.layers.0.mlp.down_proj.weight" in first["located"]
    assert "gradient of model.embed_tokens.weight" in second["located"]
    assert all(name.startswith("train.jsonl:") for name in second["sample_ids"])


def test_the_quarantine_holds_the_batch_and_its_story(shared_run: Runs) -> None:
    folder = shared_run("bad_batch@20", **BASE).folder / "quarantine"
    facts = json.loads((folder / "step-000020-attempt-000020.json").read_text())
    assert facts["verdict"]["action"] == "skip" and facts["evidence"]["loss"] > 0
    assert facts["batches"][0]["text"] and facts["batches"][0]["sample_ids"]
    tensors = load_file(folder / "step-000020-attempt-000020.safetensors")
    assert tensors["0.input_ids"].shape[0] == 4


def test_a_quarantined_batch_can_be_replayed(copied_run: Callable[..., Path]) -> None:
    from stillroom.training.replay import replay

    folder = copied_run("bad_batch@20", **BASE)
    before = (folder / "events.jsonl").read_bytes()
    result = replay(folder, 20, device="cpu")
    assert result["then"]["verdict"] == "skip" and result["now"]["loss"] > 0 and not result["now"]["located"]
    assert (folder / "events.jsonl").read_bytes() == before
    with pytest.raises(ConfigError) as caught:
        replay(folder, 21, device="cpu")
    assert "20" in caught.value.advice[0]


def test_rollback_rewinds_the_data_and_passes_over_what_was_bad(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", "nan_weight@22")
    steps = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step"]
    kept = [e["step"] for e in steps if e["verdict"] == "keep"]
    assert kept == [*range(1, 22), *range(21, 41)], "from step 22 back to the snapshot of step 20"


def test_strict_halts_at_the_first_value_that_is_not_finite(world: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged) as caught:
        run(world, tmp_path / "run", "inf_logit@10", guard__on_nonfinite="halt")
    assert caught.value.exit_code == 22 and caught.value.advice
    assert "step 10" in caught.value.where


def test_too_many_bad_steps_end_with_21(world: Path, tmp_path: Path) -> None:
    with pytest.raises(TooManySkips) as caught:
        run(world, tmp_path / "run", "nan_grad@10x50", guard__max_consecutive=5, train__save_steps=5)
    assert caught.value.exit_code == 21
    assert [event["action"] for event in guard_events(tmp_path / "run")] == [*["skip"] * 4, "halt"]
    assert_all_saved_tensors_finite(tmp_path / "run")


def test_spent_rollbacks_end_with_22(world: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged) as caught:
        run(world, tmp_path / "run", "nan_weight@10,nan_weight@11,nan_weight@12", guard__max_rollbacks=2)
    assert caught.value.exit_code == 22
    assert [event["action"] for event in guard_events(tmp_path / "run")] == ["rollback", "rollback", "halt"]
    assert_all_saved_tensors_finite(tmp_path / "run")


def test_the_reset_is_a_last_resort_and_works_once(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", "nan_weight@10,nan_weight@12", guard__max_rollbacks=1, guard__on_exhausted="reset")
    assert [event["action"] for event in guard_events(tmp_path / "run")] == ["rollback", "reset"]


def test_overflow_at_the_smallest_scale_ends_with_23(world: Path, tmp_path: Path) -> None:
    with pytest.raises(LossScaleAtFloor) as caught:
        run(
            world, tmp_path / "run", "inf_grad@1x50",
            precision__mode="fp16-split", precision__initial_loss_scale=4.0,
        )  # fmt: skip
    assert caught.value.exit_code == 23


def test_overflow_is_retried_on_the_same_batch(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", "inf_grad@10x2", precision__mode="fp16-split")
    steps = [e for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "step" and e["step"] == 10]
    assert [e["verdict"] for e in steps] == ["retry", "retry", "keep"]
    assert steps[0]["loss_scale"] == 4 * steps[2]["loss_scale"]


# -- disks and damaged files -----------------------------------------------------------------------------


def test_a_full_disk_in_the_middle_costs_no_step(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", "disk_full@20")
    assert result.summary["steps"] == 40
    notes = [e["text"] for e in read_events(tmp_path / "run" / "events.jsonl") if e["event"] == "note"]
    assert any("the run continues" in text for text in notes)


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    match kind:
        case "flip":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "truncate":
            path.write_bytes(data[: len(data) // 2])
        case "delete":
            path.unlink()
        case "empty":
            path.write_bytes(b"")


@pytest.fixture
def unfinished(copied_run: Callable[..., Path]) -> Path:
    """The folder of a run with two checkpoints that has not written its summary."""
    folder = copied_run()
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.parametrize("kind", ["flip", "truncate", "delete", "empty"])
@pytest.mark.parametrize("file", ["student.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_falls_back_one(shared_run: Runs, unfinished: Path, kind: str, file: str) -> None:
    damage(unfinished / "checkpoints" / "step-000008" / file, kind)
    again = resume(unfinished, device="cpu")
    assert again.summary["student"] == shared_run().summary["student"], "and the result is the same to the last bit"


def test_when_every_checkpoint_is_damaged_the_end_is_25(unfinished: Path) -> None:
    for path in unfinished.glob("checkpoints/step-*/student.safetensors"):
        damage(path, "flip")
    with pytest.raises(CheckpointUnusable) as caught:
        resume(unfinished, device="cpu")
    assert caught.value.exit_code == 25


def test_leftovers_of_an_interrupted_save_are_swept(unfinished: Path) -> None:
    leftover = unfinished / "checkpoints" / ".tmp-step-000099-1"
    leftover.mkdir()
    resume(unfinished, device="cpu")
    assert not leftover.exists()


# -- the language of --inject ----------------------------------------------------------------------------


def test_faults_are_parsed_and_mistakes_explained() -> None:
    assert [(f.name, f.step, f.left) for f in parse("nan_weight@40, teacher_nan@60x5")] == [
        ("nan_weight", 40, 1),
        ("teacher_nan", 60, 5),
    ]
    with pytest.raises(ConfigError) as caught:
        parse("nan_weigth@3")
    assert any("nan_weight" in advice for advice in caught.value.advice)
    with pytest.raises(ConfigError):
        parse("nan_weight")
    assert all(FAULTS.values())


@pytest.mark.parametrize(("dtype", "is_advised"), [("float16", True), ("auto", False), ("float32", False)])
def test_float32_is_advised_to_a_teacher_that_is_not_in_it(dtype: str, is_advised: bool) -> None:
    config = load_config(None, overrides={"teacher.dtype": dtype})
    stub: Any = SimpleNamespace(config=config, device=torch.device("cpu"), hooks=Hooks())
    evidence = Evidence(step=5, loss=math.nan, grad_norm=math.nan, num_targets=4, bad_teacher_rows=4)
    assert any("teacher.dtype" in text for text in recover._advice(stub, 5, evidence)) == is_advised


def test_a_halt_for_finite_losses_names_the_rate_first() -> None:
    config = load_config(None, overrides={"train.learning_rate": 0.02})
    stub: Any = SimpleNamespace(config=config, device=torch.device("cpu"), hooks=Hooks())
    first, *_ = recover._advice(stub, 5, Evidence(step=5, loss=9.0, grad_norm=1.0, num_targets=4))
    assert "train.learning_rate=0.002" in first and "0.02 is" in first
    first, *_ = recover._advice(stub, 5, Evidence(step=5, loss=math.nan, grad_norm=1.0, num_targets=4))
    assert "0.02 is" not in first


def test_a_halt_after_an_injected_fault_advises_nothing_else() -> None:
    stub: Any = SimpleNamespace(hooks=Injector("nan_weight@4"))
    assert stub.hooks.strikes("nan_weight", 4)
    told = recover._advice(stub, 5)
    assert len(told) == 1 and "nan_weight" in told[0]
