"""Curves of numbers: read from records, thinned to what a screen can show, smoothed.

Thinning keeps the lowest and the highest value of each stretch, so no spike disappears.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stillroom.report.steps import Curve, Floats
from stillroom.telemetry.wording import as_number

MAX_POINTS = 600
MAX_AREAS = 200  # points of a stacked area; more only roughen its edges
SMOOTHED_SHARE = 0.02  # of the run: span of the running mean


def curve_of(points: Sequence[tuple[float, float | None]]) -> Curve:
    """The points that have a value."""
    found = [(x, y) for x, y in points if y is not None]
    return np.array([x for x, _ in found], dtype=np.float64), np.array([y for _, y in found], dtype=np.float64)


def curve(events: Sequence[Mapping[str, Any]], key: str, *, above: float | None = None) -> Curve:
    """The finite values of a key over the steps of some records."""
    values = [(float(event["step"]), as_number(event.get(key))) for event in events]
    return curve_of([(step, value) for step, value in values if value is None or above is None or value > above])


def short(value: float) -> float:
    """Round to five significant digits, which is more than a screen can show. A whole number prints without a point."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def thin(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """At most `limit` points, keeping the lowest and highest of each stretch, so that spikes stay visible."""
    xs, ys = curve
    if len(xs) <= limit:
        return xs, ys
    num_stretches = limit // 2
    size = math.ceil(len(xs) / num_stretches)
    chosen: set[int] = set()
    for begin in range(0, len(xs), size):
        stretch = ys[begin : begin + size]
        chosen |= {begin + int(stretch.argmin()), begin + int(stretch.argmax())}
    places = np.array(sorted(chosen))
    return xs[places], ys[places]


def means(curve: Curve, edges: Floats) -> Floats:
    """The mean of a curve between each two edges of x; 0 where it has no point, as a term without a record."""
    xs, ys = curve
    which = np.digitize(xs, edges[1:-1], right=True)
    counts = np.bincount(which, minlength=len(edges) - 1)
    sums = np.bincount(which, weights=ys, minlength=len(edges) - 1)
    found: Floats = np.divide(sums, counts, out=np.zeros(len(edges) - 1), where=counts > 0)
    return found


def edges_of(xs: Floats, limit: int = MAX_AREAS) -> Floats:
    """The ends of at most `limit` stretches with equally many points, for curves that must share their x values."""
    size = math.ceil(len(xs) / limit) or 1
    return np.array([xs[0] - 1, *(xs[min(begin + size, len(xs)) - 1] for begin in range(0, len(xs), size))])


def smooth(curve: Curve) -> Curve:
    """A running mean over the last SMOOTHED_SHARE of the run."""
    xs, ys = curve
    # In a short run take a tenth, up to eight steps.
    pull = 1.0 / max(1.0, SMOOTHED_SHARE * len(ys), min(8.0, len(ys) / 10))
    values = ys.tolist()
    level, out = values[0] if values else 0.0, []
    for index, value in enumerate(values):
        # Average the first points evenly, else the first value would dominate for long.
        level += max(pull, 1.0 / (index + 1)) * (value - level)
        out.append(level)
    return xs, np.array(out)
