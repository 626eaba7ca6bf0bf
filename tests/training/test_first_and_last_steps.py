"""Faults at the ends of a run, and runs that end no better than they began."""

from __future__ import annotations

import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from process_jobs import command
from refusals import refused
from safetensors.torch import load_file

from stillroom.cli import main
from stillroom.config import load_config
from stillroom.config.schema import FAULTS
from stillroom.core.errors import Diverged, NoBetterStudent
from stillroom.telemetry import read_events
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result, how_it_ended, result_or_error
from stillroom.training.run import RunState

BASE = {
    "train__max_steps": 20,
    "train__eval_steps": 10,
    "train__learning_rate": 1e-2,
    "objectives__ce__weight": 0.5,
    "objectives__kd__weight": 0.5,
}
# The student knows the text and the teacher does not: distillation makes it worse, gently.
# With some weight on the labels: a run without any does not fail for the likelihood of the data alone.
BACKWARDS = {
    "train__max_steps": 12,
    "train__eval_steps": 6,
    "train__learning_rate": 1e-3,
    "objectives__kd__weight": 0.95,
    "objectives__ce__weight": 0.05,
}


def run(world: Path, out: Path, inject: str = "", **over: Any) -> Result:
    config = load_config(overrides=tiny.settings(world, **{**BASE, **over}))
    return distill(config, out, device="cpu", inject=inject)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


def assert_ended_well(result: Result) -> None:
    """Finite, no worse than the start, and the events tell the same story as the summary."""
    summary = result.summary
    assert math.isfinite(summary["student"]["perplexity"])
    assert summary["student"]["perplexity"] <= summary["student_before"]["perplexity"] * (1 + 1e-9)
    for tensor in load_file(result.folder / "student" / "model.safetensors").values():
        assert torch.isfinite(tensor).all()
    steps = events(result.folder, "step")
    kept = sum(step["verdict"] == "keep" for step in steps)
    assert summary["success_rate"] == pytest.approx(kept / len(steps))
    actions = [guard["action"] for guard in events(result.folder, "guard")]
    assert actions.count("rollback") == summary["rollbacks"] and actions.count("retry") == summary["retried"]
    assert actions.count("skip") + actions.count("fallback") == summary["skipped"]


@pytest.fixture(scope="module")
def clean(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(world, tmp_path_factory.mktemp("clean") / "run")


@pytest.mark.parametrize(
    "fault", ["lr_spike@1x3", "lr_spike@2", "huge_weight@1", "huge_weight@2", "huge_weight@3", "nan_moment@1"]
)
def test_a_fault_in_the_first_steps_costs_nothing_but_time(
    world: Path, tmp_path: Path, clean: Result, fault: str
) -> None:
    """There are no statistics yet: what shows the fault is the canary, the weights, and a state to go back to."""
    result = run(world, tmp_path / "run", fault)
    assert_ended_well(result)
    assert result.summary["student"]["perplexity"] == clean.summary["student"]["perplexity"], "to the last bit"
    assert [event["action"] for event in events(result.folder, "guard")] == ["rollback"]


@pytest.mark.parametrize("fault", ["lr_spike@20", "huge_weight@20", "nan_moment@20"])
def test_a_fault_in_the_last_step_costs_nothing_but_time(
    world: Path, tmp_path: Path, clean: Result, fault: str
) -> None:
    result = run(world, tmp_path / "run", fault, train__eval_steps=20)
    assert_ended_well(result)
    assert result.summary["student"]["perplexity"] == clean.summary["student"]["perplexity"]


def test_a_run_killed_in_an_evaluation_after_a_rollback_ends_as_if_nothing_had_happened(
    world: Path, tmp_path: Path, clean: Result
) -> None:
    settings = [f"--set={key}={value}" for key, value in tiny.settings(world, **BASE).items()]
    words = ["distill", "--out", str(tmp_path / "run"), "--device", "cpu", "--no-progress", *settings]
    faults = "nan_weight@3,kill_in_eval@10"
    ended = command([*words, "--inject", faults]).wait()
    assert ended.code == -signal.SIGKILL, ended
    again = resume(tmp_path / "run", device="cpu")
    assert_ended_well(again)
    assert again.summary["student"]["perplexity"] == clean.summary["student"]["perplexity"]


def test_faults_after_a_rollback_leave_a_finite_student_no_worse_than_before(world: Path, tmp_path: Path) -> None:
    assert_ended_well(run(world, tmp_path / "run", "nan_weight@3,lr_spike@4,huge_weight@6,nan_weight@8"))


def test_a_resumed_run_judges_as_the_whole_one_does(world: Path, tmp_path: Path) -> None:
    """The reference of the canary comes back with the checkpoint: it is not learned anew from the resumed state."""
    whole = run(world, tmp_path / "whole", train__save_steps=5, guard__snapshot_steps=4)
    (tmp_path / "whole" / "summary.json").unlink()
    before = json.loads((tmp_path / "whole" / "checkpoints" / "step-000020" / "state.json").read_text())
    damaged = tmp_path / "whole" / "checkpoints" / "step-000020" / "state.json"
    damaged.write_text("{}")
    again = resume(tmp_path / "whole", device="cpu")
    after = json.loads(damaged.read_text())
    assert again.summary["student"] == whole.summary["student"]
    for state in (before, after):
        state["state"].pop("seconds")
        state.pop("events")  # the log of the resumed run has what it said on resuming
    assert after == before


# -- no better than before -------------------------------------------------------------------------------


def backwards(world: Path, **over: Any) -> dict[str, Any]:
    swapped = {"teacher__model": str(world / "student"), "student__model": str(world / "teacher")}
    return tiny.settings(world, **{**BACKWARDS, **swapped, **over})


def test_a_run_that_ends_worse_keeps_the_first_student_and_ends_with_22_each_time(world: Path, tmp_path: Path) -> None:
    config, folder = load_config(overrides=backwards(world)), tmp_path / "run"
    with pytest.raises(NoBetterStudent) as caught:
        distill(config, folder, device="cpu")
    assert caught.value.exit_code == 22 and caught.value.advice and isinstance(caught.value, Diverged)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["best_step"] == 0 and summary["steps"] == 12
    assert summary["student"]["perplexity"] == pytest.approx(summary["student_before"]["perplexity"])
    given, kept = (load_file(path / "model.safetensors") for path in (world / "teacher", folder / "student"))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in given.items())
    assert [(end["status"], end["exit_code"]) for end in events(folder, "run_end")] == [("diverged", 22)]
    before = (folder / "events.jsonl").read_bytes()
    for again in (lambda: distill(config, folder, device="cpu"), lambda: resume(folder, device="cpu")):
        with refused(NoBetterStudent, "run"):
            again()
    assert (folder / "events.jsonl").read_bytes() == before, "nothing was trained again"


def test_the_error_of_such_a_run_offers_each_setting_once_and_nothing_about_speed() -> None:
    advice = [
        {"severity": "problem", "advice": "lower it", "setting": "train.learning_rate=1"},
        {"severity": "problem", "advice": "lower it, again", "setting": "train.learning_rate=1"},
        {"severity": "warning", "advice": "read the data", "setting": ""},
        {"severity": "warning", "advice": "read the log", "setting": ""},
        {"severity": "hint", "advice": "stop other programs", "setting": ""},
    ]
    for given, wanted in (
        (advice, ["lower it", "read the data", "read the log"]),
        (["text of an older run"], ["text of an older run"]),
    ):
        summary = {"status": "diverged", "reason": "got worse", "advice": given}
        with pytest.raises(NoBetterStudent) as caught:
            result_or_error(Result(Path("run"), summary))
        assert list(caught.value.advice) == wanted


def test_the_command_line_writes_the_report_of_such_a_run(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["distill", "--out", str(tmp_path / "run"), "--device", "cpu", "--no-progress"]
    for key, value in backwards(world).items():
        words += ["--set", f"{key}={value}"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    printed = capsys.readouterr()
    assert caught.value.code == 22 and "the student got worse" in printed.err
    assert "check failed  held-out perplexity" in printed.out
    assert "took all its steps and got worse" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("applied", "last", "kept", "status", "has_advice"),
    [
        (40, 12.0, 12.0, "done", False),
        (40, 19.99, 19.99, "done", True),  # hardly moved
        (40, 20.05, 20.0, "done", True),  # noise
        (40, 25.0, 20.0, "diverged", True),
        (40, None, 20.0, "diverged", True),
        (5, 25.0, 20.0, "done", True),  # a dry run
        (5, None, 20.0, "diverged", True),
        (40, 25.0, 15.0, "done", False),  # better once: that one is kept
    ],
)
def test_how_a_run_ended(applied: int, last: float | None, kept: float, status: str, has_advice: bool) -> None:
    state = RunState(applied=applied, last_perplexity=last, best_step=applied if kept < 20.0 else 0)
    end = how_it_ended(state, kept, 20.0)
    assert end["status"] == status and bool(end["advice"]) == has_advice and bool(end["reason"]) == (status != "done")


def test_a_random_student_that_cannot_move_is_told_before_and_after(world: Path, tmp_path: Path) -> None:
    slow = run(world, tmp_path / "slow", train__learning_rate=3e-6, train__max_steps=4, train__eval_steps=4)
    notes = [event["text"] for event in events(slow.folder, "note")]
    assert any("knows nothing yet" in text and "--set train.learning_rate" in text for text in notes)
    assert any("hardly moved" in text for text in notes) and slow.summary["advice"]
    quick = run(world, tmp_path / "quick", train__learning_rate=1e-2, train__max_steps=10, train__eval_steps=10)
    assert not any("knows nothing yet" in event["text"] for event in events(quick.folder, "note"))


def test_a_teacher_that_hardly_weighs_is_told(world: Path, tmp_path: Path) -> None:
    over = {"train__max_steps": 2, "train__eval_steps": 2}
    trace = run(world, tmp_path / "run", objectives__kd__weight=0.01, objectives__ce__weight=0.99, **over)
    assert any("hardly any distillation" in event["text"] for event in events(trace.folder, "note"))


# -- the loss scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp16-mixed", "fp16-split"])
def test_fp16_finds_its_scale_before_the_first_step(world: Path, tmp_path: Path, precision: str) -> None:
    over = {"precision__mode": precision, "precision__initial_loss_scale": 2.0**30, "train__max_steps": 6}
    result = run(world, tmp_path / "run", **over, train__eval_steps=3)
    assert result.summary["retried"] == 0
    scales = [step["loss_scale"] for step in events(result.folder, "step")]
    assert len(scales) == 6 and len(set(scales)) == 1 and 1024 <= scales[0] < 2.0**30
    assert any(event["text"].startswith("loss scale") for event in events(result.folder, "note"))
    plain = run(world, tmp_path / "plain", **{**over, "precision__initial_loss_scale": scales[0]}, train__eval_steps=3)
    assert plain.summary["student"] == result.summary["student"], "the probe moves nothing"


# -- several faults at once ------------------------------------------------------------------------------

SURVIVABLE = sorted(name for name in FAULTS if not name.startswith("kill") and name not in ("router_nan", "oom"))
MODES = ("fp32", "bf16-mixed", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr")


def combination(seed: int) -> tuple[str, dict[str, Any]]:
    """Two or three faults at the steps where little is known or little is left, in some precision."""
    rng = random.Random(seed)
    steps = 12
    words = [
        f"{rng.choice(SURVIVABLE)}@{rng.choice((1, 2, 11, steps))}{rng.choice(('', 'x2', 'x3'))}"
        for _ in range(rng.choice((2, 3)))
    ]
    over = {
        "train__max_steps": steps,
        "train__eval_steps": 6,
        "precision__mode": rng.choice(MODES),
        "guard__snapshot_steps": rng.choice((5, 50)),
    }
    return ",".join(words), over


def run_combination(world: Path, out: Path, seed: int) -> Result:
    faults, over = combination(seed)
    return run(world, out, faults, **over)


@pytest.mark.parametrize("seed", range(4))  # two hundred more are slow tests
def test_any_faults_at_once_leave_a_finite_student_no_worse_than_before(world: Path, tmp_path: Path, seed: int) -> None:
    assert_ended_well(run_combination(world, tmp_path / "run", seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_more_faults_at_once_leave_a_finite_student_no_worse_than_before(
    world: Path, tmp_path: Path, seed: int
) -> None:
    assert_ended_well(run_combination(world, tmp_path / "run", seed))


@pytest.mark.parametrize("other", ["inf_grad", "nan_grad", "inf_logit", "lr_spike", "nan_weight", "teacher_nan"])
def test_a_batch_without_targets_and_another_fault_leave_a_finite_student(
    world: Path, tmp_path: Path, other: str
) -> None:
    assert_ended_well(run(world, tmp_path / "run", f"all_masked@11,{other}@11", train__max_steps=12))


def test_a_fault_that_cannot_strike_is_told(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", "nan_weight@500,nan_grad@0", train__max_steps=2, train__eval_steps=2)
    notes = [event["text"] for event in events(result.folder, "note")]
    assert sum("will not strike" in text and "steps 1 to 2" in text for text in notes) == 2
    assert result.summary["success_rate"] == 1.0


# -- before the first checkpoint -------------------------------------------------------------------------


def test_nothing_is_saved_before_there_is_something_to_lose(tmp_path: Path, shared_run: Any) -> None:
    saved = [event["step"] for event in events(shared_run(train__max_steps=8).folder, "checkpoint")]
    assert saved and min(saved) > 0


@pytest.mark.parametrize("inject", ["kill@4", "nan_weight@2,kill_after_mark@2"])
def test_a_run_killed_before_its_first_checkpoint_begins_again_and_ends_the_same(
    inject: str, world: Path, tmp_path: Path, shared_run: Any
) -> None:
    """After a rollback too, whose mark is then the only thing on the disk that tells of it."""
    over = {"train__max_steps": 6, "train__eval_steps": 3, "train__save_steps": 6}
    config = load_config(overrides=tiny.settings(world, **over))
    assert tiny.in_child(lambda: distill(config, tmp_path / "run", device="cpu", inject=inject)) == -signal.SIGKILL
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    result, whole = resume(tmp_path / "run", device="cpu"), shared_run(**over)
    for name in ("perplexity", "kl"):
        assert result.summary["student"][name] == whole.summary["student"][name]
    assert [event["step"] for event in events(result.folder, "step")] == [1, 2, 3, 4, 5, 6]
    assert len(events(result.folder, "teacher_eval")) == 1
