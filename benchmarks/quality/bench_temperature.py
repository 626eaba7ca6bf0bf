"""Temperature and weight of distillation: the whole grid, each cell with its own learning rate.

python benchmarks/quality/bench_temperature.py
"""

from __future__ import annotations

import book as books
import standard
from book import Book

TEMPERATURES = (0.5, 1.0, 2.0, 4.0)
WEIGHTS = (0.5, 1.0)  # of distillation; cross-entropy has the rest


def sweep(book: Book) -> None:
    standard.baselines()
    for temperature in TEMPERATURES:
        for weight in WEIGHTS:
            if (temperature, weight) != (1.0, 1.0):  # that one is a baseline
                objectives = {"kd.weight": weight, "ce.weight": round(1 - weight, 6), "kd.temperature": temperature}
                standard.tune(book, _arm(temperature, weight), objectives)


def _arm(temperature: float, weight: float) -> str:
    return f"T {temperature:g}, weight {weight:g}"


def values(book: Book, temperature: float, weight: float) -> dict[int, float]:
    if (temperature, weight) == (1.0, 1.0):
        return Book("baselines").values("kd")
    return book.values(_arm(temperature, weight))


def draw(book: Book) -> None:
    grid = [["temperature", *(f"weight {weight:g}" for weight in WEIGHTS)]]
    for temperature in TEMPERATURES:
        grid.append(
            [f"{temperature:g}", *(books.told(values(book, temperature, weight).values()) for weight in WEIGHTS)]
        )
    table, _ = standard.compared(book, sorted({line["arm"] for line in book.runs}))
    parts = [standard.NOTE, books.markdown(grid), table]
    books.save_table(book, "Temperature and weight", parts)
    figure, axes = books.axes()
    for weight, colour in zip(WEIGHTS, books.COLOURS, strict=False):
        points = {t: values(book, t, weight).values() for t in TEMPERATURES}
        books.curve(axes, points, color=colour, label=f"weight {weight:g}")
    for arm, style in (("ce", "--"), ("ce-compute", ":")):
        found = Book("baselines").values(arm).values()
        axes.axhline(books.mean(found), color="#888888", ls=style, label=standard.BASELINES[arm])
    axes.set_xscale("log", base=2)
    axes.set_xlabel("temperature")
    axes.set_ylabel("held-out loss, nats a token")
    axes.legend(frameon=False)
    books.save_figure(book, figure)


if __name__ == "__main__":
    books.main(__doc__, "temperature", sweep, draw)
