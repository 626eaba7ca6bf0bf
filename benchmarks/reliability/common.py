"""The small real setting of the reliability benchmarks: a student on the standard library with a trained teacher."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# 160 steps from scratch on the builtin text: long enough to learn, short enough to repeat fifty times.
SETTING: dict[str, Any] = {
    "data.train_share": 0.05,
    "data.max_length": 64,
    "objectives.kd.weight": 0.5,
    "objectives.kd.temperature": 2.0,
    "objectives.ce.weight": 0.5,
    "train.max_steps": 160,
    "train.batch_size": 8,
    "train.learning_rate": 2e-3,
    "train.eval_steps": 160,
    "eval.max_batches": 48,
    "eval.samples": 0,
    "guard.snapshot_steps": 20,
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One run in a process of its own with one thread. Returns what the benchmarks compare."""
    import torch

    torch.set_num_threads(1)
    from stillroom.config import load_config
    from stillroom.core.errors import StillroomError
    from stillroom.telemetry import read_events
    from stillroom.training.distill import distill

    folder = Path(tempfile.mkdtemp())
    line: dict[str, Any] = {key: value for key, value in job.items() if key != "set"}
    try:
        base = SETTING if "preset" not in job else {}
        config = load_config(
            preset=job.get("preset", "demo"), overrides={**base, "train.seed": job.get("seed", 0), **job["set"]}
        )
        try:
            summary = distill(config, folder / "run", device="cpu", inject=job.get("inject", "")).summary
        except StillroomError as error:
            return {**line, "status": f"exit {error.exit_code}", "loss": None}
        events = read_events(folder / "run" / "events.jsonl")
        guard = [event["action"] for event in events if event["event"] == "guard"]
        line |= {
            "status": summary["status"],
            "loss": math.log(summary["student"]["perplexity"]),
            "before": math.log(summary["student_before"]["perplexity"]),
            "steps": summary["steps"],
            "skipped": summary["skipped"],
            "retried": summary["retried"],
            "rollbacks": summary["rollbacks"],
            "success_rate": summary["success_rate"],
            "verdicts": {action: guard.count(action) for action in sorted(set(guard))},
            "seconds": summary["seconds"],
        }
        if job.get("counts_unmoved"):
            line["unmoved_fraction"] = unmoved_fraction(folder / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(line), flush=True)
    return line


def unmoved_fraction(folder: Path) -> float:
    """The share of weights that are the same in the first and the last checkpoint, residuals and masters included."""
    from safetensors.torch import load_file

    from stillroom.precision import storage

    first, *_rest, last = sorted((folder / "checkpoints").glob("step-*"))
    same = total = 0
    values = []
    for path in (first, last):
        weights, state = load_file(path / "student.safetensors"), load_file(path / "optimizer.safetensors")
        whole = {}
        for name, weight in weights.items():
            if f"{name}.master" in state:
                whole[name] = state[f"{name}.master"]
            elif f"{name}.residual" in state:
                whole[name] = storage.join(weight, state[f"{name}.residual"])
            else:
                whole[name] = weight
        values.append(whole)
    for name, before in values[0].items():
        same += int((before == values[1][name]).sum())
        total += before.numel()
    return same / total


def run_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(run, jobs))


def write(name: str, value: dict[str, Any]) -> None:
    from stillroom.training.run_folder import machine, versions

    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "versions": versions(), **value}, indent=1) + "\n")
    print(path)
