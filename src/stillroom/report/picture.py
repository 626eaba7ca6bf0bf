"""A figure as plain shapes on a surface of fixed size, for the pictures that are drawn without a browser.

Only what the main figure needs: lines, markers and whiskers over one pair of axes, the y axis linear or logarithmic,
in the colours of a light page. `svg.py` and `png.py` draw the shapes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stillroom.report.drawing import Figure, Trace, colour
from stillroom.report.lettering import width_of

WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 96, 56
_EDGE = 24  # of titles and legend
_DASHES: dict[str, tuple[float, ...]] = {"dash": (7, 5), "dot": (2, 4), "dashdot": (7, 4, 2, 4)}
_MAX_TITLE = 96

Scale = Callable[[float], float]
Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Stroke:
    """A line through points. A rule is one of the axes or the legend, not of the data."""

    points: tuple[Point, ...]
    colour: str
    width: float = 1.0
    dashes: tuple[float, ...] = ()
    is_rule: bool = False


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    radius: float
    colour: str
    is_open: bool = False


@dataclass(frozen=True)
class Words:
    """Text on a base line at y."""

    x: float
    y: float
    text: str
    colour: str
    size: int = 13
    anchor: Anchor = "start"


Shape = Stroke | Dot | Words


def shapes(figure: Figure) -> list[Shape]:
    """What is drawn, from back to front."""
    x_of, y_of, ticks = _scales(figure)
    return [
        Words(_EDGE, 34, figure.title[:_MAX_TITLE], colour("ink"), size=19),
        *_grid(x_of, y_of, ticks, figure),
        *(shape for trace in figure.traces for shape in _trace(trace, x_of, y_of)),
        *_legend(figure.traces),
    ]


def _scales(figure: Figure) -> tuple[Scale, Scale, list[tuple[float, str]]]:
    axis = figure.layout["yaxis"]
    values = [y for trace in figure.traces for y in trace["y"]]
    last = max(float(figure.layout["xaxis"]["range"][1]), 1.0)
    is_log = axis.get("type") == "log"
    if is_log:
        low, high = axis["range"]
        ticks = list(zip(axis["tickvals"], axis["ticktext"], strict=True))
    else:
        low, high = min(values), max(values)
        margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = low - margin, high + margin
        ticks = [(tick, f"{tick:,.4g}") for tick in round_ticks(low, high)]

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / last

    def y_of(value: float) -> float:
        place = math.log10(value) if is_log else value
        return float(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (place - low) / (high - low))

    return x_of, y_of, ticks


def round_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers between two ends: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
    first, last = math.ceil(low / size), math.floor(high / size)
    return [number * size for number in range(first, last + 1)]


def _grid(x_of: Scale, y_of: Scale, ticks: Sequence[tuple[float, str]], figure: Figure) -> Iterator[Shape]:
    muted = colour("muted")
    for value, name in ticks:
        y = round(y_of(value), 1)
        yield Stroke(((LEFT, y), (WIDTH - RIGHT, y)), colour("grid"), is_rule=True)
        yield Words(LEFT - 8, y + 4, name, muted, anchor="end")
    last = float(figure.layout["xaxis"]["range"][1])
    for value in round_ticks(0.0, max(last, 1.0)):
        yield Words(round(x_of(value), 1), HEIGHT - BOTTOM + 20, f"{value:,.0f}", muted, anchor="middle")
    yield Words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "optimizer step", muted, anchor="middle")
    yield Words(_EDGE, TOP - 14, figure.layout["yaxis"]["title"]["text"], muted)


def _trace(trace: Trace, x_of: Scale, y_of: Scale) -> Iterator[Shape]:
    points = tuple((round(x_of(x), 1), round(y_of(y), 1)) for x, y in zip(trace["x"], trace["y"], strict=True))
    yield from _whiskers(trace, points, y_of)
    if "lines" in trace["mode"]:
        style = trace["line"]
        yield Stroke(points, style["color"], style["width"], _DASHES.get(style.get("dash", ""), ()))
    if "markers" in trace["mode"]:
        mark: dict[str, Any] = trace.get("marker", {})
        stroke = mark.get("color") or trace.get("line", {}).get("color", colour("ink"))
        is_open = str(mark.get("symbol", "")).endswith("-open")
        for x, y in points:
            yield Dot(x, y, float(mark.get("size", 6)) / 2, stroke, is_open)


def _whiskers(trace: Trace, points: Sequence[Point], y_of: Scale) -> Iterator[Shape]:
    """A line from the lower to the upper end of each interval, kept inside the axes."""
    bars = trace.get("error_y")
    if not bars:
        return
    for (x, _), value, above, below in zip(points, trace["y"], bars["array"], bars["arrayminus"], strict=True):
        if above or below:
            ends = (value + above, value - below)
            top, bottom = (min(max(y_of(end), TOP), HEIGHT - BOTTOM) if end > 0 else HEIGHT - BOTTOM for end in ends)
            for line in (((x, top), (x, bottom)), ((x - 3, top), (x + 3, top)), ((x - 3, bottom), (x + 3, bottom))):
                yield Stroke(line, trace["line"]["color"], is_rule=True)


def _legend(traces: Sequence[Trace]) -> Iterator[Shape]:
    x = float(_EDGE)
    for trace in traces:
        style: dict[str, Any] = trace["line"] if "line" in trace else trace["marker"]
        paint = style.get("color", colour("ink"))
        if "lines" in trace["mode"]:
            dashes = _DASHES.get(style.get("dash", ""), ())
            yield Stroke(((x, 58), (x + 24, 58)), paint, 2.0, dashes, is_rule=True)
        else:
            yield Dot(x + 12, 58, 6, paint, is_open=True)
        name = html.unescape(trace["name"])  # labels are escaped for plotly
        yield Words(x + 30, 62, name, colour("ink"))
        x += 30 + 1.1 * width_of(name, 13) + 24  # a browser's own font may be a little wider
