"""Runs one after another in the processes of one group.

Each process writes CASES.<rank>.json: for each case the exit code it would have ended with and what it said.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from stillroom.config import load_config
from stillroom.core.errors import StillroomError
from stillroom.parallel.base import join
from stillroom.parallel.fsdp import Sharded
from stillroom.training.distill import distill, resume


def run_case(case: dict[str, Any], rank: int) -> tuple[int, str]:
    try:
        if "resumes" in case:
            how = {key: case[key] for key in ("strategy", "shard_size") if key in case}
            resume(case["out"], device="cpu", max_minutes=0.0, **how)
        elif "copies" in case:
            compare_copies(rank, **case["copies"])
        else:
            inject = case.get("inject", {}).get(str(rank), "")
            distill(load_config(overrides=case["set"]), case["out"], device="cpu", inject=inject)
    except StillroomError as error:
        return error.exit_code, str(error.what)
    return 0, ""


def compare_copies(rank: int, size: int, shard_size: int, changed: int) -> None:
    """Shard a layer, change one bit of what process `changed` holds, and compare the copies."""
    parallel, layer = Sharded(rank, size, shard_size), torch.nn.Linear(8, 8)
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 1.0)
    parallel.place(layer, [])
    held = {name: parameter.to_local().detach() for name, parameter in layer.named_parameters()}
    assert [tuple(part.shape) for part in held.values()] == [(8 // shard_size, 8), (8 // shard_size,)]
    if rank == changed:
        held["weight"].view(torch.int32).bitwise_xor_(1)
    parallel.check_replicas(held)


def main(cases: Path) -> None:
    parallel = join(timeout_minutes=2)
    rank, ends = int(os.environ["RANK"]), []
    for case in json.loads(cases.read_bytes()):
        if "home" in case:  # another machine: it has nothing of the run
            os.environ["XDG_CACHE_HOME"] = case["home"]
        if "resumes" in case and rank == 0 and case["resumes"] != case["out"]:
            shutil.copytree(case["resumes"], case["out"])
        parallel.wait()
        ends.append(run_case(case, rank))
    cases.with_suffix(f".{rank}.json").write_text(json.dumps(ends))
