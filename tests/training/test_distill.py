"""Whole runs with tiny real models, through the same functions a user calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillroom.config import load_config
from stillroom.core.errors import DataError, Interrupted
from stillroom.metrics.evaluate import assess
from stillroom.telemetry import EVAL_KEYS, STEP_KEYS, read_events
from stillroom.telemetry.events import problems
from stillroom.training.distill import distill, resume
from stillroom.training.finish import Result
from stillroom.training.loop import Stop


def run(world: Path, out: Path, **over: Any) -> Result:
    return distill(load_config(overrides=tiny.settings(world, **over)), out, device="cpu")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "student").state_dict()


def assert_same_weights(one: Path, other: Path) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "fp32"), ("llama", "fp16-mixed"), ("gpt2", "fp16-mixed"), ("qwen3", "fp32"), ("mixtral", "fp16-mixed")],
)
def test_a_run_learns_and_leaves_what_the_contract_says(
    world: Path, tmp_path: Path, family: str, precision: str
) -> None:
    tiny.save_model(tmp_path / "teacher", family, width=48, seed=3)
    tiny.save_model(tmp_path / "student", family, width=32, num_layers=1, seed=4)
    over = {
        "teacher__model": str(tmp_path / "teacher"),
        "student__model": str(tmp_path / "student"),
        "precision__mode": precision,
        "objectives__ce__weight": 0.5,
        "objectives__kd__weight": 0.5,
    }
    result = run(world, tmp_path / "run", **over)
    summary = result.summary
    assert summary["status"] == "done" and summary["steps"] == 8 and summary["precision"] == precision
    assert summary["student"]["perplexity"] < summary["student_before"]["perplexity"]
    for row in ("teacher", "student_before", "student"):
        assert set(summary[row]) >= {"perplexity", "bits_per_byte", "kl", "agreement", "parameters"}
    assert summary["teacher"]["kl"] == pytest.approx(0.0, abs=1e-6)
    events = read_events(tmp_path / "run" / "events.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in steps if event["verdict"] == "keep"] == list(range(1, 9))
    assert all(set(event) >= set(STEP_KEYS) for event in steps)
    assert all(set(event) >= set(EVAL_KEYS) for event in evaluations)
    assert not [fault for event in events for fault in problems(event)]
    AutoTokenizer.from_pretrained(tmp_path / "run" / "student")
    assert weights(tmp_path / "run")


def test_a_short_run_has_no_more_than_ten_evaluations(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path / "run", train__max_steps=12, train__eval_steps=0, eval__max_batches=1, eval__samples=0)
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "eval"] == [0, 2, 4, 6, 8, 10, 12]


def test_eval_equals_train_on_the_same_batch(world: Path, tmp_path: Path) -> None:
    """The bug behind an evaluation of 95.9 against a training loss of 15.5 is impossible by construction."""
    data = tiny.save_text(tmp_path / "few.jsonl", count=4, seed=9)
    over = {
        "data__train": str(data),
        "data__eval": str(data),
        "data__packing": "rows",  # held-out records stand in rows of their own, so these are the same rows
        "train__batch_size": 64,
        "train__max_steps": 4,
        "train__eval_steps": 1,
        "train__learning_rate": 1e-12,  # the weights stand still, so before and after a step are the same
        "objectives__kd__temperature": 2.0,
        "objectives__kd__weight": {"start": 0.7, "end": 0.2},
        "objectives__ce__weight": {"start": 0.0, "end": 0.5, "begin": 0.4},
    }
    run(world, tmp_path / "run", **over)
    events = read_events(tmp_path / "run" / "events.jsonl")
    steps = {e["step"]: e for e in events if e["event"] == "step"}
    evaluations = {e["step"]: e for e in events if e["event"] == "eval" and e["step"] > 0}
    assert evaluations.keys() == steps.keys()
    for number, step in steps.items():
        assert evaluations[number]["objective"] == pytest.approx(step["train_loss"], rel=1e-6)
        assert evaluations[number]["terms"]["kd"]["weight"] == step["terms"]["kd"]["weight"]


def test_eight_micro_batches_equal_one(world: Path, tmp_path: Path) -> None:
    one = run(world, tmp_path / "one", train__batch_size=8, train__max_steps=3)
    many = run(world, tmp_path / "many", train__batch_size=1, train__gradient_accumulation_steps=8, train__max_steps=3)
    first = [e for e in read_events(one.folder / "events.jsonl") if e["event"] == "step"]
    second = [e for e in read_events(many.folder / "events.jsonl") if e["event"] == "step"]
    for a, b in zip(first, second, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed", "fp16-split", "fp16-sr", "fp16-master"])
def test_n_steps_equal_k_and_n_minus_k(
    world: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"precision__mode": precision, "train__gradient_accumulation_steps": 2}
    if precision.startswith("fp16"):
        over["precision__loss_scale_growth_steps"] = 3  # the scale and its count of good steps are restored too
    whole = run(world, tmp_path / "whole", **over)
    wanted = iter([False, False, False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted) as caught:
            run(world, tmp_path / "parts", **over)
    assert caught.value.exit_code == 75
    parts = resume(tmp_path / "parts", device="cpu")
    assert_same_weights(whole.folder, parts.folder)
    assert whole.summary["student"]["perplexity"] == parts.summary["student"]["perplexity"]
    steps, scales = (
        [[event[key] for event in read_events(result.folder / "events.jsonl") if event["event"] == "step"]
         for result in (parts, whole)]
        for key in ("step", "loss_scale")
    )  # fmt: skip
    assert steps[0] == steps[1] == list(range(1, 9)), "a resumed log has each step once"
    assert scales[0] == scales[1] and (precision == "fp32" or len(set(scales[0])) > 1)


def test_bf16_mixed_learns_without_scaling(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path / "run", precision__mode="bf16-mixed", objectives__ce__weight=1.0)
    assert result.summary["student"]["perplexity"] < result.summary["student_before"]["perplexity"]
    steps = [e for e in read_events(result.folder / "events.jsonl") if e["event"] == "step"]
    assert {e["loss_scale"] for e in steps} == {1.0}


def test_a_finished_run_is_returned_not_repeated(world: Path, tmp_path: Path) -> None:
    first = run(world, tmp_path / "run")
    assert not first.already_finished
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    assert run(world, tmp_path / "run").summary == first.summary
    heard: list[dict[str, Any]] = []
    again = resume(tmp_path / "run", device="cpu", listeners=(heard.append,))
    assert again.already_finished and ["already finished" in event["text"] for event in heard] == [True]
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before


def test_dropout_resumes_bit_for_bit(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 draws random numbers in every forward: they are part of the state."""
    tiny.save_model(tmp_path / "student", "gpt2", width=32, num_layers=1)
    config = json.loads((tmp_path / "student" / "config.json").read_text())
    assert config["resid_pdrop"] > 0
    whole = run(world, tmp_path / "whole", student__model=str(tmp_path / "student"))
    wanted = iter([False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "is_wanted", lambda _self: next(wanted, False))
        with pytest.raises(Interrupted):
            run(world, tmp_path / "parts", student__model=str(tmp_path / "student"))
    assert_same_weights(whole.folder, resume(tmp_path / "parts", device="cpu").folder)


def test_the_best_student_is_kept_not_the_last(world: Path, tmp_path: Path) -> None:
    result = run(
        world,
        tmp_path / "run",
        train__learning_rate=0.3,  # sends the student away after a good start, not so far that the guard steps in
        train__warmup_steps=6,
        train__eval_steps=1,
        guard__spike_z=1e6,
        objectives__ce__weight=1.0,
    )
    evaluations = [e for e in read_events(result.folder / "events.jsonl") if e["event"] == "eval" and e["step"] > 0]
    best = min(evaluations, key=lambda e: e["perplexity"] or float("inf"))  # null: above 1e30
    assert result.summary["best_step"] == best["step"] < 8
    assert result.summary["student"]["perplexity"] == pytest.approx(best["perplexity"], rel=1e-9)


def test_early_stopping_ends_the_run(world: Path, tmp_path: Path) -> None:
    result = run(
        world, tmp_path / "run", train__max_steps=30, train__eval_steps=2, train__early_stopping=1,
        train__learning_rate=0.2, guard__spike_z=1e6,
    )  # fmt: skip
    assert result.summary["steps"] < 30


def test_an_offloaded_teacher_teaches_the_same(world: Path, tmp_path: Path) -> None:
    near = run(world, tmp_path / "near")
    far = run(world, tmp_path / "far", teacher__placement="offload")
    assert_same_weights(near.folder, far.folder)


def test_gradient_checkpointing_changes_nothing(world: Path, tmp_path: Path) -> None:
    plain = run(world, tmp_path / "plain")
    saving = run(world, tmp_path / "saving", student__gradient_checkpointing=True)
    assert plain.summary["student"]["perplexity"] == pytest.approx(saving.summary["student"]["perplexity"], rel=1e-6)


def test_labels_alone_never_load_the_teacher(world: Path, tmp_path: Path) -> None:
    result = run(
        world, tmp_path / "run", teacher__model=str(tmp_path / "nowhere"),
        objectives__kd__weight=0.0, objectives__ce__weight=1.0,
    )  # fmt: skip
    assert "teacher" not in result.summary
    steps = [e for e in read_events(result.folder / "events.jsonl") if e["event"] == "step"]
    assert set(steps[0]["terms"]) == {"ce"}, "a term whose weight is 0 is not computed"


@pytest.mark.parametrize("key", ["data__train", "data__eval", "rollouts__prompts"])
def test_data_that_is_not_there_is_found_before_a_model_is_loaded(world: Path, tmp_path: Path, key: str) -> None:
    missing = str(tmp_path / "nothing.jsonl")
    over: dict[str, Any] = {"teacher__model": str(tmp_path / "no_model"), "student__model": str(tmp_path / "no_model")}
    over |= {"rollouts__max_new_tokens": 8} if key == "rollouts__prompts" else {}
    with refused(DataError, "", missing):
        run(world, tmp_path / "run", **over, **{key: missing})
    with refused(DataError, "", missing):
        assess(str(tmp_path / "no_model"), missing)


def test_a_student_from_a_configuration_depends_on_the_seed_alone(world: Path, tmp_path: Path) -> None:
    over = {"student__init": "random", "train__max_steps": 2, "train__eval_steps": 2}
    one = run(world, tmp_path / "one", **over)
    two = run(world, tmp_path / "two", **over)
    three = run(world, tmp_path / "three", **over, train__seed=5)
    assert_same_weights(one.folder, two.folder)
    with pytest.raises(AssertionError):
        assert_same_weights(one.folder, three.folder)
