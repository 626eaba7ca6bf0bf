"""The fused head against the bare products it cannot avoid, the naive loss, and the peers: one interleaved run.

    PYTHONPATH=src .venv-bench/bin/python benchmarks/head/bench_head.py            # all problems, about half an hour
    PYTHONPATH=src .venv-bench/bin/python benchmarks/head/bench_head.py --quick    # one problem, no memory

Writes results/<date>.json; draw.py makes the table and the plots from it. Time is the least of the repetitions;
ratios are to the bare products of the same run. Nothing else may run: a busy machine is refused without --force.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, LIMIT, Data, Problem, loss_gap
from measure import busy_processes, interleaved, machine, peak_extra_bytes

from stillroom.objectives.kernel import choose_kernel

RESULTS = Path(__file__).with_name("results")
TIMED = (
    Problem("forward_kl", 512, 32_000),
    Problem("forward_kl", 2_048, 32_000),
    Problem("forward_kl", 512, 50_257),
    Problem("forward_kl", 512, 32_000, "bfloat16"),
    Problem("jsd", 512, 32_000),
    Problem("jsd", 512, 50_257),
    Problem("top_k", 512, 32_000),
    Problem("sampled", 512, 32_000),
)
WEIGHED = (
    Problem("forward_kl", 512, 32_000),
    Problem("forward_kl", 1_024, 32_000),
    Problem("forward_kl", 4_096, 32_000),
    Problem("jsd", 1_024, 32_000),
    Problem("top_k", 1_024, 32_000),
)


def time_problem(problem: Problem, repetitions: int) -> dict[str, Any]:
    busy = busy_processes()
    data = Data(problem)
    absent = {c.name: c.absence() for c in CONTENDERS if problem.kind in c.kinds and c.absence()}
    present = [c for c in CONTENDERS if problem.kind in c.kinds and c.name not in absent]
    seconds = interleaved({c.name: (data, c.prepare(problem, data)) for c in present}, repetitions)
    busy = sorted({*busy, *busy_processes()})
    limit = seconds[LIMIT]
    rows = {
        name: {**spent, "ratio_wall": spent["wall"] / limit["wall"], "ratio_cpu": spent["cpu"] / limit["cpu"]}
        for name, spent in seconds.items()
    }
    gap = None if problem.kind == "jsd" else loss_gap(problem, data)
    return {
        "problem": asdict(problem),
        "name": problem.name,
        "rows": rows,
        "absent": absent,
        "gradient_gap": gap,
        "busy_around": busy,
    }


def weigh_problem(problem: Problem) -> dict[str, Any]:
    present = [c for c in CONTENDERS if problem.kind in c.kinds and not c.absence() and c.name != LIMIT]
    rows = {c.name: peak_extra_bytes(c.name, problem) for c in present}
    return {"problem": asdict(problem), "name": problem.name, "peak_extra_bytes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one problem, three repetitions, no memory")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine; the result says so")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if busy := busy_processes():
        print("other processes are busy:", *busy, sep="\n  ")
        if not args.force:
            raise SystemExit("the machine is not idle: wait, or pass --force and have the result say so")
    kernel = choose_kernel("auto")
    result: dict[str, Any] = {
        "benchmark": "head",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "kernel": {"name": kernel.name, "reason": kernel.reason},
        "clock": "least of interleaved repetitions",
        "repetitions": 3 if args.quick else args.repetitions,
        "time": [],
        "memory": [],
    }
    for problem in TIMED[:1] if args.quick else TIMED:
        print(problem.name, flush=True)
        result["time"].append(time_problem(problem, result["repetitions"]))
        for name, row in result["time"][-1]["rows"].items():
            print(
                f"  {name:36s} wall {row['wall']:.3f} s  x{row['ratio_wall']:.3f}   cpu x{row['ratio_cpu']:.3f}",
                flush=True,
            )
    for problem in () if args.quick else WEIGHED:
        print("memory:", problem.name, flush=True)
        result["memory"].append(weigh_problem(problem))
        for name, size in result["memory"][-1]["peak_extra_bytes"].items():
            print(f"  {name:36s} {size / 1e6:8.1f} MB", flush=True)
    result["machine"]["other_busy_processes_at_end"] = busy_processes()
    path = args.out or RESULTS / f"head-{datetime.date.today().isoformat()}{'-quick' if args.quick else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
