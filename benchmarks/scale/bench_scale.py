"""Two processes with one thread each beside one process with two threads: CPU, bytes sent and memory, ddp and fsdp.

    python benchmarks/scale/bench_scale.py            # writes results/scale.json and scale.md

`cpu`: the same steps (a window of two micro-batches) by one process with two threads, by two processes with one thread
each under ddp and under fsdp. CPU seconds are those of all processes, threads of the backend included, over the steps
alone. Each side is taken ROUNDS times in turn, and the median of the ratios of a round counts. `four`: the same with a
window of four micro-batches, by one process, by two with two each and by four with one each. Four processes share the
two cores here: their bytes and CPU seconds mean something, their time does not.

`apart`: as many processes at the same time that each take their share of a window and tell each other nothing. What
ddp and fsdp take more than these is what working together costs. `gloo` (gloo.py) measures the collectives alone;
simulate.py has to arrive at the one from the other.

`bytes`: what the loopback device carried during the same steps, by the kernel's count, beside what the algorithms
have to send (wire.py). Packet headers and the small sums of a step are in the measurement and not in the theory.

`memory`: the highest resident size of a process during steps, above what it had before any model was there, with a
student whose weights, gradients, moments and snapshots are most of it. Both sides have a fixed threshold above which
malloc returns memory to the system (ALLOCATOR): with the one that glibc adapts, what was freed stays resident. `plan`:
what `stillroom plan --processes N --strategy S` says of the same runs at both sizes, beside the peaks. The plan counts
tensors; what libraries take beside them is the difference of both for a student of almost nothing (`bare`).

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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "head"))
sys.path.insert(0, str(Path(__file__).parent))
import gloo
from wire import Mesh, Weights, sent

HERE = Path(__file__).parent
RESULTS = HERE / "results"
STEPS, ROUNDS = int(os.environ.get("SCALE_STEPS", "8")), int(os.environ.get("SCALE_ROUNDS", "3"))  # fewer to try it
WARM_UP = 2
BARS = {"ddp": 1.10, "fsdp": 1.25}
MEMORY_BAR = 0.6
BYTES_BAR = 0.05
SIZES = {  # width, layers, vocabulary, rows of a micro-batch, length
    "cpu": (256, 4, 4096, 8, 128),
    "memory": (768, 10, 4096, 1, 32),
    "bare": (16, 1, 4096, 1, 32),
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


def settings(folder: Path, size: str, num_micro: int) -> dict[str, Any]:
    _width, _layers, _vocabulary, rows, length = SIZES[size]
    return {
        "teacher.model": str(folder / "teacher"),
        "student.model": str(folder / size),
        "data.train": str(folder / "train.jsonl"),
        "data.max_length": length,
        "train.batch_size": rows,
        "train.gradient_accumulation_steps": num_micro,
        "train.max_steps": 1000,
        "train.compile": "off",
        "precision.mode": "fp32",
        "guard.snapshot_ring": 1,
        "checkpoint.background": "off",  # nothing is saved here
    }


def serve(folder: Path, size: str, strategy: str, num_micro: int, place: int) -> None:
    """A process of a side: build the run, take its steps, and write what it found."""
    import torch

    from stillroom.config import load_config
    from stillroom.parallel.base import join
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models
    from stillroom.training.recover import keep_snapshot
    from stillroom.training.run import RunState
    from stillroom.training.step import train_step

    parallel = join(5, strategy)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = load_config(overrides=settings(folder, size, num_micro))
    before = resident("VmRSS")
    with EventLog(folder / f"{size}-{place}.jsonl") as log:
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
            "layers": _layers_of({c.name: c.parameter.numel() for c in run.optimizer.cells["student"]}),
        }
    (folder / f"found-{place}.json").write_text(json.dumps(own))


def _layers_of(counts: dict[str, int]) -> list[int]:
    """Numbers of each layer of the student: what is not in one belongs to the root."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        if ".layers." in name:
            number = name.partition(".layers.")[2].partition(".")[0]
            found[number] = found.get(number, 0) + count
    return [found[number] for number in sorted(found, key=int)]


# -- all sides -------------------------------------------------------------------------------------------


def make_world(folder: Path) -> None:
    import tiny

    tiny.save_model(folder / "teacher", width=256, num_layers=2, vocab_size=SIZES["cpu"][2])
    for name, (width, layers, vocabulary, _rows, _length) in SIZES.items():
        tiny.save_model(folder / name, width=width, num_layers=layers, vocab_size=vocabulary, seed=2)
    tiny.save_text(folder / "train.jsonl", 4000)


def side(
    folder: Path, size: str, strategy: str, num_processes: int, num_micro: int = 1, *, holds_memory: bool = False
) -> list[dict[str, Any]]:
    """What each process of a side found. Processes that are apart do not know of each other."""
    words = [__file__, "serve", str(folder), size, "auto" if strategy == "apart" else strategy, str(num_micro)]
    start(words, num_processes, is_apart=strategy == "apart", environment=ALLOCATOR if holds_memory else {})
    return [json.loads((folder / f"found-{place}.json").read_bytes()) for place in range(num_processes)]


def start(words: list[str], num_processes: int, *, is_apart: bool = False, environment: dict[str, str]) -> None:
    """Run a script in several processes, each with its number as the last word, and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "2" if num_processes == 1 else "1", **environment}
    started = []
    for rank in range(num_processes):
        own = {"RANK": "0", "WORLD_SIZE": "1"} if is_apart else {"RANK": str(rank), "WORLD_SIZE": str(num_processes)}
        command = [sys.executable, *words, str(rank)]
        started.append(subprocess.Popen(command, env={**shared, **own}, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"{' '.join(words[1:])}, {num_processes} processes: a process failed")


def theory(strategy: str, found: dict[str, Any], num_processes: int, num_micro: int = 1) -> float:
    """Bytes that all processes together have to send in a step."""
    weights = Weights(found["parameters"] - sum(found["layers"]), tuple(found["layers"]))
    return num_processes * sent(strategy, weights, Mesh(num_processes), num_micro)


def compared(folder: Path, num_processes: int, window: int) -> dict[str, Any]:
    """Sides of one window: one process with two threads, several apart, by ddp and by fsdp."""
    share = window // num_processes
    rounds = []
    for _ in range(ROUNDS):
        sides = {"one": side(folder, "cpu", "auto", 1, window)}
        sides |= {name: side(folder, "cpu", name, num_processes, share) for name in ("apart", *BARS)}
        rounds.append({name: sum(one["cpu_seconds"] for one in found) for name, found in sides.items()})
    return {
        "processes": num_processes,
        "window": window,
        "cpu_seconds": rounds,
        "cpu_ratio": {name: statistics.median(one[name] / one["one"] for one in rounds) for name in BARS},
        "cpu_over_apart": {name: statistics.median(one[name] / one["apart"] for one in rounds) for name in BARS},
        "seconds_of_last_round": {name: max(one["seconds"] for one in found) for name, found in sides.items()},
        "bytes_per_step": {name: sides[name][0]["lo_bytes"] / STEPS for name in BARS},
        "bytes_in_theory": {name: theory(name, sides[name][0], num_processes, share) for name in BARS},
        "parameters": sides["one"][0]["parameters"],
        "layers": sides["one"][0]["layers"],
    }


def planned(folder: Path, size: str, strategy: str, num_processes: int) -> int:
    """Bytes of a process as `stillroom plan` has them, without the best student: nothing is evaluated here."""
    from stillroom.config import load_config
    from stillroom.doctor.plan.plan import find_target, with_processes
    from stillroom.training.memory import Shapes, lay_out

    target = with_processes(find_target("cpu"), num_processes, strategy)
    layout = lay_out(load_config(overrides=settings(folder, size, 1)), Shapes(target), "fp32")
    return layout.total - layout.host["best student"]


def peaks(folder: Path) -> dict[str, Any]:
    """The highest peak of a process beside what the plan says, one micro-batch each."""
    bare = max(one["peak_bytes"] for one in side(folder, "bare", "ddp", 2, holds_memory=True))
    libraries = bare - planned(folder, "bare", "ddp", 2)
    rows = []
    for size, num_processes, strategy in [(s, n, name) for s in ("cpu", "memory") for n in (2, 4) for name in BARS]:
        found = [one["peak_bytes"] for one in side(folder, size, strategy, num_processes, holds_memory=True)]
        tensors = planned(folder, size, strategy, num_processes)
        row = {"size": size, "processes": num_processes, "strategy": strategy, "peak_bytes": found}
        row |= {"planned_bytes": tensors, "plan_over_peak": tensors / max(found)}
        rows.append(row | {"plan_and_libraries_over_peak": (tensors + libraries) / max(found)})
    return {"libraries_bytes": libraries, "rows": rows}


def measure(folder: Path) -> dict[str, Any]:
    """Two processes as the bars have them, then four, the memory of both, and the collectives alone."""
    two = compared(folder, 2, 2)
    more = [compared(folder, 2, 4), compared(folder, 4, 4)]
    memory = peaks(folder)
    of_two = {
        one["strategy"]: one["peak_bytes"] for one in memory["rows"] if (one["size"], one["processes"]) == ("memory", 2)
    }
    return {
        **two,
        "peak_bytes": of_two,
        "memory_ratio": max(of_two["fsdp"]) / max(of_two["ddp"]),
        "four": more,
        "plan": memory,
        "gloo": [gloo.measure(folder, num_processes, start) for num_processes in (2, 4)],
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
    told = f"Measured {result['date']} by bench_scale.py, steps of {found['parameters'] / 1e6:.1f} million parameters."
    return "\n".join([told, "", *lines, "", *_more(found), f"Machine: {result['machine']}.", ""])


def _more(found: dict[str, Any]) -> list[str]:
    """Other numbers of processes, and the plan."""
    lines = ["| processes | micro-batches | strategy | CPU over one | CPU over apart | MB in a step | in theory |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one, name in [(one, name) for one in (found, *found["four"]) for name in BARS]:
        cells = [one["processes"], one["window"], name, f"{one['cpu_ratio'][name]:.3f}"]
        cells += [f"{one['cpu_over_apart'][name]:.3f}", f"{one['bytes_per_step'][name] / 1e6:.2f}"]
        lines.append("| " + " | ".join(map(str, [*cells, f"{one['bytes_in_theory'][name] / 1e6:.2f}"])) + " |")
    libraries = f"{found['plan']['libraries_bytes'] / 1e6:.0f} MB of libraries"
    lines += ["", f"| student | processes | strategy | MB at the peak | MB planned | over peak | with {libraries} |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in found["plan"]["rows"]:
        cells = [row["size"], row["processes"], row["strategy"], f"{max(row['peak_bytes']) / 1e6:.0f}"]
        cells += [f"{row['planned_bytes'] / 1e6:.0f}", f"{row['plan_over_peak']:.2f}"]
        cells.append(f"{row['plan_and_libraries_over_peak']:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]


def main(results: Path) -> None:
    from measure import machine

    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name))
        found = measure(Path(name))
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    result = {"benchmark": "scale", "date": started, "machine": machine(), "sizes": SIZES, "steps": STEPS}
    result["found"] = found
    results.mkdir(exist_ok=True)
    (results / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    (results / "scale.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--results", type=Path, default=RESULTS)
        main(parser.parse_args().results)
