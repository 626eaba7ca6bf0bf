"""Time and memory of a step, and what the machine was doing meanwhile."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from contenders import CONTENDERS, Data, Problem, Step, bare_products

from stillroom import losses
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.products import Products

Turns = dict[str, list[float]]  # of one contender: wall and CPU seconds, and how many times the limit each was


def interleaved(
    steps: Mapping[str, tuple[Data, Step]], limit: tuple[Data, Step], turns: Mapping[str, int], repetitions: int
) -> dict[str, Turns]:
    """Every turn of each step.

    The contenders take turns (some several in a repetition: those whose bar is near), and each stands between two runs
    of the limit, by whose mean it is divided: a slow minute of the machine hits all three.
    """
    seen: dict[str, Turns] = {name: {} for name in steps}
    for repetition in range(repetitions + 1):
        before = _clocked(*limit)
        for name, (data, step) in steps.items():
            for _ in range(turns[name] if repetition else 1):
                spent, after = _clocked(data, step), _clocked(*limit)
                if repetition:  # the first is for warming up: page faults, caches, compilation
                    ratios = {f"ratio_{clock}": 2 * spent[clock] / (before[clock] + after[clock]) for clock in spent}
                    for key, value in {**spent, **ratios}.items():
                        seen[name].setdefault(key, []).append(round(value, 5))
                before = after
    return seen


def summarised(sittings: Sequence[Mapping[str, Turns]]) -> dict[str, dict[str, float]]:
    """The turns of all sittings together: the least seconds, the median of the ratios and the middle half of them."""
    rows: dict[str, dict[str, float]] = {}
    for name in sittings[0]:
        seen = {key: [value for sitting in sittings for value in sitting[name][key]] for key in sittings[0][name]}
        row = {key: (statistics.median if "ratio" in key else min)(values) for key, values in seen.items()}
        if len(walls := seen["ratio_wall"]) > 1:
            row["ratio_wall_low"], _, row["ratio_wall_high"] = statistics.quantiles(walls, n=4, method="inclusive")
        rows[name] = row
    return rows


def code_sum() -> str:
    """Of what is measured and how: turns of different code are never put together."""
    sources = [*Path(losses.__file__).parent.rglob("*"), *Path(__file__).parent.glob("*.py")]
    found = hashlib.sha256()
    for path in sorted(p for p in sources if p.suffix in (".py", ".cpp", ".h") and p.name != "draw.py"):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _clocked(data: Data, step: Step) -> dict[str, float]:
    data.forget()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def where_it_goes(data: Data, step: Step, kernel: str, repetitions: int) -> dict[str, float]:
    """Wall seconds of one of our steps by part, the median of the repetitions: products, rows, and the rest."""
    spent: dict[str, list[float]] = {"products": [], "rows": [], "rest": []}
    places = [
        ("products", Products, "logits"),
        ("products", Products, "pull_back"),
        ("rows", type(choose_kernel(kernel).kernel), "run"),
    ]
    for _ in range(repetitions):
        now = dict.fromkeys(spent, 0.0)
        with ExitStack() as stack:
            for part, owner, method in places:
                timed = _timed(getattr(owner, method), part, now)
                stack.enter_context(mock.patch.object(owner, method, timed))
            data.forget()
            begin = time.perf_counter()
            step()
            whole = time.perf_counter() - begin
        now["rest"] = whole - now["products"] - now["rows"]
        for part, seconds in now.items():
            spent[part].append(seconds)
    return {part: statistics.median(found) for part, found in spent.items()}


def _timed(method: Callable[..., Any], part: str, into: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        result = method(*args)
        into[part] += time.perf_counter() - begin
        return result

    return call


def peak_extra_bytes(contender: str, problem: Problem) -> int:
    """Peak resident bytes of a step above its inputs and gradients, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), contender, json.dumps(asdict(problem))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1])


def _peak_here(contender: str, problem: Problem) -> int:
    chosen = next(c for c in CONTENDERS if c.name == contender)
    small = Problem(problem.kind, 8, 1000, problem.dtype)
    chosen.prepare(small, Data(small))()  # imports, thread pools and kernels are not the step's
    data = Data(problem)
    bare_products(problem, data)()  # the matrix library's own buffers are everybody's
    step = chosen.prepare(problem, data)
    before = resident_from_here()
    step()
    kept = sum(t.grad.numel() * t.grad.element_size() for t in (data.hidden, data.weight) if t.grad is not None)
    return peak_resident() - before - kept


def resident_from_here() -> int:
    """Bytes in use now, what was freed given back and the peak forgotten: preparing is not part of a step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed before must not be taken for memory saved
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return _status("VmRSS")


def peak_resident() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    information = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in information.splitlines() if "model name" in line), "unknown")
    isa = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in information]
    packages = ("torch", "transformers", "trl", "liger-kernel", "torchtune", "numpy")
    return {
        "processor": model,
        "instructions": isa,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
        "other_busy_processes": busy_processes(),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def busy_processes() -> list[str]:
    """Commands of other processes that use more than a tenth of a core over half a second."""

    def ticks() -> dict[str, int]:
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:
                continue  # it ended meanwhile
            fields = text.rpartition(")")[2].split()
            found[stat.parent.name] = int(fields[11]) + int(fields[12])
        return found

    first = ticks()
    time.sleep(0.5)
    busy = [pid for pid, spent in ticks().items() if spent - first.get(pid, spent) > 5 and pid != str(os.getpid())]
    names = []
    for pid in busy:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            names.append(" ".join(Path(word).name for word in words[:3]))  # names: folders are nobody's business
        except OSError:
            continue
    return names


if __name__ == "__main__":
    print(_peak_here(sys.argv[1], Problem(**json.loads(sys.argv[2]))))
