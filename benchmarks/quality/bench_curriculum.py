"""Does it help to change the loss weights along the way? Ramps of weight and temperature against constants, and three
phases of the student-aware guide against its mix all along, and against that mix without the inner terms.

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
}
_SECONDS = "CPU seconds of the arms that look inside the teacher include the teacher, which the others only remember."
GUIDE = {"kd.weight": 0.7, "ce.weight": 0.3, "kd.temperature": 2.0}
INNER = {
    "feature": (0.1, 0.3, 0.6),
    "attention": (0.1, 0.3, 0.6),
    "layerwise": (0.05, 0.6, 0.8),
    "contrastive": (0.05, 0.6, 0.8),
}
INSIDE: dict[str, dict[str, Any]] = {
    "the guide's weights, nothing inside": GUIDE,
    "the guide's weights, all terms throughout": {
        **GUIDE,
        **{f"{name}.weight": end for name, (end, _, _) in INNER.items()},
    },
    "the guide's three phases": {**GUIDE, **{f"{name}.weight": ramp(0.0, *rest) for name, rest in INNER.items()}},
    "forward KL and hidden states": {"kd.weight": 1.0, "feature.weight": 0.1},
    "forward KL and attention": {"kd.weight": 1.0, "attention.weight": 0.1},
}
ARMS |= INSIDE


def sweep(book: Book) -> None:
    standard.baselines()
    for arm, objectives in ARMS.items():
        standard.tune(book, arm, objectives)


def draw(book: Book) -> None:
    table, better = standard.compared(book, ARMS)
    said = f"Better than the constant lesson on every seed: {', '.join(better)}." if better else ""
    said = said or "No curriculum beat the constant lesson (forward KL, T 1, weight 1) on every seed."
    parts = [standard.NOTE, table, said, _on_phases(book), _SECONDS]
    books.save_table(book, "Curriculum on and off", [part for part in parts if part])


def _on_phases(book: Book) -> str:
    """The guide's curriculum against its two halves, in the words that the numbers allow."""
    nothing, throughout, phases = (book.values(arm) for arm in list(INSIDE)[:3])
    if not (nothing and throughout and phases):
        return ""
    told = {
        "its terms switched on throughout": books.paired(phases, throughout),
        "its weights with nothing inside": books.paired(phases, nothing),
    }
    words = []
    for other, found in told.items():
        side = (
            "better than"
            if books.is_beyond(found, -1)
            else "worse than"
            if books.is_beyond(found, +1)
            else "no different from"
        )
        words.append(f"{side} {other} ({books.told(found, is_signed=True)})")
    return f"The guide's three phases are {' and '.join(words)}."


if __name__ == "__main__":
    books.main(__doc__, "curriculum", sweep, draw)
