"""Two processes with one thread each beside one process with two threads: CPU, bytes sent and memory, ddp and fsdp.

    python benchmarks/scale/bench_scale.py            # writes results/scale.json and scale.md

`cpu`: the same steps (a window of two micro-batches) by one process with two threads, by two processes with one thread
each under ddp and under fsdp. CPU seconds are those of all processes, threads of the backend included, over the steps
alone. Each side is taken ROUNDS times in turn, and the median of the ratios of a round counts.

`bytes`: what the loopback device carried during the same steps, by the kernel's count, beside what the algorithms
have to send: a ring all-reduce sends 2 (n-1)/n of the gradient from each process, an all-gather and a reduce-scatter
(n-1)/n each. Packet headers and the small sums of a step are in the measurement and not in the theory.

`memory`: the highest resident size of a process during steps, above what it had before any model was there, with a
student whose weights, gradients, moments and snapshots are most of it. Both sides have a fixed threshold above which
malloc returns memory to the system (ALLOCATOR): with the one that glibc adapts, what was freed stays resident.

Everything is on a CPU with gloo. Nothing here was run on a card.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "support"))
sys.path.insert(0, str(HERE.parent / "head"))

RESULTS = HERE / "results"
STEPS, WARM_UP, ROUNDS = 8, 2, 3
BARS = {"ddp": 1.10, "fsdp": 1.25}
MEMORY_BAR = 0.6
BYTES_BAR = 0.05
SIZES = {  # width, layers, vocabulary, rows of a micro-batch, length
    "cpu": (256, 4, 4096, 8, 128),
    "memory": (768, 10, 4096, 1, 32),
}


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "2"}


# -- one process -----------------------------------------------------------------------------------------


def lo_bytes() -> int:
    """Bytes that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise SystemExit("no loopback device in /proc/net/dev")


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {key} in /proc/self/status")


def serve(folder: Path, size: str, strategy: str) -> None:
    """A process of a side: build the run, take its steps, and let the first one write what all found."""
    import torch

    from stillroom.config import load_config
    from stillroom.engine.building.assemble import build_run
    from stillroom.engine.building.models import load_models
    from stillroom.engine.recovery.recover import keep_snapshot
    from stillroom.engine.state import RunState
    from stillroom.engine.step import train_step
    from stillroom.parallel import join
    from stillroom.telemetry import EventLog

    parallel = join(5, strategy)
    torch.set_num_threads(2 if parallel.size == 1 else 1)
    _width, _layers, _vocabulary, rows, length = SIZES[size]
    config = load_config(
        overrides={
            "teacher.model": str(folder / "teacher"),
            "student.model": str(folder / size),
            "data.train": str(folder / "train.jsonl"),
            "data.max_length": length,
            "train.batch_size": rows,
            "train.gradient_accumulation_steps": 2 // parallel.size,
            "train.max_steps": 1000,
            "train.compile": "off",
            "precision.mode": "fp32",
            "guard.snapshot_ring": 1,
        }
    )
    before = resident("VmRSS")
    with EventLog(folder / f"{size}-{strategy}-{parallel.size}-{parallel.rank}.jsonl") as log:
        device = torch.device("cpu")
        models = load_models(config, device, parallel=parallel)
        run = build_run(config, folder, log, device=device, models=models, parallel=parallel)
        run.student.train()
        state = RunState()
        keep_snapshot(run, state)
        for _ in range(WARM_UP):
            train_step(run, state, run.loader.window(state.cursor))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        parallel.wait()
        sent, cpu, clock = lo_bytes(), time.process_time(), time.monotonic()
        for _ in range(STEPS):
            train_step(run, state, run.loader.window(state.cursor))
        parallel.wait()
        own = {
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.monotonic() - clock,
            "lo_bytes": lo_bytes() - sent,
            "peak_bytes": resident("VmHWM") - before,
            "highest_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
            "parameters": run.num_trained,
            "root_parameters": sum(
                cell.parameter.numel() for cell in run.optimizer.cells["student"] if ".layers." not in cell.name
            ),
        }
    found = parallel.collect(own)
    if parallel.is_first:
        (folder / "found.json").write_text(json.dumps(found))


# -- all sides -------------------------------------------------------------------------------------------


def make_world(folder: Path) -> None:
    import tiny

    tiny.save_model(folder / "teacher", width=256, num_layers=2, vocab_size=SIZES["cpu"][2])
    for name, (width, layers, vocabulary, _rows, _length) in SIZES.items():
        tiny.save_model(folder / name, width=width, num_layers=layers, vocab_size=vocabulary, seed=2)
    tiny.save_text(folder / "train.jsonl", 4000)


def side(folder: Path, size: str, strategy: str, num_processes: int) -> list[dict[str, Any]]:
    """What each process of a side found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= ALLOCATOR if size == "memory" else {}
    started = []
    for rank in range(num_processes):
        own = {"RANK": str(rank), "WORLD_SIZE": str(num_processes), "MASTER_PORT": str(port)}
        own["OMP_NUM_THREADS"] = "2" if num_processes == 1 else "1"
        words = [sys.executable, __file__, "serve", str(folder), size, strategy]
        started.append(subprocess.Popen(words, env={**shared, **own}, stdout=subprocess.DEVNULL))
    if any(process.wait() for process in started):
        raise SystemExit(f"{size}, {strategy}, {num_processes} processes: a process failed")
    found: list[dict[str, Any]] = json.loads((folder / "found.json").read_bytes())
    return found


def theory(strategy: str, found: dict[str, Any], num_processes: int) -> float:
    """Bytes that all processes together have to send in a step of one micro-batch each.

    ddp: one all-reduce of the gradient. fsdp: each layer is gathered for the forward and again for the backward, the
    root once; each gradient is reduce-scattered once.
    """
    share, each = (num_processes - 1) / num_processes, 4.0
    whole, root = found["parameters"], found["root_parameters"]
    units = 2 * whole if strategy == "ddp" else (2 * (whole - root) + root) + whole
    return num_processes * share * each * units


def measure(folder: Path) -> dict[str, Any]:
    rounds = []
    for _ in range(ROUNDS):
        sides = {"one": side(folder, "cpu", "auto", 1)}
        sides |= {strategy: side(folder, "cpu", strategy, 2) for strategy in BARS}
        rounds.append({name: sum(one["cpu_seconds"] for one in found) for name, found in sides.items()})
        clock = {name: max(one["seconds"] for one in found) for name, found in sides.items()}
        sent = {name: sides[name][0]["lo_bytes"] / STEPS for name in BARS}
        wanted = {name: theory(name, sides[name][0], 2) for name in BARS}
    cpu = {name: statistics.median(one[name] / one["one"] for one in rounds) for name in BARS}
    memory = {name: [one["peak_bytes"] for one in side(folder, "memory", name, 2)] for name in BARS}
    return {
        "cpu_seconds": rounds,
        "cpu_ratio": cpu,
        "seconds_of_last_round": clock,
        "bytes_per_step": sent,
        "bytes_in_theory": wanted,
        "peak_bytes": memory,
        "memory_ratio": max(memory["fsdp"]) / max(memory["ddp"]),
        "parameters": sides["one"][0]["parameters"],
    }


def table(result: dict[str, Any]) -> str:
    found = result["found"]
    lines = ["| measure | ddp | fsdp | bar |", "|---|---|---|---|"]
    ratio = found["cpu_ratio"]
    bars = " / ".join(f"{bar:.2f}" for bar in BARS.values())
    lines.append(f"| CPU of two processes over CPU of one | {ratio['ddp']:.3f} | {ratio['fsdp']:.3f} | {bars} |")
    sent, wanted = found["bytes_per_step"], found["bytes_in_theory"]
    lines.append(f"| MB sent in a step | {sent['ddp'] / 1e6:.2f} | {sent['fsdp'] / 1e6:.2f} | |")
    lines.append(f"| MB in theory | {wanted['ddp'] / 1e6:.2f} | {wanted['fsdp'] / 1e6:.2f} | within {BYTES_BAR:.0%} |")
    peaks = {name: max(values) / 1e6 for name, values in found["peak_bytes"].items()}
    lines.append(f"| MB at the peak of a process | {peaks['ddp']:.0f} | {peaks['fsdp']:.0f} | |")
    lines.append(f"| memory of fsdp over ddp | | {found['memory_ratio']:.3f} | {MEMORY_BAR} |")
    return "\n".join([f"Measured {result['date']} by bench_scale.py on {result['machine']}.", "", *lines, ""])


def main() -> None:
    from measure import machine

    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name))
        found = measure(Path(name))
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    result = {"benchmark": "scale", "date": started, "machine": machine(), "sizes": SIZES, "found": found}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "scale.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        argparse.ArgumentParser(description=__doc__).parse_args()
        main()
