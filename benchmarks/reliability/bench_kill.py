"""SIGKILL at six points of a run, many times: does the resumed run end with the same bits?

    python benchmarks/reliability/bench_kill.py --trials 4

For each point and precision, every trial starts a run in a process of its own, kills it up to three times at random
steps, starts it again with the same call until it is done, and compares the final student with that of an undisturbed
run, byte by byte. Processes are forked from one that has loaded torch, which makes a thousand starts affordable.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import write
from forked import TEXT, digest, run_forked, write_text

POINTS = [
    "kill",
    "kill_mid_update",
    "kill_while_writing",
    "kill_before_rename",
    "kill_after_rename",
    "kill_in_eval",
]
STEPS = 12
SETTING: dict[str, Any] = {
    "data.train": str(TEXT),
    "data.max_length": 32,
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.max_steps": STEPS,
    "train.eval_steps": 3,
    "train.save_steps": 2,
    "eval.max_batches": 2,
    "eval.samples": 0,
    "objectives.kd.weight": 0.5,
    "objectives.ce.weight": 0.5,
}


def run(folder: Path, precision: str, inject: str = "") -> int:
    return run_forked(folder, "demo", {**SETTING, "precision.mode": precision}, inject)


def trial(job: dict[str, Any]) -> dict[str, Any]:
    rng = random.Random(f"{job['point']}-{job['number']}")
    folder = Path(tempfile.mkdtemp()) / "run"
    codes: list[int] = []
    try:
        while len(codes) < 8 and (not codes or codes[-1] != 0):
            inject = f"{job['point']}@{rng.randrange(1, STEPS + 1)}" if len(codes) < 3 else ""
            codes.append(run(folder, job["precision"], inject))
        same = codes[-1] == 0 and digest(folder) == job["reference"]
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return {
        "point": job["point"],
        "precision": job["precision"],
        "number": job["number"],
        "kills": codes.count(-signal.SIGKILL),
        "starts": len(codes),
        "exact": same,
    }


def worker(jobs: list[dict[str, Any]], pipe: Any) -> None:
    import stillroom.training.distill  # loaded before forking, so that each start costs little

    assert stillroom.training.distill
    lines = []
    for job in jobs:
        lines.append(trial(job))
        print(lines[-1], flush=True)
    pipe.send(lines)


def reference_of(precision: str) -> str:
    folder = Path(tempfile.mkdtemp()) / "run"
    if run(folder, precision) != 0:
        raise SystemExit("the undisturbed run failed")
    return digest(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4, help="for each of six points and two precisions")
    args = parser.parse_args()
    write_text()
    jobs = []
    for precision in ("fp32", "fp16-split"):
        reference = reference_of(precision)
        jobs += [
            {"point": point, "precision": precision, "number": number, "reference": reference}
            for point in POINTS
            for number in range(args.trials)
        ]
    context = get_context("fork")
    workers = []
    for half in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=worker, args=(jobs[half::2], theirs))
        process.start()
        workers.append((process, mine))
    lines = [line for _process, pipe in workers for line in pipe.recv()]
    summary = {
        f"{precision} {point}": {
            "trials": len(chosen),
            "kills": sum(line["kills"] for line in chosen),
            "exact": sum(line["exact"] for line in chosen),
        }
        for precision in ("fp32", "fp16-split")
        for point in POINTS
        if (chosen := [line for line in lines if line["point"] == point and line["precision"] == precision])
    }
    write("kill", {"trials": len(lines), "exact": sum(line["exact"] for line in lines), "points": summary})


if __name__ == "__main__":
    main()
