"""Kills at any moment and sequences of faults, over all presets and precisions.

    python benchmarks/reliability/bench_borders.py kills --trials 60
    python benchmarks/reliability/bench_borders.py faults --trials 40

`kills`: each trial kills a run up to three times after a random time, wherever it is (loading, evaluating, updating,
saving), starts it again until it is done, and compares the final student with an undisturbed run's byte by byte and the
log of losses number by number. `faults`: each trial injects one to four faults at steps 1, 2, 11, the last one, in an
evaluation or right after a rollback. Its end must have a code that is promised, a finite student no worse than the one
it began with, and a log that agrees with its summary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import write
from forked import TEXT, digest, run_forked, write_text

STEPS = 16
PRESETS = (
    "base", "balanced", "conservative", "fp16-safe", "instruct", "quantumbench", "sar", "stable", "student-aware",
    "ultra-stable",
)  # fmt: skip
PRECISIONS = ("fp32", "fp16-mixed", "fp16-master", "fp16-split", "fp16-sr", "bf16-mixed")
FAULTS = (
    "nan_weight", "nan_embedding", "huge_weight", "nan_moment", "all_masked", "bad_batch", "inf_logit", "teacher_nan",
    "teacher_garbage", "inf_grad", "nan_grad", "lr_spike", "disk_full",
)  # fmt: skip
MOMENTS = (1, 2, 11, STEPS)
PROMISED = (0, 21, 22, 23)
SETTING: dict[str, Any] = {
    "teacher.model": "builtin:teacher",
    "student.model": "builtin:student",
    "data.train": str(TEXT),
    "data.max_length": 32,
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.max_steps": STEPS,
    "train.eval_steps": 4,
    "train.save_steps": 3,
    "eval.max_batches": 2,
    "eval.samples": 0,
    "guard.snapshot_steps": 4,
}


def setting_of(job: dict[str, Any]) -> dict[str, Any]:
    teacher = (
        {"teacher.model": "builtin:moe-teacher", "teacher.router.probe_steps": 1} if job["preset"] == "sar" else {}
    )
    return {**SETTING, **teacher, "precision.mode": job["precision"], "train.seed": job["number"]}


def losses(folder: Path) -> list[tuple[int, str, float | None]]:
    """What the log says of each attempted step."""
    from stillroom.telemetry import read_events

    events = read_events(folder / "events.jsonl")
    return [(e["step"], e["verdict"], e["train_loss"]) for e in events if e["event"] == "step"]


def kill_trial(job: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(f"kill-{job['number']}")
    root = Path(tempfile.mkdtemp())
    line = {**job}
    try:
        began = time.monotonic()
        line["reference"] = run_forked(root / "reference", job["preset"], setting_of(job))
        seconds = time.monotonic() - began
        codes: list[int] = []
        while len(codes) < 8 and (not codes or codes[-1] == -signal.SIGKILL):
            after = rng.uniform(0.02, 0.98) * seconds if len(codes) < 3 else None
            codes.append(run_forked(root / "run", job["preset"], setting_of(job), kill_after=after))
        line |= {
            "kills": codes.count(-signal.SIGKILL),
            "code": codes[-1],
            "is_exact": digest(root / "run") == digest(root / "reference"),
            "is_consistent": losses(root / "run") == losses(root / "reference"),
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
    line["is_good"] = bool(line["reference"] == line["code"] == 0 and line["is_exact"] and line["is_consistent"])
    return line


def spec_of(rng: random.Random) -> str:
    """One to four faults; now and then one strikes right after the rollback that the one before it causes."""
    faults = []
    for _ in range(rng.randrange(1, 5)):
        count = rng.choice(("", "", "x2", "x3", "x5"))
        faults.append(f"{rng.choice(FAULTS)}@{rng.choice(MOMENTS)}{count}")
    if rng.random() < 0.3:
        faults += ["nan_weight@9", f"{rng.choice(FAULTS)}@10"]
    return ",".join(faults)


def fault_trial(job: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(f"faults-{job['number']}")
    spec = spec_of(rng)
    in_eval = rng.random() < 0.3
    root = Path(tempfile.mkdtemp())
    line = {**job, "inject": spec}
    try:
        folder = root / "run"
        first = spec + f",kill_in_eval@{rng.choice((4, 8, 12))}" if in_eval else spec
        code = run_forked(folder, job["preset"], setting_of(job), first)
        if code == -signal.SIGKILL:  # killed in an evaluation: go on without the faults that have struck
            line["killed_in_evaluation"] = True
            code = run_forked(folder, job["preset"], setting_of(job), spec)
        line["code"] = code
        line |= verdict_on(folder, code)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return line


def verdict_on(folder: Path, code: int) -> dict[str, Any]:
    """Whether the end is promised, its student finite and no worse than at the start, and its log consistent."""
    found: dict[str, Any] = {"is_good": code in PROMISED}
    path = folder / "summary.json"
    if not path.exists():
        found["has_summary"] = False
        found["is_good"] = code in PROMISED and code != 0
        return found
    summary = json.loads(path.read_text())
    before, after = summary["student_before"]["perplexity"], summary["student"]["perplexity"]
    steps = losses(folder)
    kept = [step for step, action, _loss in steps if action == "keep"]
    skipped = sum(action in ("skip", "fallback") for _step, action, _loss in steps)
    found |= {
        "before": before,
        "after": after,
        "rollbacks": summary["rollbacks"],
        "skipped": summary["skipped"],
        "is_no_worse": after is not None and math.isfinite(after) and after <= before * (1 + 1e-6),
        "is_consistent": bool(kept) and max(kept) == summary["steps"] and skipped == summary["skipped"],
    }
    found["is_good"] = bool(found["is_good"] and found["is_no_worse"] and found["is_consistent"])
    return found


def worker(trial: Any, jobs: list[dict[str, Any]], pipe: Any) -> None:
    import stillroom.training.distill  # loaded before forking, so that each start costs little

    assert stillroom.training.distill
    lines = []
    for job in jobs:
        lines.append(trial(job))
        print(json.dumps(lines[-1]), flush=True)
    pipe.send(lines)


def spread(number: int) -> dict[str, Any]:
    """Every preset with every precision in turn: the two counts have no common divisor but 2."""
    return {
        "number": number,
        "preset": PRESETS[number % len(PRESETS)],
        "precision": PRECISIONS[(number + number // len(PRESETS)) % len(PRECISIONS)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("kills", "faults"))
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat a single one")
    args = parser.parse_args()
    write_text()
    jobs = [spread(number) for number in range(args.first, args.first + args.trials)]
    trial = kill_trial if args.kind == "kills" else fault_trial
    context = get_context("fork")
    workers = []
    for half in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(trial, jobs[half::2], theirs))
        process.start()
        workers.append((process, mine))
    lines = sorted((line for _process, pipe in workers for line in pipe.recv()), key=lambda line: line["number"])
    good = sum(line["is_good"] for line in lines)
    print(f"{good} of {len(lines)} good")
    if args.first == 0:
        write(f"borders_{args.kind}", {"trials": len(lines), "good": good, "lines": lines})


if __name__ == "__main__":
    main()
