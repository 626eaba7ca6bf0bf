"""Optimizers, storages of their moments and schedules at equal CPU seconds, each with its own learning rate.

python benchmarks/quality/bench_optimizers.py

A student of 94,000 parameters learns from the dense teacher's answers. Every arm may spend the CPU seconds that AdamW
with FP32 moments takes for 400 steps. The two best arms run again with `train.schedule = "wsd"`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import book as books
import lab
import nets
import standard
from book import Book

from stillroom.config import Config

STUDENT = nets.Shape(layers=2, width=48, feed_forward=176, head_dim=16)
ARMS: dict[str, dict[str, str]] = {
    "adamw": {},
    "adamw, bfloat16": {"precision.moments": "bfloat16"},
    "adamw, int8": {"precision.moments": "int8"},
    "muon": {"train.optimizer": "muon"},
}
REFERENCE = "adamw"
WSD = ", wsd"  # ends the name of an arm
STEPS = 400  # of the reference: short budgets are the question
CHECKS = 4
_TIMED_STEPS, _TIMED_ROUNDS = 40, 3


@dataclass(frozen=True)
class Job(lab.Job):
    """A run with settings of the optimizer, as in a configuration file."""

    settings: Mapping[str, str] = field(default_factory=dict)

    def config(self) -> Config:
        table = super().config().to_dict()
        for name, value in self.settings.items():
            section, key = name.split(".")
            table[section][key] = value
        return Config(**table)


def job(arm: str, rate: float, seed: int, steps: int, checks: int = CHECKS) -> Job:
    settings = dict(ARMS[arm.removesuffix(WSD)])
    if arm.endswith(WSD):
        settings["train.schedule"] = "wsd"
    return Job(
        learning_rate=rate, steps=steps, seed=seed, transfer_tokens=standard.TOKENS, checks=checks, settings=settings
    )


def run(one: lab.Job) -> dict[str, Any]:
    return lab.run(one, nets.draw(STUDENT, one.seed))


def step_seconds() -> dict[str, float]:
    """CPU seconds of a step of each arm, measured in turns."""
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(_TIMED_ROUNDS):
        for arm, seconds in found.items():
            seconds.append(run(job(arm, 1e-3, 0, _TIMED_STEPS, checks=1))["cpu_seconds"] / _TIMED_STEPS)
    return {arm: statistics.median(seconds) for arm, seconds in found.items()}


def sweep(book: Book) -> None:
    costs = book.fact("step_seconds", step_seconds)
    for arm in ARMS:
        _tune(book, arm, costs)
    for arm in _best(book):
        _tune(book, arm + WSD, costs)


def _tune(book: Book, arm: str, costs: Mapping[str, float]) -> None:
    """Three rates a factor of three apart, and further ones while the best is at the edge; then the other seeds."""
    steps = round(STEPS * costs[REFERENCE] / costs[arm.removesuffix(WSD)])
    rates = list(books.RATES)
    while True:
        dev = {rate: book.run(arm, job(arm, rate, 0, steps), run)["dev"] or float("inf") for rate in rates}
        best = min(dev, key=lambda rate: dev[rate])
        if min(rates) < best < max(rates) or len(rates) > 2 * len(books.RATES):
            break
        rates.append(float(f"{best / 3 if best == min(rates) else best * 3:.0e}"))
    for seed in books.SEEDS[1:]:
        book.run(arm, job(arm, best, seed, steps), run)


def _best(book: Book) -> list[str]:
    """The two arms with the lowest loss on dev."""
    return sorted(ARMS, key=lambda arm: books.mean(book.values(arm, "dev").values()))[:2]


def draw(book: Book) -> None:
    against = book.values(REFERENCE)
    rows = [["arm", "test loss", "against adamw", "every seed", "learning rate", "steps", "CPU ms a step", "CPU s"]]
    for arm in dict.fromkeys(line["arm"] for line in book.runs):
        lines, tests = book.lines(arm), book.values(arm)
        differences = books.paired(tests, against)
        verdict = "better" if books.is_beyond(differences, -1) else "worse" if books.is_beyond(differences, 1) else ""
        one = next(iter(lines.values()))
        rows.append([
            arm,
            books.told(tests.values()),
            books.told(differences, 4, is_signed=True),
            verdict,
            f"{one['job']['learning_rate']:g}",
            str(one["job"]["steps"]),
            f"{1000 * book.facts['step_seconds'][arm.removesuffix(WSD)]:.1f}",
            f"{books.mean(line['cpu_seconds'] for line in lines.values()):.1f}",
        ])  # fmt: skip
    note = (
        "Forward KL from the dense teacher, a student of 94,000 parameters, held-out cross-entropy in nats a token, "
        "mean \u00b1 sd over seeds, differences paired by seed. Every arm has the CPU seconds of 400 steps of AdamW "
        "with FP32 moments, by the cost of a step that was measured in turns, and its own rate, chosen on dev. "
        "Schedules are cosine unless the name ends in wsd; these are the two best on dev."
    )
    books.save_table(book, "Optimizers at equal CPU seconds", [note, books.markdown(rows)])


if __name__ == "__main__":
    books.main(__doc__, "optimizers", sweep, draw)
