"""Every command of the seeds runs as it is written, to the end, and prints what the seed promises."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import recipe_runs
from recipe_runs import Ended, Recipe

LIST = Path(__file__).parent / "seed_commands.txt"
LINES = [line.removeprefix("prose: ") for line in LIST.read_text(encoding="utf-8").splitlines() if line[:1] not in "#"]
PIPED = [line for line in LINES if "|" in line]
COMMANDS = [line for line in LINES if "|" not in line]
SAR = [line for line in COMMANDS if "train_sar_kd" in line]
QUANTUM = [line for line in COMMANDS if "quantumbench" in line]
AWARE = [line for line in COMMANDS if "train.py" in line]
OTHERS = [line for line in COMMANDS if line not in (*SAR, *QUANTUM, *AWARE)]


def run(recipe: Recipe, line: str) -> Ended:
    """Run `python SCRIPT ARGUMENTS` with the words of the line and no others."""
    python, script, *arguments = shlex.split(line)
    assert python == "python"
    ended = recipe(script, *arguments)
    assert ended.code == 0, ended.out + ended.err
    return ended


def check_common_lines(out: str) -> None:
    for heading in ("Training Configuration:", "  Learning rate: ", "  Device: cpu", "[Scheduler] Optimizer steps: "):
        assert heading in out, heading
    assert re.search(r"Warmup steps: \d+ \(\d+% of \d+ total steps\)", out)
    assert "LOGIT SHAPE CHECK (First Forward Pass)" in out
    assert re.search(r"Student logits shape: torch.Size\(\[\d+, \d+, 320\]\)", out)
    assert "[Step 0] Loss Components:" in out and "[Step 2] Loss Components:" in out
    assert re.search(r"Distillation Loss \(alpha=[\d.]+\): \d+\.\d{6}", out)
    assert re.search(r"Temperature: ([\d.]+), Temperature\^2: ([\d.]+)", out)
    assert "Final validation perplexity: " in out and out.rstrip().endswith("Training completed")


@pytest.mark.parametrize("line", SAR)
def test_the_sar_scripts_run_as_written(recipe: Recipe, line: str) -> None:
    ended = run(recipe, line)
    check_common_lines(ended.out)
    average = r"Step 3: avg_loss=(\d+\.\d{4}) \(kd=(\d+\.\d{4}), ce=(\d+\.\d{4})\) success_rate=100% consecutive_nans=0"
    found = re.search(average, ended.out)
    assert found and float(found[1]) == pytest.approx(float(found[2]) + float(found[3]), abs=2e-4)
    assert "Step 0: Validation PPL = " in ended.out and "New best model! PPL: " in ended.out
    assert "harmful in the guide: logits clamped" in ended.out
    assert ended.config("teacher")["router"]["mode"] == "sar"
    records = [json.loads(text) for text in (ended.folder / "training.jsonl").read_text().splitlines()]
    assert [set(record) for record in records] == [
        {"step", "train_loss", "success_rate", "consecutive_nans", "gpu_memory_gb"}
    ] * 3


@pytest.mark.parametrize("line", QUANTUM)
def test_the_quantumbench_script_runs_as_written(recipe: Recipe, line: str) -> None:
    ended = run(recipe, line)
    check_common_lines(ended.out)
    assert "Alpha (distillation weight): 0.5, CE weight: 0.5" in ended.out
    assert "Temperature: 3, Temperature^2: 9" in ended.out and "FP16: False" in ended.out
    assert ended.config("data")["train"] == "data/quantumbench.jsonl"
    assert ended.config("guard")["on_nonfinite"] == "halt"


@pytest.mark.parametrize("line", AWARE)
def test_the_student_aware_script_runs_as_written(recipe: Recipe, line: str) -> None:
    ended = run(recipe, line)
    check_common_lines(ended.out)
    check_debug_blocks(ended.out)


def check_debug_blocks(out: str) -> None:
    """The progress that the seed's grep looks for, and its three debug blocks with exact zeros in the first phase."""
    progress = [line for line in out.splitlines() if re.search("loss=|Eval", line)]
    assert any(re.match(r"step 1/3 loss=\d+\.\d{4} lr=[1-9]\.\d{3}e-\d\d ", line) for line in progress)
    assert any(line.startswith("Eval at step 3: total=") for line in progress)
    assert "[CURRICULUM] Step 1, Progress 33.3%" in out and "    kd: 0.7000" in out and "    feature: 0.0000" in out
    assert "[KD LOSS] Step 1" in out and "  Curriculum weight: 0.7000" in out
    assert "[ROUTING LOSSES] Step 1" in out and "    Raw: not computed at weight 0" in out
    assert "  [x] train and eval objective within 2x" in out


@pytest.mark.parametrize("line", OTHERS)
def test_the_other_scripts_run_as_written(recipe: Recipe, line: str) -> None:
    out = run(recipe, line).out
    if "diagnose" in line:
        assert "SETTINGS" in out and "MACHINE, MODELS AND DATA" in out and "FIXES" in out
    else:
        assert re.search(r"Total: (\d)/\1 tests passed", out)
    if "fp16_fix" in line:
        for message in (
            "Mixed precision training enabled - FP16 computations with FP32 parameters and gradient scaling",
            "FP16 model parameters detected - using FP16 training",
            "FP32 training - gradient scaler disabled",
            "CUDA not available - gradient scaler disabled",
        ):
            assert message in out, message


def test_the_piped_commands_run_in_a_shell_and_their_grep_finds_the_lines(
    recipe: Recipe, kitchen: Path, stand_ins: Callable[[str], None]
) -> None:
    """The script runs with the words of the line in this process; the shell pipes what it printed."""
    grep, tee, follow = PIPED

    def shell(line: str) -> str:
        command, _pipe, rest = line.partition(" 2>&1 | ")
        if rest:
            (kitchen / "printed").write_text(run(recipe, command).out, encoding="utf-8")
            line = f"cat printed 2>&1 | {rest}"
        done = subprocess.run(["bash", "-c", line], cwd=kitchen, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found = shell(grep).splitlines()
    assert found[0].startswith("[Scheduler] Total batches: ")
    assert found[1:3] == ["[Scheduler] Gradient accumulation: 1", "[Scheduler] Optimizer steps: 3"]
    assert re.fullmatch(r"\[Scheduler\] Warmup steps: \d \(\d+\.\d%\)", found[3])
    shell(tee)
    out = shell(follow.replace("tail -f", "tail -n 200"))  # -f would wait for ever
    assert "loss=" in out and "Eval at step 3" in out


def test_the_quantumbench_command_runs_from_its_folder_with_the_builtin_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _python, script, *words = shlex.split(next(line for line in QUANTUM if "--dry-run" in line))
    moved = Path(shutil.copytree(recipe_runs.RECIPES, tmp_path / "recipes"))
    monkeypatch.chdir(moved)
    small = "data.max_records=300 data.max_length=64 eval.samples=1 train.compile=off"
    monkeypatch.setenv("STILLROOM_RECIPE_SET", small)
    code = recipe_runs.main_of(script)(words)
    out = capsys.readouterr().out
    assert code == 0, out
    assert "builtin:teacher stands in for the teacher models/teacher-model, which is not here" in out
    assert "builtin:student stands in for the student gpt2" in out
    assert "dry run: 5 steps" in out and "[Step 4] Loss Components:" in out
    (folder,) = (moved / "runs").iterdir()
    assert (folder / "checkpoints").is_dir() and (folder / "report.html").is_file()
    assert json.loads((folder / "summary.json").read_bytes())["steps"] == 5
