"""Does it help to change the lesson along the way? Ramps of weight and temperature against constants.

python benchmarks/quality/bench_curriculum.py
"""

from __future__ import annotations

from typing import Any

import book as books
import standard
from book import Book


def ramp(start: float, end: float, begin: float = 0.0, until: float = 1.0) -> dict[str, Any]:
    return {"start": start, "end": end, "begin": begin, "until": until}


ARMS: dict[str, dict[str, Any]] = {
    "half and half, constant": {"kd.weight": 0.5, "ce.weight": 0.5},
    "teacher first, labels last": {"kd.weight": ramp(1, 0), "ce.weight": ramp(0, 1)},
    "labels first, teacher last": {"kd.weight": ramp(0, 1), "ce.weight": ramp(1, 0)},
    "teacher, labels in the last fifth": {"kd.weight": ramp(1, 0.5, 0.8), "ce.weight": ramp(0, 0.5, 0.8)},
    "temperature 4 to 1": {"kd.weight": 1.0, "kd.temperature": ramp(4, 1)},
    "temperature 2 to 1": {"kd.weight": 1.0, "kd.temperature": ramp(2, 1)},
    "temperature 1 to 2": {"kd.weight": 1.0, "kd.temperature": ramp(1, 2)},
}


def sweep(book: Book) -> None:
    standard.baselines()
    for arm, objectives in ARMS.items():
        standard.tune(book, arm, objectives)


def draw(book: Book) -> None:
    reference = Book("baselines").values("kd")
    arms = [arm for arm in ARMS if book.lines(arm)]
    rows = [list(standard.HEAD), *standard.baseline_rows(), *(standard.row(book, a, a, reference) for a in arms)]
    better = [arm for arm in arms if books.is_beyond(books.paired(book.values(arm), reference), -1)]
    said = f"Better than the constant lesson on every seed: {', '.join(better)}." if better else ""
    said = said or "No curriculum beat the constant lesson (forward KL, T 1, weight 1) on every seed."
    books.save_table(book, "Curriculum on and off", [standard.NOTE, books.markdown(rows), said])


if __name__ == "__main__":
    books.main(__doc__, "curriculum", sweep, draw)
