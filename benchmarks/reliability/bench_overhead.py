"""What the guard costs: a run with it, and the same run with every check taken out, interleaved in one process.

    python benchmarks/reliability/bench_overhead.py

Taken out: the verdict, the statistics, the snapshots, the canary and the finiteness checks before saving. The gradient
norm stays in both, because clipping needs it. CPU seconds, the minimum of several repetitions.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from common import SETTING, write

BAR = 1.02


def seconds_of_run(guarded: bool, steps: int) -> float:
    from stillroom.config import load_config
    from stillroom.engine import loop
    from stillroom.engine.build import build_run, find_device, load_models
    from stillroom.engine.loop import Stop, training
    from stillroom.engine.state import RunState
    from stillroom.guard import Guard
    from stillroom.telemetry import EventLog
    from stillroom.types import Verdict

    folder = Path(tempfile.mkdtemp())
    over = {
        **SETTING,
        "train.max_steps": steps,
        "train.eval_steps": 10_000,
        "train.save_steps": 10_000,
        "guard.snapshot_steps": 50,
    }
    config = load_config(preset="demo", overrides=over)
    device = find_device("cpu")
    kept = (
        Guard.judge,
        Guard.accept,
        loop.take_snapshot,
        loop.is_sound,
        loop.save_checkpoint,
        loop.run_evaluation,
        loop.judge_student,
    )
    try:
        with EventLog(folder / "events.jsonl") as log:
            run = build_run(config, folder, log, device=device, models=load_models(config, device))
            # Evaluation and checkpoints are not the guard's, and would hide what is.
            loop.save_checkpoint = lambda *_a, **_k: None
            loop.run_evaluation = lambda *_a, **_k: None
            loop.judge_student = lambda *_a, **_k: None
            if not guarded:
                Guard.judge = lambda _self, _evidence: Verdict("keep")
                Guard.accept = lambda _self, _evidence: None
                loop.take_snapshot = lambda *_a: True
                loop.is_sound = lambda *_a: True
            state = RunState()
            steps_of_run = training(run, state, Stop())
            for _ in range(10):
                next(steps_of_run)
            began = time.process_time()
            for _outcome in steps_of_run:
                pass
            return time.process_time() - began
    finally:
        Guard.judge, Guard.accept = kept[0], kept[1]
        loop.take_snapshot, loop.is_sound, loop.save_checkpoint, loop.run_evaluation, loop.judge_student = kept[2:]
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        for guarded in (True, False):
            times[guarded].append(seconds_of_run(guarded, 210))
            print(guarded, round(times[guarded][-1], 3), flush=True)
    ratio = min(times[True]) / min(times[False])
    line = {"guarded": times[True], "bare": times[False], "ratio": ratio, "bar": BAR, "passed": ratio <= BAR}
    print(json.dumps(line))
    write("overhead", line)


if __name__ == "__main__":
    main()
