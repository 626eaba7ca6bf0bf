"""Faults, false alarms and parity: what the FP16 policies and the guard promise, measured.

    python benchmarks/reliability/bench_faults.py faults    # ten single faults and all of them in one run
    python benchmarks/reliability/bench_faults.py clean     # false positives: 2,000 clean steps, three seeds
    python benchmarks/reliability/bench_faults.py parity    # every FP16 policy against FP32 at three learning rates
    python benchmarks/reliability/bench_faults.py unmoved   # weights that small updates do not reach
    python benchmarks/reliability/bench_faults.py ultra     # the ultra-stable preset learns in FP16 as in FP32

Bars: single faults within 0.3 % of the clean held-out loss, the gauntlet within 1 %, no refusal in clean runs, FP16
policies within 0.2 % of FP32. A bar that is missed stays in the result file as missed.
"""

from __future__ import annotations

import argparse
from typing import Any

from common import run_all, write

SINGLE = [
    "inf_logit@80",
    "nan_weight@80",
    "huge_weight@80",
    "lr_spike@80x3",
    "teacher_nan@80x5",
    "teacher_garbage@80x5",
    "all_masked@80",
    "bad_batch@80x5",
    "nan_moment@80",
    "inf_grad@80",
]
GAUNTLET = (
    "nan_weight@40,huge_weight@50,inf_logit@55,teacher_nan@60x5,teacher_garbage@70x5,"
    "all_masked@80,lr_spike@90x3,nan_moment@100,inf_grad@110,bad_batch@120x5"
)
POLICIES = ["fp16-mixed", "fp16-master", "fp16-split", "fp16-sr"]


def faults() -> None:
    jobs: list[dict[str, Any]] = [{"name": "clean", "set": {}}]
    jobs += [{"name": fault, "inject": fault, "set": {}} for fault in SINGLE]
    jobs += [
        {"name": f"gauntlet {mode}", "inject": GAUNTLET, "set": {"precision.mode": mode}}
        for mode in ("fp32", "fp16-split")
    ]
    jobs += [{"name": "clean fp16-split", "set": {"precision.mode": "fp16-split"}}]
    lines = run_all(jobs)
    found = {line["name"]: line for line in lines}
    for line in lines:
        reference = found["clean fp16-split" if "fp16-split" in line["name"] else "clean"]["loss"]
        line["gap_percent"] = None if line["loss"] is None else 100 * (line["loss"] / reference - 1)
        bar = 1.0 if "gauntlet" in line["name"] else 0.3
        line["passed"] = line["gap_percent"] is not None and line["gap_percent"] <= bar
    write("faults", {"runs": lines, "gauntlet": GAUNTLET})


def clean() -> None:
    jobs = [
        {"name": "clean", "seed": seed, "set": {"train.max_steps": 2000, "train.eval_steps": 2000}} for seed in range(3)
    ]
    lines = run_all(jobs)
    for line in lines:
        line["passed"] = line["skipped"] == 0 and line["rollbacks"] == 0
    write("clean", {"runs": lines})


def parity() -> None:
    jobs = []
    for rate in (2e-3, 2e-5, 5e-6):
        for mode in ("fp32", *POLICIES):
            for moments in ("float32", "bfloat16") if mode in ("fp16-split", "fp16-sr") else ("float32",):
                over = {"precision.mode": mode, "precision.moments": moments, "train.learning_rate": rate}
                jobs.append({"name": mode, "moments": moments, "learning_rate": rate, "set": over})
    lines = run_all(jobs)
    reference = {line["learning_rate"]: line for line in lines if line["name"] == "fp32"}
    for line in lines:
        exact = reference[line["learning_rate"]]
        line["gap_percent"] = 100 * (line["loss"] / exact["loss"] - 1)
        line["progress"] = (line["before"] - line["loss"]) / (exact["before"] - exact["loss"])
        line["passed"] = abs(line["gap_percent"]) <= 0.2
    write("parity", {"runs": lines})


def unmoved() -> None:
    """Weights that 100 steps at learning rate 5e-6 did not move: in plain FP16 three quarters of them."""
    over = {"train.learning_rate": 5e-6, "train.max_steps": 100, "train.eval_steps": 100}
    jobs = [
        {"name": mode, "counts_unmoved": True, "set": {**over, "precision.mode": mode}} for mode in ("fp32", *POLICIES)
    ]
    lines = run_all(jobs)
    for line in lines:
        line["passed"] = line["unmoved_fraction"] < 0.05
    write("unmoved", {"runs": lines})


def ultra() -> None:
    """The ultra-stable preset on the embedded default: FP16 weights against FP32 at the same rate and steps."""
    jobs = [
        {
            "name": mode,
            "preset": "ultra-stable",
            "set": {"precision.mode": mode, "train.max_steps": 120, "train.eval_steps": 60, "data.train_share": 0.05,
                    "eval.max_batches": 48, "eval.samples": 0},
        }
        for mode in ("fp32", "fp16-split")
    ]  # fmt: skip
    exact, half = run_all(jobs)
    share = (half["before"] - half["loss"]) / (exact["before"] - exact["loss"])
    write("ultra", {"runs": [exact, half], "share_of_improvement": share, "bar": 0.95, "passed": share >= 0.95})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["faults", "clean", "parity", "unmoved", "ultra"])
    jobs = {"faults": faults, "clean": clean, "parity": parity, "unmoved": unmoved, "ultra": ultra}
    jobs[parser.parse_args().job]()


if __name__ == "__main__":
    main()
