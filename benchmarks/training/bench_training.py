"""Whole training steps against trl's GKD trainer, the seeds' loop and the physical limit.

    PYTHONPATH=src .venv-bench/bin/python benchmarks/training/bench_training.py steps      # seconds a step, interleaved
    PYTHONPATH=src .venv-bench/bin/python benchmarks/training/bench_training.py memory     # peak resident memory
    PYTHONPATH=src .venv-bench/bin/python benchmarks/training/bench_training.py scaling    # is the cost linear?
    PYTHONPATH=src .venv-bench/bin/python benchmarks/training/bench_training.py target     # seconds to a held-out loss
    PYTHONPATH=src .venv-bench/bin/python benchmarks/training/bench_training.py target_cached   # and with a cache

Each writes results/<name>.json; draw.py makes the tables and plots. Nothing else should run meanwhile.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))
import torch
from loops import CONTENDERS, LIMIT, PEER, Step, stillroom
from measure import busy_processes, machine, peak_resident, resident_from_here
from world import Size, make_world

RESULTS = Path(__file__).with_name("results")
REPETITIONS = 6
_MARK = "benchmark: "
MEMORY_STEPS = 4


def timed(steps: dict[str, Step], repetitions: int) -> dict[str, dict[str, float]]:
    """Least wall and CPU seconds of a step, the contenders taking turns; the first two rounds warm up."""
    best = {name: {"wall": math.inf, "cpu": math.inf} for name in steps}
    for repetition in range(repetitions + 2):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            if repetition >= 2:
                spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                best[name] = {clock: min(best[name][clock], spent[clock]) for clock in spent}
    return best


def bench_steps() -> dict[str, Any]:
    """Each contender in a process of its own: what one tells the allocator or the thread pool is not another's gain."""
    size = Size()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_world(Path(folder), size)
        workers = {name: stack.enter_context(_Worker(name, folder)) for name in CONTENDERS}
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
        for repetition in range(REPETITIONS + 2):
            for name, worker in workers.items():
                spent = worker.step()
                if repetition >= 2:
                    turns[name].append(spent)
    rows = {}
    for name, found in turns.items():
        against = [peer["wall"] / spent["wall"] for peer, spent in zip(turns[PEER], found, strict=True)]
        against_cpu = [peer["cpu"] / spent["cpu"] for peer, spent in zip(turns[PEER], found, strict=True)]
        beyond = [spent["wall"] / least["wall"] for least, spent in zip(turns[LIMIT], found, strict=True)]
        wall = min(spent["wall"] for spent in found)
        rows[name] = {
            "wall": wall,
            "cpu": min(spent["cpu"] for spent in found),
            "tokens_per_second": size.tokens / wall,
            "x_limit": statistics.median(beyond),
            "speed_against_trl": statistics.median(against),
            "speed_against_trl_cpu": statistics.median(against_cpu),
        }
    how = "each in a process of its own, taking turns; seconds are the least of the rounds, ratios the median"
    return {"size": asdict(size), "repetitions": REPETITIONS, "how": how, "rows": rows}


class _Worker:
    """A contender in its own process, which takes a step for every line it is sent."""

    def __init__(self, name: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", name, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> _Worker:
        self._answer()  # it is ready
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # a trainer may print what it likes
            if line.startswith(_MARK):
                answer: dict[str, float] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"a contender ended early: {self._process.args}")


def serve(name: str, folder: str) -> None:
    step = CONTENDERS[name](Path(folder), Size())
    print(_MARK + "{}", flush=True)
    for _line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(_MARK + json.dumps(spent), flush=True)
    os._exit(0)


def bench_memory() -> dict[str, Any]:
    size, rows = Size(), {}
    with tempfile.TemporaryDirectory() as folder:
        make_world(Path(folder), size)
        for name in CONTENDERS:
            command = [sys.executable, __file__, "peak", name, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows[name] = json.loads(done.stdout.strip().splitlines()[-1])
            print(f"  {name:46s} {rows[name]['peak'] / 1e6:8.0f} MB", flush=True)
    peer = rows[PEER]["peak"]
    for row in rows.values():
        row["against_trl"] = row["peak"] / peer
    return {"size": asdict(size), "steps": MEMORY_STEPS, "rows": rows}


def peak(name: str, folder: str) -> None:
    """Run some steps here and print this process's peak resident bytes, and what it held before the first step."""
    step = CONTENDERS[name](Path(folder), Size())
    before = resident_from_here()
    for _ in range(MEMORY_STEPS):
        step()
    print(json.dumps({"peak": peak_resident(), "before_first_step": before}), flush=True)
    os._exit(0)  # a trainer that waits for its next turn in a thread has nothing more to say


AXES: dict[str, tuple[Size, ...]] = {
    "length": tuple(Size(length=length, batch=4) for length in (128, 256, 512, 1024)),
    "vocabulary": tuple(Size(vocabulary=count, batch=4) for count in (8_000, 16_000, 32_000, 64_000)),
    "batch": tuple(Size(batch=rows) for rows in (1, 2, 4, 8)),
    "student_width": tuple(Size(student_width=width, batch=4) for width in (128, 256, 512)),
    "teacher_layers": tuple(Size(teacher_layers=layers, batch=4) for layers in (2, 4, 8)),
}


def bench_scaling() -> dict[str, Any]:
    axes = {}
    for axis, sizes in AXES.items():
        points = []
        for size in sizes:
            folder = Path(tempfile.mkdtemp())
            try:
                make_world(folder, size, num_rows=4 * size.batch + 8)
                seconds = timed({"stillroom": stillroom(folder, size)}, 3)["stillroom"]
            finally:
                shutil.rmtree(folder)
            points.append({"value": getattr(size, axis), "size": asdict(size), **seconds})
            print(f"  {axis} {points[-1]['value']:6d}  {seconds['wall']:.3f} s", flush=True)
        axes[axis] = {"points": points, "exponent_at_the_end": _exponent(points[-2:])}
    return {"axes": axes}


def _exponent(points: list[dict[str, Any]]) -> float:
    """d log seconds / d log size over the last two points: 1 is linear, below 1 something fixed is left over."""
    (a, b) = points
    return math.log(b["wall"] / a["wall"]) / math.log(b["value"] / a["value"])


def main() -> None:
    if sys.argv[1] in ("peak", "serve"):
        {"peak": peak, "serve": serve}[sys.argv[1]](sys.argv[2], sys.argv[3])
        return
    from target import bench_cached_target, bench_target

    torch.set_num_threads(torch.get_num_threads())
    jobs = {
        "steps": bench_steps,
        "memory": bench_memory,
        "scaling": bench_scaling,
        "target": bench_target,
        "target_cached": bench_cached_target,
    }
    name = sys.argv[1]
    busy = busy_processes()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"benchmark": f"training {name}", "date": started, "machine": machine(), **jobs[name]()}
    result["busy_around"] = sorted({*busy, *busy_processes()})
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row, values in result.get("rows", {}).items():
        print(f"  {row:46s} " + "  ".join(f"{key} {value:.3g}" for key, value in values.items()))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
