"""The ladder of divergences: every one the product knows, each with its own learning rate.

python benchmarks/quality/bench_divergence.py
"""

from __future__ import annotations

import book as books
import standard
from book import Book

from stillroom.losses import divergences


def sweep(book: Book) -> None:
    standard.baselines()
    for name in divergences.names():
        if name != "forward_kl":  # that one is a baseline
            standard.tune(book, name, {"kd.weight": 1.0, "kd.divergence": name})


def draw(book: Book) -> None:
    arms = sorted({line["arm"] for line in book.runs}, key=lambda arm: books.mean(book.values(arm).values() or [99]))
    table, _ = standard.compared(book, arms)
    books.save_table(book, "The ladder of divergences", [standard.NOTE, table])
    figure, axes = books.axes(height=0.35 * (len(arms) + 3) + 1)
    base = Book("baselines")
    bars = [*((standard.BASELINES[arm], base.values(arm)) for arm in standard.BASELINES)]
    bars += [(arm, book.values(arm)) for arm in arms]
    bars = sorted([bar for bar in bars if bar[1]], key=lambda bar: -books.mean(bar[1].values()))
    axes.errorbar(
        [books.mean(found.values()) for _, found in bars],
        range(len(bars)),
        xerr=[books.spread(found.values()) for _, found in bars],
        fmt="o",
        capsize=3,
        color=books.COLOURS[0],
    )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_xlabel("held-out loss, nats a token")
    books.save_figure(book, figure)


if __name__ == "__main__":
    books.main(__doc__, "divergence", sweep, draw)
