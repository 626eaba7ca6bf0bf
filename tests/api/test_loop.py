"""Laws of a caller's own loop, of continued runs and of the functions next to `distill`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from given_objects import are_equal, weights
from process_jobs import environment
from refusals import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

import stillroom
from stillroom.core.errors import ConfigError
from stillroom.telemetry import read_events


def config(world: Path, **over: Any) -> stillroom.Config:
    settings = {"train__max_steps": 6, "train__eval_steps": 3, "eval__samples": 0, **over}
    return stillroom.load_config(overrides=tiny.settings(world, **settings))


def evaluations(folder: Path) -> list[int]:
    return [event["step"] for event in read_events(folder / "events.jsonl") if event["event"] == "eval"]


DROPOUT = {"student__adapter__rank": 4, "student__adapter__dropout": 0.3}  # a run that draws random numbers


def test_a_loop_that_only_looks_is_distill_whatever_it_draws(world: Path, tmp_path: Path) -> None:
    whole = stillroom.distill(config(world, **DROPOUT), tmp_path / "whole", device="cpu")
    run = stillroom.training(config(world, **DROPOUT), tmp_path / "loop", device="cpu")
    torch.manual_seed(5)
    drawn = [(step, float(torch.rand(()))) for step in run]
    torch.manual_seed(5)
    assert [value for _, value in drawn] == [float(torch.rand(())) for _ in drawn], "the run leaves them alone"
    assert [step.number for step, _ in drawn] == [1, 2, 3, 4, 5, 6] and drawn[0][0].num_steps == 6
    assert run.result is not None and run.result.summary["status"] == "done"
    assert are_equal(weights(whole.folder), weights(run.folder))


@pytest.mark.parametrize("way", ["stop", "break", "error", "evaluated"])
def test_a_loop_that_is_left_saves_and_is_resumed_bit_for_bit(world: Path, tmp_path: Path, way: str) -> None:
    whole = stillroom.distill(config(world), tmp_path / "whole", device="cpu")
    at = 3 if way == "evaluated" else 2  # the evaluation of step 3 is then done by the resumed run
    try:
        with stillroom.training(config(world), tmp_path / "cut", device="cpu") as run:
            for step in run:
                if step.number == at and way == "stop":
                    step.stop()
                elif step.number == at and way == "error":
                    raise KeyError("of the caller")
                elif step.number == at:
                    break
    except KeyError:
        assert way == "error"
    assert run.result is not None and run.result.summary["status"] == "interrupted"
    assert "stillroom.resume" in run.result._repr_html_()
    events = read_events(tmp_path / "cut" / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, at + 1))
    resumed = stillroom.resume(tmp_path / "cut", device="cpu")
    assert are_equal(weights(whole.folder), weights(resumed.folder))
    assert whole.summary["student"] == resumed.summary["student"]
    assert evaluations(whole.folder) == evaluations(resumed.folder) == [0, 3, 6]


def test_a_loop_without_a_name_is_saved_when_it_is_left(world: Path, tmp_path: Path) -> None:
    for step in stillroom.training(config(world), tmp_path / "run", device="cpu"):
        assert step.verdict == "keep" and set(step.terms) == {"kd"} and step.tokens > 0
        break
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["exit_code"] == 75
    assert stillroom.resume(tmp_path / "run", device="cpu").summary["steps"] == 6


def test_a_program_that_ends_with_an_error_in_its_loop_has_saved(world: Path, tmp_path: Path) -> None:
    code = f"""
import stillroom
run = stillroom.training(stillroom.load_config(overrides={tiny.settings(world, eval__samples=0)!r}),
                         {str(tmp_path / "run")!r}, device="cpu")
for step in run:
    raise KeyError("of the caller")
"""
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "of the caller" in ended.stderr
    assert read_events(tmp_path / "run" / "events.jsonl")[-1]["exit_code"] == 75
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_weight_that_was_set_is_kept_by_resume(world: Path, tmp_path: Path) -> None:
    both = {"objectives__kd__weight": 1.0, "objectives__ce__weight": 0.5}

    def run(out: str, last: int) -> stillroom.Training:
        training = stillroom.training(config(world, **both), tmp_path / out, device="cpu")
        for step in training:
            assert step.weights["ce"] == (0.5 if step.number <= 2 else 0.125)
            if step.number == 2:
                step.set_weight("ce", 0.125)
                with refused(ConfigError, "set_weight", "hidden"):
                    step.set_weight("hidden", 1.0)
                with refused(ConfigError, "set_weight", "ce"):
                    step.set_weight("ce", float("nan"))
            if step.number == last:
                step.stop()
        return training

    run("whole", 99)
    run("cut", 4)
    resumed = stillroom.resume(tmp_path / "cut", device="cpu")
    assert are_equal(weights(tmp_path / "whole"), weights(resumed.folder))
    events = read_events(resumed.folder / "events.jsonl")
    assert [(one["step"], one["weight"]) for one in events if one["event"] == "weight_set"] == [(2, 0.125)]
    shown = [one["terms"]["ce"]["weight"] for one in events if one["event"] == "step"]
    assert shown == [0.5, 0.5, 0.125, 0.125, 0.125, 0.125]
    assert any(one["event"] == "phase" for one in events), "the guard begins its statistics again"


def test_a_weight_that_was_set_survives_a_rollback_behind_it(world: Path, tmp_path: Path) -> None:
    """The steps before it are taken again with it: what a caller asked for is not undone by a fault."""
    both = {"objectives__kd__weight": 1.0, "objectives__ce__weight": 0.5}
    run = stillroom.training(config(world, **both), tmp_path / "run", device="cpu", inject="nan_weight@4")
    taken = list[tuple[int, str, float]]()
    for step in run:
        taken.append((step.number, step.verdict, step.weights["ce"]))
        if step.number == 3 and step.weights["ce"] == 0.5:
            step.set_weight("ce", 0.125)
    returned = next(place for place, (_, verdict, _) in enumerate(taken) if verdict == "rollback")
    again = taken[returned + 1 :]
    assert again[0][0] <= 3 and [number for number, _, _ in again] == list(range(again[0][0], 7)), "behind step 3"
    assert [weight for _, _, weight in taken] == [0.5] * 3 + [0.125] * (len(taken) - 3)
    events = read_events(run.folder / "events.jsonl")
    assert [one["step"] for one in events if one["event"] == "weight_set"] == [3], "it is not asked for again"
    saved = sorted((run.folder / "checkpoints").glob("step-*"))[-1]
    assert '"set_weights": {"ce": 0.125}' in " ".join((saved / "state.json").read_text().split())


def test_a_finished_run_continues_to_more_steps(world: Path, tmp_path: Path) -> None:
    first = stillroom.distill(config(world), tmp_path / "run", device="cpu")
    with refused(ConfigError, "max_steps", "6"):
        stillroom.resume(tmp_path / "run", max_steps=6, device="cpu")
    assert stillroom.resume(tmp_path / "run", device="cpu").already_finished, "a refusal changes nothing"
    longer = stillroom.resume(tmp_path / "run", max_steps=9, device="cpu")
    assert longer.summary["steps"] == 9 and longer.summary["student_before"] == first.summary["student_before"]
    assert longer.summary["student"]["perplexity"] <= first.summary["student"]["perplexity"]
    assert json.loads((tmp_path / "run" / "summary-6.json").read_text()) == json.loads(json.dumps(first.summary))
    steps = [event["step"] for event in read_events(longer.folder / "events.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, 10))
    with stillroom.training(config(world), tmp_path / "cut", device="cpu") as run:
        next(run)
    with refused(ConfigError, "max_steps", "not finished"):
        stillroom.resume(tmp_path / "cut", max_steps=9, device="cpu")


def test_an_interrupt_in_a_notebook_gives_a_result(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages: list[str] = []
    monkeypatch.setattr("stillroom.telemetry.console.is_notebook", lambda: True)
    monkeypatch.setattr(
        "stillroom.telemetry.console.UpdatedDisplay.show", lambda _self, _text, page: pages.append(page)
    )
    result = stillroom.distill(config(world, train__max_minutes=1e-9), tmp_path / "run", device="cpu")
    assert result.summary["status"] == "interrupted" and result.folder == tmp_path / "run"
    assert stillroom.resume(result.folder, max_minutes=0, device="cpu").summary["steps"] == 6
    assert "<polyline" in pages[-1] and "<script" not in pages[-1]


# -- a PEFT model as a student -----------------------------------------------------------------------------


def adapted(world: Path, **over: Any) -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], **over}
    tokenizer = AutoTokenizer.from_pretrained(world / "teacher")
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora)), tokenizer


def test_a_peft_model_is_a_student_with_an_adapter(world: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(world)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given: dict[str, Any] = {"teacher": str(world / "teacher"), "data": str(world / "train.jsonl"), "device": "cpu"}
    quick = {"train.max_steps": 2, "data.max_length": 32, "eval.samples": 0, "train.batch_size": 4}
    result = stillroom.distill(student=(model, tokenizer), out=tmp_path / "run", settings=quick, **given)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["student"]["adapter"]
    assert (stored["rank"], stored["alpha"], stored["dropout"]) == (4, 8.0, 0.1)
    assert stored["targets"] == ["q_proj", "v_proj"]
    assert (result.student_path / "adapter" / "adapter_model.safetensors").is_file()
    assert are_equal(before, dict(model.state_dict())), "the object stays as it was"


def test_an_adapter_that_settings_cannot_say_is_refused(world: Path) -> None:
    trained, tokenizer = adapted(world)
    with torch.no_grad():
        next(value for name, value in trained.named_parameters() if ".lora_B." in name).fill_(0.5)
    for model, told in ((trained, "lora_B"), (adapted(world, rank_pattern={"q_proj": 2})[0], "rank_pattern")):
        with refused(ConfigError, "student", told):
            stillroom.distill(teacher="builtin:teacher", student=(model, tokenizer), data=["a text"])


# -- plan, doctor, data, cache and export as functions -----------------------------------------------------


def test_the_tools_are_functions_too(world: Path, tmp_path: Path) -> None:
    chosen = config(world)
    plan = stillroom.plan(chosen, gpu="T4", quick=True)
    assert plan.is_possible and "T4" in str(plan)
    report = stillroom.examine(chosen, device="cpu", quick=True)
    assert report.of("red") == () and str(report)
    seen = stillroom.preview(chosen, rows=2)
    assert len(seen["rows"]) == 2 and all(len(piece) == 2 for piece in seen["rows"][0]["pieces"])
    cache = stillroom.write_cache(chosen, tmp_path / "cache", device="cpu")
    assert cache["rows"] > 0
    trained = stillroom.distill(chosen, tmp_path / "run", settings={"teacher.cache": str(tmp_path / "cache")})
    exported = stillroom.export_student(trained.folder, tmp_path / "out", form="float16")
    assert exported.form == "float16" and (tmp_path / "out" / "config.json").is_file()
