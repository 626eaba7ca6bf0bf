"""CPU and time of gloo's collectives on the loopback device, alone: what a call takes, and what a byte takes.

`all_reduce` is what ddp calls for a bucket, `all_gather` and `reduce_scatter` what fsdp calls for a layer on a CPU (the
second is an all-to-all and a sum, `parallel/fsdp.py`). `copy` is a copy inside of a process into memory that
the system has to give first.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

SIZES = (1 << 12, 1 << 18, 1 << 22, 1 << 24)  # bytes of the whole tensor
CALLS = {1 << 12: 400, 1 << 18: 200, 1 << 22: 60, 1 << 24: 20}


def serve(folder: Path, place: int) -> None:
    """A process: every collective at every size."""
    import torch
    import torch.distributed as dist

    from stillroom.parallel.base import join
    from stillroom.parallel.fsdp import _Reduce

    parallel = join(5, "fsdp")
    torch.set_num_threads(1)
    reduce, group = _Reduce(), dist.group.WORLD
    rows = []
    for size in SIZES:
        whole = torch.zeros(size // 4)
        part = torch.zeros(size // 4 // parallel.size)
        for kind, call in {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce_scatter": lambda whole=whole, part=part: reduce(part, whole, group, dist.ReduceOp.SUM),
            "copy": lambda whole=whole, size=size: torch.frombuffer(mmap(-1, size), dtype=torch.float32).copy_(whole),
        }.items():
            rows.append({"kind": kind, "size": size, **_clocked(call, CALLS[size], parallel.wait)})
    (folder / f"gloo-{place}.json").write_text(json.dumps(rows))


def _clocked(call: Callable[[], Any], num_calls: int, wait: Callable[[], None]) -> dict[str, float]:
    for _ in range(num_calls // 10):
        call()
    wait()
    cpu, clock = time.process_time(), time.monotonic()
    for _ in range(num_calls):
        call()
    spent = {"cpu_seconds": time.process_time() - cpu, "seconds": time.monotonic() - clock}
    wait()
    return {name: value / num_calls for name, value in spent.items()}


def measure(folder: Path, num_processes: int, start: Callable[..., None]) -> dict[str, Any]:
    """CPU seconds of all processes in one call, and the longest time of a process, by kind and size."""
    start([__file__, str(folder)], num_processes, environment={})
    found = [json.loads((folder / f"gloo-{place}.json").read_bytes()) for place in range(num_processes)]
    rows = [
        {
            "kind": each[0]["kind"],
            "size": each[0]["size"],
            "cpu_seconds": sum(one["cpu_seconds"] for one in each),
            "seconds": max(one["seconds"] for one in each),
        }
        for each in zip(*found, strict=True)
    ]
    return {"processes": num_processes, "calls": rows}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
