"""What the guard costs: CPU seconds spent inside it, as a share of the steps it watches.

    python benchmarks/reliability/bench_overhead.py

Counted: the verdict, the statistics, the snapshots, the canary and the finiteness checks. Not counted: the gradient
norm and the one read of a step, which clipping needs anyway. Two whole runs, one with the guard and one without, differ
by less than this machine's noise from run to run (7 % was seen), so the time is taken inside one run, with the
processor's clock around each call; the median of several runs is reported.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import SETTING, write

BAR = 1.02


class Meter:
    """CPU seconds inside the wrapped calls; nested ones count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def measured(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            self._depth += 1
            try:
                return call(*args, **options)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.process_time() - began

        return measured


def one_run(steps: int) -> dict[str, float]:
    from stillroom.config import load_config
    from stillroom.precision.device import find_device
    from stillroom.telemetry import EventLog
    from stillroom.training import loop
    from stillroom.training.build import build_run
    from stillroom.training.loop import Stop, training
    from stillroom.training.models import load_models
    from stillroom.training.run import RunState

    folder = Path(tempfile.mkdtemp())
    over = {
        **SETTING,
        "train.max_steps": steps + 10,
        "train.eval_steps": 10_000,
        "train.save_steps": 10_000,
        "guard.snapshot_steps": 50,
    }
    config = load_config(preset="demo", overrides=over)
    device = find_device("cpu")
    meter = Meter()
    kept = (loop.take_snapshot, loop.check_state)
    try:
        with EventLog(folder / "events.jsonl") as log:
            run = build_run(config, folder, log, device=device, models=load_models(config, device))
            run.guard.judge = meter.around(run.guard.judge)  # type: ignore[method-assign]
            run.guard.accept = meter.around(run.guard.accept)  # type: ignore[method-assign]
            loop.take_snapshot, loop.check_state = meter.around(loop.take_snapshot), meter.around(loop.check_state)
            state = RunState()
            steps_of_run = training(run, state, Stop())
            for _ in range(10):  # allocator and caches warm up
                next(steps_of_run)
            meter.seconds, began = 0.0, time.process_time()
            for _ in range(steps - 1):  # the last step would end in an evaluation
                next(steps_of_run)
            total = time.process_time() - began
    finally:
        loop.take_snapshot, loop.check_state = kept
        shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": total, "guard_seconds": meter.seconds, "ratio": total / (total - meter.seconds)}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    runs = []
    for _ in range(3):
        runs.append(one_run(200))
        print(json.dumps(runs[-1]), flush=True)
    ratio = median(run["ratio"] for run in runs)
    write("overhead", {"runs": runs, "ratio": ratio, "bar": BAR, "passed": ratio <= BAR})


if __name__ == "__main__":
    main()
