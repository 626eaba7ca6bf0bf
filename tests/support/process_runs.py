"""Runs one after another in the processes of one torchrun job: importing torch costs more than a tiny run.

    torchrun --nproc-per-node 2 process_runs.py CASES.json

Each process writes CASES.<rank>.json: for each case the exit code it would have ended with and what it said.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from stillroom.config import load_config
from stillroom.engine.distill import distill, resume
from stillroom.errors import StillroomError
from stillroom.parallel import join


def run_case(case: dict[str, Any], rank: int) -> tuple[int, str]:
    try:
        if "resumes" in case:
            resume(case["out"], device="cpu", max_minutes=0.0, strategy=case["strategy"])
        else:
            inject = case.get("inject", {}).get(str(rank), "")
            distill(load_config(overrides=case["set"]), case["out"], device="cpu", inject=inject)
    except StillroomError as error:
        return error.exit_code, str(error.what)
    return 0, ""


def main(cases: Path) -> None:
    torch.set_num_threads(1)
    parallel = join(timeout_minutes=2)
    ends = []
    for case in json.loads(cases.read_bytes()):
        if "home" in case:  # another machine: it has nothing of the run
            os.environ["XDG_CACHE_HOME"] = case["home"]
        if "resumes" in case and parallel.is_first and case["resumes"] != case["out"]:
            shutil.copytree(case["resumes"], case["out"])
        parallel.wait()
        ends.append(run_case(case, parallel.rank))
    cases.with_suffix(f".{parallel.rank}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
