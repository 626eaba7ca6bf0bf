"""What a recipe does beside the seeds' own command lines: precision, harm, faults, resuming, and its equal command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_runs import Recipe

from stillroom.config import load_config, parse_assignments

# flags of the scaler guide, the mode they mean on a CPU, and the guide's message
MODES = [
    (["--model_dtype", "float32", "--autocast"], "fp16-mixed", "Mixed precision training enabled - FP16 computations"),
    (
        ["--model_dtype", "float16"],
        "fp16-split",
        "FP16 model parameters detected - using FP16 training with FP16 resid",
    ),
    (["--model_dtype", "float32", "--no-autocast"], "fp32", "FP32 training - gradient scaler disabled"),
    (["--model_dtype", "float32"], "fp32", "CUDA not available - gradient scaler disabled"),
]


@pytest.mark.parametrize(("flags", "mode", "message"), MODES, ids=["mixed", "float16", "float32", "cpu"])
def test_each_of_the_four_modes_is_chosen_announced_and_trains(
    recipe: Recipe, flags: list[str], mode: str, message: str
) -> None:
    ended = recipe("train_sar_kd_stable.py", "--train_steps", "3", *flags)
    assert ended.code == 0, ended.err
    assert message in ended.out and f"  precision {mode}: " in ended.out
    assert json.loads((ended.folder / "summary.json").read_bytes())["precision"] == mode


def test_harmful_settings_are_off_and_said_and_the_letter_of_the_seed_sets_them(recipe: Recipe) -> None:
    words = ["--train_steps", "3", "--model_dtype", "float16"]
    sane = recipe("train_sar_kd_ultra_stable.py", *words)
    assert sane.config("guard")["logit_clamp"] == sane.config("guard")["loss_clamp"] == 0.0
    assert sane.out.count("harmful in the guide: ") == 6 and "perplexity below 339.6" in sane.out
    letter = recipe("train_sar_kd_ultra_stable.py", *words, "--letter-of-the-seed")
    guard = letter.config("guard")
    assert (guard["logit_clamp"], guard["loss_clamp"], guard["skip_grad_norm"]) == (2.5, 5.0, 2.0)
    assert guard["max_rollbacks"] == 0 and guard["on_exhausted"] == "reset"
    assert letter.config("teacher")["router"]["mode"] == "sar-joint"
    assert letter.config("precision")["mode"] == "fp16-sr"
    assert "using FP16 training with stochastic rounding without gradient scaling" in letter.out
    assert all(step["loss_scale"] == 1.0 and step["clamped_fraction"] >= 0 for step in letter.events("step"))
    assert letter.out.count("letter of the guide: ") == 6


def test_a_nan_stops_the_quantumbench_script_with_what_was_found_and_what_the_seed_suggests(recipe: Recipe) -> None:
    ended = recipe("scripts/distill_quantumbench.py", "--inject", "inf_logit@2")
    assert ended.code == 22
    assert "TRAINING STOPPED DUE TO NUMERICAL INSTABILITY" in ended.out
    assert "NaN loss detected at step 2! Loss value: nan. Training stopped..." in ended.out
    assert "Cause: the kd term is nan" in ended.out
    suggested = ended.out.partition("Suggested fixes:")[2]
    assert "  1. nothing to change: --inject struck inf_logit at step 2" in suggested
    assert "Lower learning rate (try 1e-5 or lower)" in suggested and "Try --dry-run first to diagnose" in suggested


def test_a_bad_batch_is_reported_counted_and_survived_by_the_sar_scripts(recipe: Recipe) -> None:
    ended = recipe("train_sar_kd_fp16_safe.py", "--inject", "inf_logit@2")
    assert ended.code == 0, ended.err
    assert "Numerical issue: total_loss=nan, kd=nan, ce=nan" in ended.out
    assert "Step 2: skip: " in ended.out and "success_rate=75%" in ended.out
    records = [json.loads(line) for line in (ended.folder / "training.jsonl").read_text().splitlines()]
    assert [(record["train_loss"], record.get("train_loss_nonfinite")) for record in records][1] == (None, "nan")
    assert [record["consecutive_nans"] for record in records] == [0, 1, 0, 0]


def test_the_fp16_safe_script_stops_after_ten_bad_batches_in_a_row(recipe: Recipe) -> None:
    ended = recipe("train_sar_kd_fp16_safe.py", "--inject", "inf_logit@2x12")
    assert ended.code == 21
    assert ended.out.count("Numerical issue: total_loss=nan") == 10
    assert "Too many NaN batches, stopping training. NaN loss detected at step 2!" in ended.out


def test_the_quick_fixes_of_the_student_aware_seed_are_keys_of_its_file(recipe: Recipe, kitchen: Path) -> None:
    table = json.loads((kitchen / "configs" / "emergency_fix_config.json").read_bytes())
    fixes = {"use_curriculum": False, "max_length": 192, "attention_layers": 0, "batch_size": 1, "temperature": 1.5}
    path = kitchen / "configs" / "quick_fixes.json"
    path.write_text(json.dumps(table | fixes | {"max_grad_norm": 0.5}), encoding="utf-8")
    ended = recipe("train.py", "--config", str(path), "--epochs", "1")
    assert ended.code == 0, ended.err
    assert ended.config("train")["max_grad_norm"] == 0.5 and ended.config("curriculum")["phases"] == []


def test_the_seed_s_log_of_a_resumed_run_has_every_step_once(recipe: Recipe, tmp_path: Path) -> None:
    words = ["--train_steps", "4", "--output_dir", str(tmp_path / "run"), "--set", "train.max_steps=4"]
    stopped = recipe("train_sar_kd_stable.py", *words, "--set", "train.max_minutes=1e-9")
    assert stopped.code == 75
    log = tmp_path / "run" / "training.jsonl"
    assert len(log.read_text().splitlines()) < 4
    assert recipe("train_sar_kd_stable.py", *words).code == 0
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]


def test_the_command_that_a_recipe_prints_makes_the_same_configuration(recipe: Recipe) -> None:
    for script, *words in (
        ["train_sar_kd_ultra_stable.py", "--letter-of-the-seed", "--model_dtype", "float16"],
        ["scripts/distill_quantumbench.py", "--alpha", "0.7"],
        ["train.py", "--config", "configs/emergency_fix_config.json"],
    ):
        ended = recipe(script, *words)
        (line,) = (line for line in ended.out.splitlines() if line.startswith("the same as: stillroom distill "))
        said = shlex.split(line.removeprefix("the same as: stillroom distill "))
        sets = [said[place + 1] for place, word in enumerate(said) if word == "--set"]
        preset = said[said.index("--preset") + 1] if "--preset" in said else None
        path = Path(said[0]) if said[0].endswith(".json") else None
        same = load_config(path, preset=preset, overrides=parse_assignments(sets))
        assert same.to_dict() == ended.events("run_start")[0]["config"]


def test_a_diagnosis_writes_a_configuration_without_the_harm_it_found(recipe: Recipe, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed.toml"
    words = ["--config", "configs/emergency_fix_config.json", "--quick", "--fixed", str(fixed)]
    ended = recipe("diagnose_and_fix.py", *words, "--set", "guard.logit_clamp=2.5")
    assert ended.code == 0, ended.err
    assert "clamped logits" in ended.out and "--set 'guard.logit_clamp=0'" in ended.out
    assert load_config(fixed).guard.logit_clamp == 0.0


def test_questions_under_the_original_column_names_are_read(recipe: Recipe, kitchen: Path, tmp_path: Path) -> None:
    path = tmp_path / "original.jsonl"
    rows = [json.loads(line) for line in (kitchen / "data" / "quantumbench.jsonl").read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({"instruction": row["question"], "response": row["answer"]}) + "\n" for row in rows)
    )
    ended = recipe("scripts/distill_quantumbench.py", "--data-path", str(path))
    assert ended.code == 0, ended.err
    assert ended.config("data")["columns"] == {"prompt": "instruction", "completion": "response"}


def test_a_dense_teacher_has_no_gates_to_train(recipe: Recipe, world: Path, stand_ins: Callable[[str], None]) -> None:
    models = ["--teacher_model", str(world / "teacher"), "--student_model", str(world / "student")]
    ended = recipe("train_sar_kd_stable.py", *models, "--data", str(world / "train.jsonl"))
    assert ended.code == 0, ended.err
    assert ended.config("teacher")["router"]["mode"] == "frozen"
    assert "the teacher is not a mixture of experts" in ended.out and "stands in" not in ended.out


def test_a_flag_that_no_seed_has_is_refused_with_the_usage(recipe: Recipe) -> None:
    with pytest.raises(SystemExit) as end:
        recipe("train_sar_kd_stable.py", "--train_stepz", "3")
    assert end.value.code == 2
