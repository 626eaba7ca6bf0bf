"""The cost of a report: CPU, peak memory and size of the page for runs of 2,000, 20,000 and 200,000 steps.

    python benchmarks/report/bench_report.py

The runs are made by the formulas of tests/support/synthetic.py: three terms, two phases, ten evaluations, refused
steps. Each report is written by a process of its own, from start to end: import, reading, drawing, writing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SIZES = (2_000, 20_000, 200_000)


def measure(folder: Path) -> dict[str, Any]:
    from stillroom.report import write_report

    path = write_report(folder)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mb": round(used.ru_maxrss / 1024, 1),
        "page_mb": round(path.stat().st_size / 1e6, 3),
    }


def make(folder: Path, num_steps: int) -> float:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from synthetic import write_run

    write_run(folder, num_steps=num_steps)
    return round((folder / "events.jsonl").stat().st_size / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    wanted = parser.parse_args().folder
    if wanted is not None:
        print(json.dumps(measure(wanted)))
        return
    rows = []
    for num_steps in SIZES:
        with tempfile.TemporaryDirectory() as scratch:
            log_mb = make(Path(scratch), num_steps)
            command = [sys.executable, __file__, "--folder", scratch]
            trials = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(3)]
            best = min(trials, key=lambda trial: float(trial["cpu_seconds"]))
            rows.append({"steps": num_steps, "log_mb": log_mb, **best})
            print(rows[-1])
    machine = {"python": platform.python_version(), "system": platform.platform(), "processors": os.cpu_count()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "report.json").write_text(json.dumps({"machine": machine, "best_of": 3, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
