"""A step at a real size (SmolLM2-135M's shape, its half as student, 1,024 tokens) against its matrix products and trl.

    python benchmarks/training/real_step.py bf16     # products, Stillroom live, compiled and stored, trl, all in BF16
    python benchmarks/training/real_step.py fp32     # the same in FP32
    python benchmarks/training/real_step.py bf16 --rounds 2 --size 360M    # 360M to 135M, random weights of that shape

The products are every matrix product that the step cannot do without, timed alone at their own shapes: teacher forward,
student forward and both gradients, and the four of the heads. In BF16 they are torch's own, with BF16 results. Steps of
each contender, the products and trl's trainer take turns, each in a process of its own. trl's setting in BF16 is its
best: `bf16=True` and a teacher with BF16 weights. Parts are timed around the calls of the step; what is in no part is
"rest". On a machine that others use, OMP_NUM_THREADS=1 and CPU seconds still say something: the least of the rounds is
written next to the median.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))

import torch
from epochs import LARGE, REAL
from loops import make_run, stillroom_stored, trl_gkd
from measure import busy_processes, machine
from world import Size, make_world

RESULTS = Path(__file__).with_name("results")
ROUNDS, WARM = 4, 1
PRODUCTS, PEER = "the matrix products alone", "trl GKD trainer, forward KL (beta 0)"
SIZES = {"135M": REAL, "360M": LARGE}
_MARK = "benchmark: "
Step = Callable[[], dict[str, float]]


def _products(size: Size, dtype: torch.dtype) -> Step:
    """Each weight's products: one of the teacher, three of the student."""

    def shapes(layers: int, width: int) -> list[tuple[int, int, int]]:
        inner = width * 8 // 3 // 64 * 64
        return [
            (width, width, 4 * layers),
            (width, inner, 2 * layers),
            (inner, width, layers),
            (width, size.vocabulary, 1),
        ]

    teacher, student = shapes(size.teacher_layers, size.teacher_width), shapes(size.student_layers, size.student_width)
    operands = {
        (rows, columns): tuple(
            torch.randn(shape).to(dtype) for shape in ((size.tokens, rows), (columns, rows), (size.tokens, columns))
        )
        for rows, columns, _ in (*teacher, *student)
    }

    def step() -> dict[str, float]:
        spent = {"teacher": 0.0, "student": 0.0, "heads": 0.0}
        for part, work, backward in (("teacher", teacher, False), ("student", student, True)):
            for rows, columns, count in work:
                inputs, weight, outputs = operands[rows, columns]
                begin = time.perf_counter()
                for _ in range(count):
                    torch.mm(inputs, weight.t())
                    if backward:
                        torch.mm(outputs, weight)
                        torch.mm(outputs.t(), inputs)
                spent["heads" if columns == size.vocabulary else part] += time.perf_counter() - begin
        return spent

    return step


def _engine(folder: Path, size: Size, **over: Any) -> Step:
    """The engine's own step with the seconds of its parts."""
    from stillroom.training import step as steps
    from stillroom.training.run import RunState

    run = make_run(folder, size, **over)
    run.student.train()
    state, spent = RunState(), {"teacher": 0.0, "student forward": 0.0, "head": 0.0, "backward": 0.0, "optimizer": 0.0}

    def around(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - begin

        return timed

    run.teacher.observe = around("teacher", run.teacher.observe)  # type: ignore[method-assign]
    run.student.observe = around("student forward", run.student.observe)  # type: ignore[method-assign]
    run.mix.score = around("head", run.mix.score)  # type: ignore[method-assign]
    run.precision.backward = around("backward", run.precision.backward)  # type: ignore[method-assign]
    run.precision.step = around("optimizer", run.precision.step)  # type: ignore[method-assign]
    turn = iter(range(10**9))

    def step() -> dict[str, float]:
        spent.update(dict.fromkeys(spent, 0.0))
        outcome = steps.train_step(run, state, run.loader.window(next(turn)))
        assert outcome.verdict.action == "keep", outcome.verdict
        return dict(spent)

    return step


def _plain(prepare: Callable[[Path, Size], Callable[[], None]]) -> Callable[[Path, Size], Step]:
    def make(folder: Path, size: Size) -> Step:
        step = prepare(folder, size)
        return lambda: step() or {}

    return make


def contenders(mode: str) -> dict[str, Callable[[Path, Size], Step]]:
    over = {"precision.mode": {"bf16": "bf16-mixed", "fp32": "fp32"}[mode]}
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32

    def ours(**more: str) -> Callable[[Path, Size], Step]:
        return lambda folder, size: _engine(folder, size, **over, **{"train.compile": "off", **more})

    return {
        PRODUCTS: lambda _folder, size: _products(size, dtype),
        "stillroom": ours(),
        "stillroom, both bodies compiled": ours(**{"train.compile": "both"}),
        "stillroom, stored top-64 + tail": _plain(lambda folder, size: stillroom_stored(folder, size, **over)),
        PEER: _plain(trl_gkd(0.0, is_bf16=mode == "bf16")),
    }


class _Worker:
    """A contender in its own process, which takes a step for every line it is sent."""

    def __init__(self, mode: str, name: str, folder: str, size: str) -> None:
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", mode, name, folder, size],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        self.answer()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, float] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"a contender ended early: {self._process.args}")


def serve(mode: str, name: str, folder: str, size: str) -> None:
    step = contenders(mode)[name](Path(folder), SIZES[size])
    print(_MARK + "{}", flush=True)
    for _line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        parts = step()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(_MARK + json.dumps({**spent, **parts}), flush=True)
    os._exit(0)


def bench(mode: str, size: str, rounds: int, left_out: list[str], *, saves_memory: bool) -> dict[str, Any]:
    names = [name for name in contenders(mode) if name not in left_out]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_world(Path(folder), SIZES[size], num_rows=24)  # stored answers are made at the start

        def take(round_: int, name: str, worker: _Worker) -> None:
            spent = worker.step()
            if round_ >= WARM:
                turns[name].append(spent)
            print(round_, name, {part: round(value, 2) for part, value in spent.items()}, flush=True)

        if saves_memory:
            for name in names:
                with _Worker(mode, name, folder, size) as worker:
                    for round_ in range(WARM + rounds):
                        take(round_, name, worker)
        else:
            workers = {name: stack.enter_context(_Worker(mode, name, folder, size)) for name in names}
            for round_ in range(WARM + rounds):
                for name, worker in workers.items():
                    take(round_, name, worker)
    rows = {name: _row(mine, turns) for name, mine in turns.items()}
    how = {"mode": mode, "interleaved": not saves_memory, "rounds": rounds, "threads": torch.get_num_threads()}
    return {**how, "size": vars(SIZES[size]), "turns": turns, "rows": rows}


def _row(mine: list[dict[str, float]], turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds, and the least; a ratio is of two turns of one round."""
    row: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        row[clock] = statistics.median(one[clock] for one in mine)
        row[f"least_{clock}"] = min(one[clock] for one in mine)
        for word, other in (("products", PRODUCTS), ("trl", PEER)):
            row[f"least_{clock}_x_{word}"] = row[f"least_{clock}"] / min(one[clock] for one in turns[other])
        pairs = list(zip(mine, turns[PRODUCTS], turns[PEER], strict=True))
        row[f"{clock}_x_products"] = statistics.median(one[clock] / least[clock] for one, least, _ in pairs)
        row[f"{clock}_speed_against_trl"] = statistics.median(peer[clock] / one[clock] for one, _, peer in pairs)
    parts = {part: statistics.median(one[part] for one in mine) for part in mine[0] if part not in ("wall", "cpu")}
    return {**row, "parts": {**parts, "rest": row["wall"] - sum(parts.values())} if parts else {}}


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    asked = argparse.ArgumentParser()
    asked.add_argument("mode", choices=("bf16", "fp32"))
    asked.add_argument("--size", choices=tuple(SIZES), default="135M")
    asked.add_argument("--rounds", type=int, default=ROUNDS)
    asked.add_argument("--leave-out", action="append", default=[])
    asked.add_argument("--save-memory", action="store_true", help="one contender after the other, not in turns")
    given = asked.parse_args()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    busy, load = busy_processes(), os.getloadavg()[0]
    found = bench(given.mode, given.size, given.rounds, given.leave_out, saves_memory=given.save_memory)
    result = {"benchmark": "training real step", "date": started, "machine": machine(), "load": load, **found}
    result["busy_around"] = sorted({*busy, *busy_processes()})
    large = "" if given.size == "135M" else f"_{given.size}"
    path = RESULTS / f"real_step_{given.mode}{large}_{result['threads']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in result["rows"].items():
        against = f"{row['least_cpu_x_products']:.2f} x products  {row['least_cpu_x_trl']:.2f} x trl"
        print(f"  {name:44s} {row['wall']:.2f} s, least cpu {row['least_cpu']:.2f} s  {against}  {row['parts']}")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
