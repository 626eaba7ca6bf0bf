"""The standard setting that most questions share, and its baselines.

One pass over 819,200 tokens of Python in 800 steps, dense teacher. Its three baselines are run once, in a book of
their own, and stand in every table: forward KL at temperature 1, cross-entropy on as many tokens, and cross-entropy
for as many CPU seconds as the taught run takes with a live teacher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import bench_transfer
import book as books
import lab
from book import Book

TOKENS = 819_200
STEPS = 800
BASELINES = {"kd": "forward KL, T 1, weight 1", "ce": "plain, equal tokens", "ce-compute": "plain, equal compute"}


def job(objectives: Mapping[str, Any], rate: float, seed: int, steps: int = STEPS) -> lab.Job:
    return lab.Job(objectives=objectives, learning_rate=rate, steps=steps, seed=seed, transfer_tokens=TOKENS)


def tune(book: Book, arm: str, objectives: Mapping[str, Any], steps: int = STEPS, **labels: Any) -> None:
    book.tuned(arm, lambda rate, seed: job(objectives, rate, seed, steps), **labels)


def baselines() -> Book:
    """The book of the baselines, filled where it has gaps."""
    book = Book("baselines")
    ratio = book.fact("cost", bench_transfer.cost_ratio)["ratio"]
    tune(book, "kd", {"kd.weight": 1.0})
    tune(book, "ce", lab.PLAIN)
    tune(book, "ce-compute", lab.PLAIN, round(STEPS * ratio))
    return book


HEAD = ("arm", "test loss", "against forward KL", "KL to teacher", "agreement", "ECE", "learning rate", "CPU s")


def row(book: Book, arm: str, label: str, against: Mapping[int, float], **labels: Any) -> list[str]:
    """One line of a table: the arm's figures over seeds, and its paired difference to a reference."""
    lines = book.lines(arm, **labels)
    tests = book.values(arm, **labels)
    if not tests:
        return [label, "not finite at any rate", *[""] * (len(HEAD) - 2)]
    return [
        label,
        books.told(tests.values()),
        books.told(books.paired(tests, against), is_signed=True),
        _mean(lines.values(), "kl", ".3f"),
        _mean(lines.values(), "agreement", ".1%"),
        _mean(lines.values(), "ece", ".1%"),
        f"{next(iter(lines.values()))['job']['learning_rate']:g}",
        _mean(lines.values(), "cpu_seconds", ".1f"),
    ]


def _mean(lines: Iterable[books.Line], what: str, form: str) -> str:
    return f"{books.mean(line[what] for line in lines):{form}}"


def compared(book: Book, arms: Iterable[str]) -> tuple[str, list[str]]:
    """The table of some arms below the baselines, and which of them beat forward KL on every seed."""
    reference = Book("baselines").values("kd")
    found = [arm for arm in arms if book.lines(arm)]
    rows = [list(HEAD), *baseline_rows(), *(row(book, arm, arm, reference) for arm in found)]
    better = [arm for arm in found if books.is_beyond(books.paired(book.values(arm), reference), -1)]
    return books.markdown(rows), better


def baseline_rows(arms: Iterable[str] = tuple(BASELINES)) -> list[list[str]]:
    book = Book("baselines")
    return [row(book, arm, BASELINES[arm], book.values("kd")) for arm in arms]


NOTE = (
    "One pass over 819,200 tokens, 800 steps, dense teacher; held-out cross-entropy in nats a token, mean \u00b1 sd "
    "over seeds, differences paired by seed. Every arm has its own learning rate, chosen on dev by the same rule. CPU "
    "seconds are the student's alone: a live teacher costs the same again in every taught arm."
)
