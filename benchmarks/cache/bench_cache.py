"""What a teacher's stored answers cost: bytes on disk, seconds to make and to read, and their share of a step.

    python benchmarks/cache/bench_cache.py [--model FOLDER --data SPEC] [--rows 48] [--out NAME]
    python benchmarks/cache/bench_cache.py --step

Bytes are those of the shard's file over the scored positions in it, index and checksums included. The rows are real
text of 256 tokens; each is asked once, and every kind of signal is made from the same hidden states. `--step` trains
the builtin student from a cache of the builtin teacher and takes the processor's clock around everything the stored
teacher does, in the step and in the thread that reads ahead.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from stillroom import __version__
from stillroom.config import load_config
from stillroom.data import open_data
from stillroom.models import open_teacher
from stillroom.teachers.cache.manifest import Manifest
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import commit_shard, needed_rows, open_store, pack_shard, plan_shards
from stillroom.teachers.live import LiveTeacher
from stillroom.teachers.signals import RowAnswer, SignalSpec, reduce_row, signal_of
from stillroom.teachers.sparse import SparseTeacher
from stillroom.training.write_cache import make_cache

RESULTS = Path(__file__).parent / "results"
SPECS = (
    SignalSpec("hybrid", 8, 12),
    SignalSpec("hybrid", 12, 12),
    SignalSpec("hybrid", 4, 12),
    SignalSpec("sampled", 0, 50),
    SignalSpec("top_k", 8, 0),
    SignalSpec("top_k", 16, 0),
    SignalSpec("top_k", 64, 0),
    SignalSpec("top_k", 256, 0),
)


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "stillroom": __version__},
    }


def sizes(model: str, data: str, num_rows: int) -> dict[str, Any]:
    config = load_config(overrides={"teacher.model": model, "data.train": data, "data.max_length": 256})
    loaded = open_teacher(config.teacher, torch.float32)
    rows = open_data(config.data, loaded.tokenizer).train
    chosen = np.linspace(0, len(rows) - 1, num_rows).astype(int).tolist()
    size = loaded.anatomy.vocab_rows
    live = LiveTeacher(loaded.network, vocab_size=size, device=torch.device("cpu"), offload=False,
                       is_described=loaded.is_described)  # fmt: skip
    asked, began = [], time.process_time()
    for index in chosen:
        batch = rows.batch([index])
        (signal,), (targets,) = SparseTeacher(live, SPECS[0])._row_by_row(batch)
        asked.append((batch.keys[0], signal, targets))
    forward = time.process_time() - began
    positions = sum(len(targets) for _, _, targets in asked)
    (plan,) = plan_shards(needed_rows([(rows, chosen)]), 1 << 40)
    found = []
    for spec in SPECS:
        began = time.process_time()
        answers = {key: reduce_row(signal.hidden, signal.head, targets, spec, key) for key, signal, targets in asked}
        reduced = time.process_time() - began
        with tempfile.TemporaryDirectory() as folder:
            manifest = Manifest(spec.within(size), size, "", {})
            open_store(Path(folder), manifest)
            began = time.process_time()
            commit_shard(Path(folder), plan, pack_shard(answers, manifest))
            packed = time.process_time() - began
            cache = Cache(Path(folder))
            began = time.process_time()
            for key in answers:
                signal_of(RowAnswer.join([cache.answer(key)]), spec)
            read = time.process_time() - began
            line = {
                **spec.to_dict(),
                "bytes_per_position": round(cache.num_bytes / positions, 2),
                "mean_mass": None if cache.mean_mass is None else round(cache.mean_mass, 4),
                "reduce_us_per_position": round(1e6 * reduced / positions, 1),
                "pack_us_per_position": round(1e6 * packed / positions, 1),
                "read_us_per_position": round(1e6 * read / positions, 2),
            }
        found.append(line)
        print(json.dumps(line), flush=True)
    return {
        "model": Path(model).name,
        "parameters": loaded.anatomy.num_parameters,
        "vocabulary": size,
        "data": Path(data).name,
        "rows": num_rows,
        "positions": positions,
        "forward_us_per_position": round(1e6 * forward / positions, 1),
        "signals": found,
    }


class Clock:
    """Processor seconds inside wrapped calls, of the thread that makes them."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Any) -> Any:
        def measured(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.thread_time() - began

        return measured


def step_share(num_steps: int, over: dict[str, Any]) -> dict[str, Any]:
    from stillroom.precision.device import find_device
    from stillroom.teachers.cache.reader import CachedTeacher
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models
    from stillroom.training.run import RunState
    from stillroom.training.step import attempt

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        setting = {"data.train_share": 0.03, "eval.max_batches": 2, "train.batch_size": 8, "train.max_steps": num_steps}
        config = load_config(preset="demo", overrides={**setting, **over})
        told = make_cache(config, folder / "cache", device="cpu")
        config = load_config(preset="demo", overrides={**setting, **over, "teacher.cache": str(folder / "cache")})
        with EventLog(folder / "events.jsonl") as log:
            device = find_device("cpu")
            run = build_run(config, folder, log, device=device, models=load_models(config, device, folder=folder))
            run.student.train()
            teacher = run.teacher
            assert isinstance(teacher, CachedTeacher)
            waits, reads = Clock(), Clock()
            teacher._read = reads.around(teacher._read)  # type: ignore[method-assign]
            teacher.begin = waits.around(teacher.begin)  # type: ignore[method-assign]
            teacher.observe = waits.around(teacher.observe)  # type: ignore[method-assign]
            state, shares = RunState(), []
            for step in range(num_steps):
                waits.seconds = reads.seconds = 0.0
                began = time.process_time()
                state.cursor = step
                attempt(run, state, run.loader.window(step))
                run.optimizer.zero_grad()
                whole = time.process_time() - began
                shares.append((waits.seconds / whole, reads.seconds / whole, whole))
    shares = shares[3:]
    return {
        "steps": len(shares),
        "rows": told["rows"],
        "bytes_per_position": round(told["bytes_per_position"], 2),
        "median_step_cpu_seconds": round(median(whole for _, _, whole in shares), 4),
        "share_in_the_step": round(median(wait for wait, _, _ in shares), 4),
        "share_of_reading_ahead": round(median(read for _, read, _ in shares), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin:teacher")
    parser.add_argument("--data", default="builtin:stdlib")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--out", default="")
    parser.add_argument("--step", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.step:
        name, found = "step", step_share(40, {})
    else:
        name, found = options.out or "builtin", sizes(options.model, options.data, options.rows)
    result = {"script": "benchmarks/cache/bench_cache.py", "date": time.strftime("%Y-%m-%d"), **machine(), **found}
    print(json.dumps(result, indent=1))
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
