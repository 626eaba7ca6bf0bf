"""Training steps on an idle machine and beside busy processes, by how OpenMP's threads wait for each other.

    python benchmarks/training/bench_busy.py idle     # seconds a step, the ways of waiting taking turns
    python benchmarks/training/bench_busy.py busy     # the same beside two busy processes
    python benchmarks/training/bench_busy.py first    # the same as idle where others use the machine (needs root)
    python benchmarks/training/bench_busy.py demo     # a short demo as a user starts it, alone and beside two

Threads that spin at the end of each parallel loop are quickest when every thread has a core of its own. Beside other
processes the thread that is waited for may not be running: the spinning one then burns the slice it could have had.
Each way of waiting is a process of its own, because libgomp reads the variables once, when torch is loaded. Idle
turns count only when nothing of others was busy meanwhile; the rest are repeated, and what could not be had is said.
Busy turns count as they come: others' processes only make the machine busier, and both sides of a ratio have them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))

RESULTS = Path(__file__).with_name("results")
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
AS_IT_COMES = "as it comes"
WAYS: dict[str, dict[str, str]] = {
    AS_IT_COMES: {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
FIRST_ROUNDS, FIRST_STEPS = 8, 4
IDLE_ROUNDS, IDLE_STEPS, BUSY_ROUNDS, BUSY_STEPS, NUM_BUSY = 10, 6, 3, 2, 2
DEMO_WAYS = {way: WAYS[way] for way in (AS_IT_COMES, "passive")}
DEMO_STEPS = 60
QUIET, ANYTHING = 0.1, float("inf")  # cores
PATIENCE = 300.0  # seconds; what was not had by then is not had
_MARK = "benchmark: "
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # and no longer than that


def environment(way: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key not in NAMES}, **WAYS[way]}


def serve() -> None:
    """Take as many steps as each line asks for; print the seconds."""
    from stillroom.config import load_config
    from stillroom.precision.device import find_device
    from stillroom.telemetry import EventLog
    from stillroom.training.build import build_run
    from stillroom.training.models import load_models
    from stillroom.training.run import RunState
    from stillroom.training.step import train_step

    with tempfile.TemporaryDirectory() as folder:
        config = load_config(preset="demo")
        device = find_device("cpu")
        log = EventLog(Path(folder) / "events.jsonl")
        run = build_run(config, Path(folder), log, device=device, models=load_models(config, device))
        run.student.train()
        windows = [run.loader.window(index) for index in range(8)]
        state, turn = RunState(), iter(range(10**9))
        print(_MARK + "{}", flush=True)
        for line in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(int(line)):
                train_step(run, state, windows[next(turn) % len(windows)])
            spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            print(_MARK + json.dumps(spent), flush=True)
        os._exit(0)


class Worker:
    """One way of waiting in a process of its own, which takes steps for every line it is sent."""

    def __init__(self, way: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(way),
        )  # fmt: skip

    def __enter__(self) -> Worker:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def steps(self, count: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return {clock: seconds / count for clock, seconds in self._answer().items()}

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                answer: dict[str, float] = json.loads(line.removeprefix(_MARK))
                return answer
        raise SystemExit(f"a worker ended early: {self._process.args}")


@contextlib.contextmanager
def busy(count: int) -> Iterator[tuple[int, ...]]:
    """So many processes that do nothing but run."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield tuple(other.pid for other in others)
    finally:
        for other in others:
            other.kill()
            other.wait()


class Others:
    """CPU time of everything on this machine but us, by the kernel's count."""

    def __init__(self, own: tuple[int, ...]) -> None:
        self._own = own

    def around(self, call: Callable[[], dict[str, float]], *, minus: bool = False) -> tuple[dict[str, float], float]:
        """What a call returns, and how many cores processes that are not ours kept busy meanwhile.

        `minus`: the call starts processes and ends them, and its answer holds their CPU seconds.
        """
        before, begin = self._seconds(), time.perf_counter()
        answer = call()
        spent = self._seconds() - before - (answer["cpu"] if minus else 0.0)
        return answer, max(0.0, spent / (time.perf_counter() - begin))

    def wait_for_quiet(self, until: float, quiet: float) -> bool:
        while time.monotonic() < until:
            if quiet == ANYTHING or self.around(lambda: time.sleep(0.4) or {})[1] < quiet:
                return True
        return False

    def _seconds(self) -> float:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        busy_ticks = sum(fields[:3]) + sum(fields[5:8])
        mine = 0
        for process in (os.getpid(), *self._own):
            spent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            mine += int(spent[11]) + int(spent[12])
        return (busy_ticks - mine) / os.sysconf("SC_CLK_TCK")


Round = dict[str, dict[str, float]]  # seconds a step of each way that had quiet


def rounds_of(
    workers: dict[str, Worker], others: Others, wanted: int, *, steps: int, quiet: float
) -> tuple[list[Round], dict[str, Any]]:
    """Rounds in which every way takes a turn; turns in which others used more than `quiet` cores are thrown away."""
    until = time.monotonic() + PATIENCE
    found: list[Round] = []
    thrown, foreign_cores = 0, []
    names = list(workers)
    while len(found) < wanted and time.monotonic() < until:
        kept: Round = {}
        for name in names:
            if not others.wait_for_quiet(until, quiet):
                break
            spent, foreign = others.around(lambda name=name: workers[name].steps(steps))
            if foreign < quiet:
                kept[name] = spent
                foreign_cores.append(round(foreign, 2))
            else:
                thrown += 1
        names = [*names[1:], names[0]]
        if AS_IT_COMES in kept and len(kept) > 1:
            found.append(kept)
    said = {"rounds": len(found), "wanted": wanted, "turns_thrown_away": thrown, "foreign_cores": foreign_cores}
    return found, said


def summarised(found: list[Round]) -> dict[str, dict[str, float]]:
    """Medians over rounds; a ratio is of two turns of one round, so a slow minute hits both."""
    rows: dict[str, dict[str, float]] = {}
    for way in WAYS:
        mine = [one for one in found if way in one]
        rows[way] = {"turns": len(mine)}
        for clock in ("wall", "cpu") if mine else ():
            rows[way][clock] = statistics.median(one[way][clock] for one in mine)
            ratios = [one[way][clock] / one[AS_IT_COMES][clock] for one in mine]
            rows[way][f"{clock}_against_as_it_comes"] = statistics.median(ratios)
    return rows


def bench_first() -> dict[str, Any]:
    """`idle` on a machine that others use: ours run in real time, before all others, for a quarter of a minute.

    Caches and the memory bus are still shared, and the kernel leaves others a twentieth of the time.
    """
    with ExitStack() as stack:
        workers = {way: stack.enter_context(Worker(way)) for way in WAYS}
        for worker in workers.values():
            worker.steps(1)  # warm up
        own = tuple(worker.process_id for worker in workers.values())
        for thread in (path for process in own for path in Path(f"/proc/{process}/task").iterdir()):
            os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
        found, said = rounds_of(workers, Others(own), FIRST_ROUNDS, steps=FIRST_STEPS, quiet=ANYTHING)
    return _told({"steps_a_turn": FIRST_STEPS, "busy_processes": 0, "ways": WAYS, **said, "turns": found}, found)


def bench_steps(num_busy: int, wanted: int, steps: int, quiet: float) -> dict[str, Any]:
    """The demo's steps in every way of waiting, beside so many of our processes and at most `quiet` cores of others."""
    with ExitStack() as stack:
        workers = {way: stack.enter_context(Worker(way)) for way in WAYS}
        for worker in workers.values():
            worker.steps(1)  # warm up
        own = [worker.process_id for worker in workers.values()]
        own += stack.enter_context(busy(num_busy))
        found, said = rounds_of(workers, Others(tuple(own)), wanted, steps=steps, quiet=quiet)
    return _told({"steps_a_turn": steps, "busy_processes": num_busy, "ways": WAYS, **said, "turns": found}, found)


def _told(result: dict[str, Any], found: list[Round]) -> dict[str, Any]:
    rows = summarised(found)
    print(f"seconds a step beside {result['busy_processes']} busy processes of ours, {result['rounds']} rounds")
    for way, row in rows.items():
        print(f"  {way:14s} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    return {**result, "rows": rows}


def bench_demo(ways: Iterable[str] = DEMO_WAYS) -> dict[str, Any]:
    """A shortened demo as a user starts it, with its imports, evaluations and saving: alone, then beside two."""
    rows: dict[str, dict[str, float]] = {}
    foreign = {}
    for way in ways:
        rows[way] = {}
        others = Others(())
        others.wait_for_quiet(time.monotonic() + PATIENCE, QUIET)
        seconds, cores = others.around(lambda way=way: _demo(way), minus=True)
        rows[way] |= {f"alone_{clock}": value for clock, value in seconds.items()}
        foreign[way] = cores
        with busy(NUM_BUSY):
            rows[way] |= {f"beside_two_{clock}": value for clock, value in _demo(way).items()}
        rows[way]["beside_two_over_alone"] = rows[way]["beside_two_wall"] / rows[way]["alone_wall"]
        print(f"  {way:22s} {rows[way]}, {cores:.2f} foreign cores while alone", flush=True)
    return {"demo_steps": DEMO_STEPS, "ways": DEMO_WAYS, "busy_processes": NUM_BUSY, "rows": rows,
            "foreign_cores_while_alone": foreign}  # fmt: skip


def _demo(way: str) -> dict[str, float]:
    """Wall and CPU seconds of the whole command."""
    clean = {key: value for key, value in os.environ.items() if key not in NAMES}
    before, begin = os.times(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "stillroom",
            "distill",
            "--out",
            f"{folder}/run",
            "--max-steps",
            str(DEMO_STEPS),
        ]
        subprocess.run(command, env={**clean, **DEMO_WAYS[way]}, capture_output=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"wall": time.perf_counter() - begin, "cpu": cpu}


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "idle": lambda: bench_steps(0, IDLE_ROUNDS, IDLE_STEPS, QUIET),
    "busy": lambda: bench_steps(NUM_BUSY, BUSY_ROUNDS, BUSY_STEPS, ANYTHING),
    "first": bench_first,
    "demo": bench_demo,
}


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
        return
    from measure import machine

    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    name = sys.argv[1]
    before = os.getloadavg()
    result = {"date": started, "machine": machine(), **JOBS[name](), "load_average": [before, os.getloadavg()]}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "busy.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**every, name: result}, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
