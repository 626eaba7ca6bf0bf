"""The fused head against the bare products it cannot avoid, the naive loss, and the peers.

    PYTHONPATH=src .venv-bench/bin/python benchmarks/head/bench_head.py                 # all problems, over an hour
    PYTHONPATH=src .venv-bench/bin/python benchmarks/head/bench_head.py --only top_k    # those whose name has it

Writes results/head.json, a problem at a time. A sitting with the same code is added to the problem's turns, other code
replaces them. draw.py makes the table and the plots from it. Within a problem the contenders take turns, each between
two runs of the bare products by whose mean it is divided; ratios are the median of the turns of all sittings: the
machine's mood changes by the quarter of an hour. Nothing else may run: a busy machine is refused without --force.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, LIMIT, Data, Problem, loss_gap
from measure import busy_processes, code_sum, interleaved, machine, peak_extra_bytes, summarised, where_it_goes

from stillroom.losses.head.kernel import choose_kernel

RESULTS = Path(__file__).with_name("results")
BARRED = ("stillroom compiled, chunk 512", "stillroom compiled, chunk 256", "stillroom plain, chunk 512")
TURNS = 4  # of those for one of another's: they stand near their bars
TIMED = (
    Problem("forward_kl", 512, 32_000),
    Problem("forward_kl", 1_024, 32_000),
    Problem("forward_kl", 4_096, 32_000),
    Problem("forward_kl", 512, 50_257),
    Problem("forward_kl", 1_024, 50_257),
    Problem("forward_kl", 512, 151_936),
    Problem("forward_kl", 512, 32_000, "bfloat16"),
    Problem("jsd", 512, 32_000),
    Problem("jsd", 512, 50_257),
    Problem("top_k", 512, 32_000),
    Problem("top_k", 512, 50_257),
    Problem("sampled", 512, 32_000),
)
WEIGHED = (
    Problem("forward_kl", 512, 32_000),
    Problem("forward_kl", 1_024, 32_000),
    Problem("forward_kl", 4_096, 32_000),
    Problem("forward_kl", 512, 151_936),
    Problem("jsd", 1_024, 32_000),
    Problem("top_k", 1_024, 32_000),
)


def time_problem(problem: Problem, repetitions: int) -> dict[str, Any]:
    """One sitting."""
    busy = busy_processes()
    data = Data(problem)
    absent = {c.name: c.absence() for c in CONTENDERS if problem.kind in c.kinds and c.absence()}
    present = [c for c in CONTENDERS if problem.kind in c.kinds and c.name not in absent]
    steps = {c.name: (data, c.prepare(problem, data)) for c in present}
    seen = interleaved(steps, steps[LIMIT], {c.name: TURNS if c.name in BARRED else 1 for c in present}, repetitions)
    ours = [c for c in present if c.name.startswith("stillroom")]
    parts = {c.name: where_it_goes(data, c.prepare(problem, data), c.name.split()[1].rstrip(","), 5) for c in ours}
    busy = sorted({*busy, *busy_processes()})
    gap = None if problem.kind == "jsd" else loss_gap(problem, data)
    return {"turns": seen, "parts": parts, "absent": absent, "gradient_gap": gap, "busy_around": busy}


def weigh_problem(problem: Problem) -> dict[str, Any]:
    present = [c for c in CONTENDERS if problem.kind in c.kinds and not c.absence() and c.name != LIMIT]
    rows = {c.name: peak_extra_bytes(c.name, problem) for c in present}
    return {"problem": asdict(problem), "name": problem.name, "peak_extra_bytes": rows}


def stamp() -> dict[str, Any]:
    """When, where and with which kernel an entry was measured."""
    kernel = choose_kernel("auto")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "machine": machine(), "kernel": {"name": kernel.name, "reason": kernel.reason.split(":")[0]}}


def with_sitting(known: dict[str, Any] | None, problem: Problem, sitting: dict[str, Any]) -> dict[str, Any]:
    """A problem's entry with one sitting more, if the earlier ones measured the same code."""
    code = code_sum()
    sittings = [*known["sittings"], sitting] if known and known.get("code") == code else [sitting]
    turns = [found["turns"] for found in sittings]
    return {
        "problem": asdict(problem),
        "name": problem.name,
        "code": code,
        "rows": summarised(turns),
        "sittings": sittings,
    }


def keep(path: Path, part: str, problem: Problem, entry_of: Callable[[dict[str, Any] | None], dict[str, Any]]) -> None:
    """Put a problem's new entry, made from its old one, into the result file in the order of the problems."""
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"benchmark": "head"}
    entries = {known["name"]: known for known in result.get(part, [])}
    entries[problem.name] = entry_of(entries.get(problem.name))
    order = [problem.name for problem in (TIMED if part == "time" else WEIGHED)]
    result[part] = [entries[name] for name in order if name in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=4, help="of a sitting")
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--part", choices=("time", "memory", "both"), default="both")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine; the result says so")
    parser.add_argument("--out", type=Path, default=RESULTS / "head.json")
    args = parser.parse_args()
    if busy := busy_processes():
        print("other processes are busy:", *busy, sep="\n  ")
        if not args.force:
            raise SystemExit("the machine is not idle: wait, or pass --force and have the result say so")
    for problem in (p for p in TIMED if args.only in p.name and args.part != "memory"):
        print(problem.name, flush=True)
        sitting = {**stamp(), "repetitions": args.repetitions, **time_problem(problem, args.repetitions)}
        keep(args.out, "time", problem, functools.partial(with_sitting, problem=problem, sitting=sitting))
        for name, row in summarised([sitting["turns"]]).items():
            print(f"  {name:36s} wall {row['wall']:.3f} s  x{row['ratio_wall']:.3f}   cpu x{row['ratio_cpu']:.3f}")
    for problem in (p for p in WEIGHED if args.only in p.name and args.part != "time"):
        print("memory:", problem.name, flush=True)
        entry = {**stamp(), **weigh_problem(problem)}
        keep(args.out, "memory", problem, lambda known, entry=entry: entry)
        for name, size in entry["peak_extra_bytes"].items():
            print(f"  {name:36s} {size / 1e6:8.1f} MB")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
