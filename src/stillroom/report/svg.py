"""A figure as a small SVG file, drawn without a browser: for a README, a mail, a slide.

Only what the main figure needs: lines, markers and whiskers over one pair of axes, the y axis linear or logarithmic,
in the colours of a light page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from stillroom.report.drawing import Figure, Trace, colour
from stillroom.report.markup import Html, element, text

WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 96, 56
_DASHES = {"dash": "7 5", "dot": "2 4", "dashdot": "7 4 2 4"}
_MAX_TITLE = 96

Scale = Callable[[float], float]


def draw(figure: Figure) -> str:
    """The figure as an SVG document."""
    x_of, y_of, ticks = _scales(figure)
    parts = [
        element("rect", width=WIDTH, height=HEIGHT, fill=colour("surface")),
        _words(LEFT - 52, 34, figure.title[:_MAX_TITLE], size=19, fill=colour("ink")),
        *_grid(x_of, y_of, ticks, figure),
        *(part for trace in figure.traces for part in _trace(trace, x_of, y_of)),
        *_legend(figure.traces),
    ]
    size = {"width": WIDTH, "height": HEIGHT, "viewBox": f"0 0 {WIDTH} {HEIGHT}"}
    title = element("title", figure.title)
    head = {"xmlns": "http://www.w3.org/2000/svg", "font_family": "system-ui, sans-serif", "role": "img"}
    return str(element("svg", title, *parts, **head, **size)) + "\n"


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


def _grid(x_of: Scale, y_of: Scale, ticks: Sequence[tuple[float, str]], figure: Figure) -> list[Html]:
    parts = []
    for value, name in ticks:
        y = round(y_of(value), 1)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke=colour("grid")))
        parts.append(_words(LEFT - 8, y + 4, name, anchor="end"))
    last = float(figure.layout["xaxis"]["range"][1])
    for value in round_ticks(0.0, max(last, 1.0)):
        parts.append(_words(x_of(value), HEIGHT - BOTTOM + 20, f"{value:,.0f}", anchor="middle"))
    parts.append(_words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "optimizer step", anchor="middle"))
    name = figure.layout["yaxis"]["title"]["text"]
    parts.append(_words(LEFT - 52, TOP - 14, name))
    return parts


def _trace(trace: Trace, x_of: Scale, y_of: Scale) -> list[Html]:
    points = [(round(x_of(x), 1), round(y_of(y), 1)) for x, y in zip(trace["x"], trace["y"], strict=True)]
    parts = []
    if "lines" in trace["mode"]:
        style = trace["line"]
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = _DASHES.get(style.get("dash", ""))
        line = {"stroke": style["color"], "stroke_width": style["width"], "stroke_dasharray": dash}
        parts.append(element("polyline", points=path, fill="none", **line))
    if "markers" in trace["mode"]:
        mark: dict[str, Any] = trace.get("marker", {})
        stroke = mark.get("color") or trace.get("line", {}).get("color", colour("ink"))
        is_open = str(mark.get("symbol", "")).endswith("-open")
        radius = float(mark.get("size", 6)) / 2
        paint = {"fill": "none" if is_open else stroke, "stroke": stroke, "stroke_width": 2 if is_open else 0}
        parts += [element("circle", cx=x, cy=y, r=radius, **paint) for x, y in points]
    return parts


def _legend(traces: Sequence[Trace]) -> list[Html]:
    parts, x = [], float(LEFT - 52)
    for trace in traces:
        style: dict[str, Any] = trace["line"] if "line" in trace else trace["marker"]
        paint = {"stroke": style.get("color", colour("ink")), "stroke_width": 2}
        dash = _DASHES.get(style.get("dash", ""))
        if "lines" in trace["mode"]:
            parts.append(element("line", x1=x, x2=x + 24, y1=58, y2=58, **paint, stroke_dasharray=dash))
        else:
            parts.append(element("circle", cx=x + 12, cy=58, r=6, fill="none", **paint))
        parts.append(_words(x + 30, 62, Html(trace["name"]), fill=colour("ink")))
        x += 30 + 7.2 * len(trace["name"]) + 22
    return parts


def _words(x: float, y: float, said: str, *, anchor: str = "start", size: int = 13, fill: str = "") -> Html:
    shown = said if isinstance(said, Html) else text(said)
    place = {"x": round(x, 1), "y": round(y, 1), "text_anchor": anchor, "font_size": size}
    return element("text", shown, **place, fill=fill or colour("muted"))
