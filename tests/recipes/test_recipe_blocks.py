"""The blocks of the seeds, from records alone."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import recipe_runs

from _seed.blocks import component_lines, number, scheduler_lines
from _seed.views import AverageView


def start(batches: int, accumulation: int, steps: int, warmup: int, **train: Any) -> dict[str, Any]:
    schedule = {
        "total_batches": batches,
        "gradient_accumulation": accumulation,
        "processes": 1,
        "optimizer_steps": steps,
        "warmup_steps": warmup,
    }
    return {"schedule": schedule, "config": {"train": {"max_steps": 0, "epochs": 1.0, **train}}}


def test_the_schedule_is_counted_in_optimizer_steps_with_the_last_partial_one() -> None:
    assert scheduler_lines(start(74_823, 16, 4677, 467)) == [
        "[Scheduler] Total batches: 74,823",
        "[Scheduler] Gradient accumulation: 16",
        "[Scheduler] Optimizer steps: 4,677",
        "[Scheduler] Warmup steps: 467 (10.0%)",
        "[Scheduler] An epoch has 4,676 steps of 16 batches and a last one of 7",
    ]
    assert scheduler_lines(start(24_941, 16, 3 * 1559, 467, epochs=3.0))[0] == "[Scheduler] Total batches: 74,823"


def test_components_are_counted_from_zero_and_a_value_that_is_not_finite_is_named() -> None:
    terms = {"kd": {"raw": None, "raw_nonfinite": "nan", "weight": 0.5}, "ce": {"raw": 4.56789, "weight": 0.5}}
    step = {"step": 1, "terms": terms, "train_loss": None, "train_loss_nonfinite": "inf", "temperature": 3.0}
    assert component_lines(step) == [
        "[Step 0] Loss Components:",
        "  Distillation Loss (alpha=0.5): nan",
        "  Cross-Entropy Loss (1-alpha=0.5): 4.567890",
        "  Combined Loss: inf",
        "  Temperature: 3, Temperature^2: 9",
    ]
    assert number({}, "train_loss") == "-"


def test_an_average_is_over_the_kept_steps_since_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = AverageView("cpu", "")
    for step in range(1, 51):
        loss = 1.0 if step <= 25 else 3.0
        record = {
            "event": "step", "step": step, "verdict": "keep", "train_loss": loss, "success_rate": 0.92, "lr": 1e-5,
            "consecutive_nans": 0, "grad_norm": 0.4, "gpu_memory_gb": 0.0, "temperature": 1.0,
            "terms": {"kd": {"raw": 1.0, "weight": 0.1, "scaled": 0.1}, "ce": {"raw": 1, "weight": 1, "scaled": loss}},
        }  # fmt: skip
        view.handle(record)
        view.handle({**record, "verdict": "skip", "train_loss": 99.0})
    lines = [line for line in capsys.readouterr().out.splitlines() if "avg_loss" in line]
    assert lines[0].startswith("  Step 25: avg_loss=1.0000 (kd=0.1000, ce=1.0000) success_rate=92% consecutive_nans=0")
    assert lines[1].startswith("  Step 50: avg_loss=3.0000 (kd=0.1000, ce=3.0000)") and len(lines) == 2


@pytest.mark.parametrize("path", sorted(recipe_runs.RECIPES.rglob("*.py")), ids=lambda path: path.name)
def test_a_recipe_is_a_few_lines_over_what_they_share(path: Any) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert text.count("\n") <= (200 if path.parent.name == "_seed" else 25)
    functions = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert not [name for name in functions if name.startswith("test")], "pytest would collect it"
