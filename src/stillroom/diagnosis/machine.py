"""Causes in the machine: a slow loader, growing memory, too few processors."""

from __future__ import annotations

from itertools import pairwise

from stillroom.diagnosis.case import Case, middle, numbers, span
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.events import Event
from stillroom.telemetry.run_record import mapping
from stillroom.telemetry.wording import as_number, format_duration, format_percent

_LEAST_STEPS = 8
_SLOW_LOADER = 0.3  # of a step's time
_WITHOUT_PROCESSOR = 0.7  # of the time in which one thread should be busy
_LEAST_GROWTH_GB = 0.1
_LEAST_GROWTH = 0.1  # of the first quarter
_SETTLING_STEPS = 4  # memory grows while the first steps and evaluations allocate


def _shares(steps: list[Event], key: str) -> list[float]:
    """A duration of each step as a share of its time."""
    pairs = [(as_number(step.get(key)), as_number(step.get("seconds"))) for step in steps]
    return [part / whole for part, whole in pairs if part is not None and whole]


def slow_loader(case: Case) -> Finding | None:
    """Steps wait for their data."""
    shares = _shares(case.steps[1:], "loader_seconds")
    if len(shares) < _LEAST_STEPS or middle(shares) < _SLOW_LOADER:
        return None
    waited = middle(numbers(case.steps[1:], "loader_seconds"))
    return Finding(
        "slow_loader",
        "warning",
        f"the median step waits {format_duration(waited)} for its batch, {format_percent(middle(shares))} of its time",
        "keep the tokens in the store on a local disk, and shorten what a step reads",
        steps=span(case.steps),
        setting="data.cache=auto",
        otherwise="put the data and the token store on a fast disk of this machine, and shorten what a step reads",
        numbers={"share": middle(shares), "loader_seconds": waited},
    )


def memory_creep(case: Case) -> Finding | None:
    """Memory that grows in every stretch of the run."""
    steps = case.steps[_SETTLING_STEPS:]
    if len(steps) < 3 * 4:
        return None
    for key, where in (("gpu_memory_gb", "the card"), ("memory_gb", "the process")):
        sizes = [value for value in numbers(steps, key) if value > 0]
        fifth = len(sizes) // 5
        if fifth < 2:
            continue
        # The first fifth is left out: caches and the first evaluation fill up there.
        levels = [middle(sizes[at * fifth : (at + 1) * fifth]) for at in range(1, 5)]
        growth = levels[-1] - levels[0]
        rises = [after - before for before, after in pairwise(levels)]
        if growth < max(_LEAST_GROWTH_GB, _LEAST_GROWTH * levels[0]) or min(rises) < 0.15 * growth:
            continue
        per_step = growth / (3 * fifth)
        total = as_number(mapping(case.record.start, "machine").get("memory_gb"))
        full = (
            f"; {total:g} GB are full in {(total - sizes[-1]) / per_step:,.0f} steps"
            if total and key == "memory_gb"
            else ""
        )
        return Finding(
            "memory_creep",
            "warning",
            f"the memory of {where} grows by {1000 * per_step:.3g} MB a step, from {levels[0]:.3g} GB to "
            f"{levels[-1]:.3g} GB{full}",
            "save often and resume (`stillroom resume RUN` begins with a fresh process); look for a listener or an "
            "extension that keeps tensors",
            steps=span(steps),
            setting="train.save_steps=100",
            otherwise="look for a listener or an extension that keeps tensors; `stillroom resume RUN` begins afresh",
            numbers={"gb_per_step": per_step, "first_gb": levels[0], "last_gb": levels[-1]},
        )
    return None


def machine_overloaded(case: Case) -> Finding | None:
    """On a CPU, the process did not get a processor: others use the machine, or it swaps."""
    steps = [step for step in case.steps[1:] if not as_number(step.get("gpu_memory_gb"))]
    busy, waited = _shares(steps, "cpu_seconds"), _shares(steps, "loader_seconds")
    if len(busy) < _LEAST_STEPS or middle(busy) >= _WITHOUT_PROCESSOR:
        return None
    if waited and middle(waited) >= _SLOW_LOADER:
        return None
    cores = as_number(mapping(case.record.start, "machine").get("cores"))
    others = f"; the machine has {cores:.0f}" if cores else ""
    return Finding(
        "machine_overloaded",
        "hint",
        f"in the median step the process had a processor for {format_percent(middle(busy))} of the time{others}",
        "end what else runs, or give this run its own processors (taskset); fewer threads also help: OMP_NUM_THREADS",
        steps=span(steps),
        numbers={"cpu_share": middle(busy), "cores": cores},
    )


CAUSES = (
    Cause(memory_creep),
    Cause(slow_loader),
    Cause(machine_overloaded),
)
