"""A step at a real size (SmolLM2-135M's shape, its half as student, 1,024 tokens) against its matrix products.

    python benchmarks/training/real_step.py

The products are every matrix product that the step cannot do without, timed alone at their own shapes in the same
process: teacher forward, student forward and both gradients, and the four of the heads. Steps of each contender, the
products and trl's trainer take turns, each in a process of its own. Parts are timed around the calls of the step; what
is in no part is "rest". On a machine that others use, OMP_NUM_THREADS=1 and CPU seconds still say something.
"""

from __future__ import annotations

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
from epochs import REAL
from loops import make_run, stillroom_stored, trl_gkd
from measure import busy_processes, machine
from world import Size, make_world

RESULTS = Path(__file__).with_name("results")
ROUNDS, WARM = 4, 2
PRODUCTS, PEER = "the matrix products alone", "trl GKD trainer, forward KL (beta 0)"
OURS = "stillroom"
_MARK = "benchmark: "
Step = Callable[[], dict[str, float]]


def _products(size: Size) -> Step:
    """Each weight's products at 1,024 tokens: one of the teacher, three of the student."""

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
        (rows, columns): (torch.randn(size.tokens, rows), torch.randn(columns, rows), torch.randn(size.tokens, columns))
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

    run.teacher.answers = around("teacher", run.teacher.answers)  # type: ignore[method-assign]
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


CONTENDERS: dict[str, Callable[[Path, Size], Step]] = {
    PRODUCTS: lambda _folder, size: _products(size),
    OURS: lambda folder, size: _engine(folder, size, **{"train.compile": "off"}),
    "stillroom, both bodies compiled": lambda folder, size: _engine(folder, size, **{"train.compile": "both"}),
    "stillroom, stored top-64 + tail": _plain(stillroom_stored),
    PEER: _plain(trl_gkd(0.0)),
}


class _Worker:
    """A contender in its own process, which takes a step for every line it is sent."""

    def __init__(self, name: str, folder: str) -> None:
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", name, folder],
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


def serve(name: str, folder: str) -> None:
    step = CONTENDERS[name](Path(folder), REAL)
    print(_MARK + "{}", flush=True)
    for _line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        parts = step()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(_MARK + json.dumps({**spent, **parts}), flush=True)
    os._exit(0)


def bench() -> dict[str, Any]:
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_world(Path(folder), REAL)
        workers = {name: stack.enter_context(_Worker(name, folder)) for name in CONTENDERS}
        for round_ in range(WARM + ROUNDS):
            for name, worker in workers.items():
                spent = worker.step()
                if round_ >= WARM:
                    turns[name].append(spent)
                print(round_, name, {part: round(value, 2) for part, value in spent.items()}, flush=True)
    return {"size": vars(REAL), "rounds": ROUNDS, "threads": torch.get_num_threads(), "turns": turns,
            "rows": {name: _row(mine, turns) for name, mine in turns.items()}}  # fmt: skip


def _row(mine: list[dict[str, float]], turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds; a ratio is of two turns of one round."""
    row: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        row[clock] = statistics.median(one[clock] for one in mine)
        pairs = list(zip(mine, turns[PRODUCTS], turns[PEER], strict=True))
        row[f"{clock}_x_products"] = statistics.median(one[clock] / least[clock] for one, least, _ in pairs)
        row[f"{clock}_speed_against_trl"] = statistics.median(peer[clock] / one[clock] for one, _, peer in pairs)
    parts = {part: statistics.median(one[part] for one in mine) for part in mine[0] if part not in ("wall", "cpu")}
    return {**row, "parts": {**parts, "rest": row["wall"] - sum(parts.values())} if parts else {}}


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    busy = busy_processes()
    result = {"benchmark": "training real step", "date": started, "machine": machine(), **bench()}
    result["busy_around"] = sorted({*busy, *busy_processes()})
    path = RESULTS / f"real_step_{result['threads']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in result["rows"].items():
        print(f"  {name:44s} {row['wall']:.2f} s  {row['wall_x_products']:.2f} x products  {row['parts']}")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
