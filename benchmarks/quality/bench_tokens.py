"""Does it help to treat positions differently? Weights, shares and temperatures by token, against one for all.

python benchmarks/quality/bench_tokens.py
"""

from __future__ import annotations

from typing import Any

import book as books
import standard
from book import Book

ARMS: dict[str, dict[str, Any]] = {
    "weighed by the student's entropy": {"kd.token_weight": "entropy"},
    "half the positions, by distance": {"kd.token_fraction": 0.5},
    "half the positions, by entropy": {"kd.token_fraction": 0.5, "kd.token_criterion": "entropy"},
    "temperature by difficulty": {"kd.token_temperature": 0.5},
    "labels mixed in where the teacher is wrong": {"kd.on_wrong_teacher": "mft"},
}


def sweep(book: Book) -> None:
    standard.baselines()
    for arm, settings in ARMS.items():
        standard.tune(book, arm, {"kd.weight": 1.0, **settings})


def draw(book: Book) -> None:
    table, better = standard.compared(book, ARMS)
    said = f"Better than one weight for all on every seed: {', '.join(better)}." if better else ""
    said = said or "No treatment by token beat one weight for all on every seed."
    books.save_table(book, "Positions treated differently", [standard.NOTE, table, said])


if __name__ == "__main__":
    books.main(__doc__, "tokens", sweep, draw)
