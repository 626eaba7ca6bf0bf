"""What figures are drawn of: curves thinned to what a screen can show, traces, axes, colours by role.

Figures are plain plotly dictionaries with the colours of a light page; on a dark screen the page replaces each by its
dark counterpart. Thinning keeps the lowest and the highest value of each stretch, so no spike disappears.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.report.history import Curve, Floats
from stillroom.telemetry.wording import as_number, clip

Trace = dict[str, Any]
Layout = dict[str, Any]

MAX_POINTS = 600
MAX_AREAS = 200  # points of a stacked area; more only roughen its edges
SMOOTHED_SHARE = 0.02  # of the run: span of the running mean
MAX_NAMED_TICKS = 6
MAX_PHASES = 24

# role: (on a light page, on a dark page). The same role has the same colour in every figure and table.
ROLES: Mapping[str, tuple[str, str]] = {
    "student": ("#1d6f79", "#62bcc6"),
    "teacher": ("#a55e13", "#e0a55f"),
    "baseline": ("#74798a", "#a0a6b5"),
    "baseline_equal_compute": ("#97689a", "#c99ccb"),
    "training": ("#a8cbce", "#2d5c62"),
    "refused": ("#b5382f", "#f08a80"),
    "ink": ("#23262b", "#e8e5de"),
    "muted": ("#686d75", "#9ea3ab"),
    "grid": ("#e4e1da", "#33373d"),
    "surface": ("#ffffff", "#1d2024"),
    "page": ("#faf8f4", "#15171a"),
    "shade": ("#f1eee6", "#24282d"),
    "good": ("#2f7a48", "#7cc794"),
}
# Backgrounds of tokens by distance, from equal to different. Text on each keeps a contrast of at least 4.5.
APART: Mapping[str, tuple[str, str]] = {
    "apart0": ("#ffffff", "#1d2024"),
    "apart1": ("#fdf0dd", "#33291d"),
    "apart2": ("#fbddb3", "#4a361d"),
    "apart3": ("#f7c487", "#66461d"),
    "apart4": ("#f0a35c", "#784d1c"),
    "apart5": ("#e5823a", "#91571a"),
}
# kd has the teacher's colour, ce that of plain training; the other terms take the remaining colours.
TERM_COLOURS = {"kd": ROLES["teacher"][0], "ce": ROLES["baseline"][0]}
OTHER_COLOURS = ("#3f6fb0", "#97689a", "#5d8a3c", "#b0567a", "#8a7a2e", "#4d8f8a")
DARK_OTHER_COLOURS = ("#86aee6", "#c99ccb", "#9cc97c", "#e295b4", "#cbbb6c", "#8fd0cb")


def colour(role: str) -> str:
    return ROLES[role][0]


def dark_partners() -> dict[str, str]:
    return dict(ROLES.values()) | dict(zip(OTHER_COLOURS, DARK_OTHER_COLOURS, strict=True))


@dataclass(frozen=True)
class Figure:
    """One figure, with a title that states what it shows."""

    key: str
    title: str
    caption: str
    traces: list[Trace]
    layout: Layout
    is_wide: bool = False


def label(name: object) -> str:
    """Text from outside for plotly, which reads tags in labels."""
    return html.escape(clip(name, 40))


# -- curves -----------------------------------------------------------------------------------------------


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


# -- traces -----------------------------------------------------------------------------------------------


def points(curve: Curve) -> Trace:
    """The coordinates of a trace, rounded. The x values are steps: whole numbers."""
    xs, ys = curve
    return {"x": [short_step(x) for x in xs.tolist()], "y": [short(y) for y in ys.tolist()]}


def short_step(value: float) -> float:
    return int(value) if value.is_integer() else value


def line(curve: Curve, name: str, stroke: str, **options: Any) -> Trace:
    style = {"color": stroke, "width": options.pop("width", 2), "dash": options.pop("dash", "solid")}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        **points(curve),
        "line": style,
        "cliponaxis": False,  # do not cut markers at the frame
    } | options


def level(value: float, until: float, name: str, stroke: str, **options: Any) -> Trace:
    """A horizontal line over the whole run."""
    return line(
        (np.array([0.0, until]), np.array([value, value])), name, stroke, **({"dash": "dash", "width": 1.5} | options)
    )


def marks(curve: Curve, name: str, stroke: str, symbol: str = "circle", **options: Any) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        **points(curve),
        "marker": {"color": stroke, "symbol": symbol, "size": options.pop("size", 8)},
        "cliponaxis": False,
    } | options


def noisy(curve: Curve, name: str, smoothed_name: str, **options: Any) -> list[Trace]:
    """A noisy curve: each value pale, and the running mean."""
    return [
        line(thin(curve), name, colour("training"), width=1, hoverinfo="skip", **options),
        line(thin(smooth(curve)), smoothed_name, colour("student"), **options),
    ]


# -- axes ------------------------------------------------------------------------------------------------


def layout(last_step: float, y_axis: Layout, **options: Any) -> Layout:
    font = {"family": "system-ui, sans-serif", "size": 12, "color": colour("muted")}
    return {
        "font": font,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 60, "r": 16, "t": 8, "b": 42},
        "height": 330,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": colour("surface"),
            "bordercolor": colour("grid"),
            "font": {"color": colour("ink"), "size": 12},
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"color": colour("ink")}},
        "xaxis": x_axis(last_step),
        "yaxis": y_axis,
        "dragmode": False,  # on a touch screen, scroll the page instead of zooming
    } | options


def x_axis(last_step: float, **options: Any) -> Layout:
    return {
        "title": {"text": "optimizer step", "standoff": 8},
        "range": [0, max(last_step, 1)],
        "gridcolor": "rgba(0,0,0,0)",
        "linecolor": colour("grid"),
        "zeroline": False,
        "tickformat": ",d",
        "fixedrange": True,
    } | options


def y_axis(title: str, **options: Any) -> Layout:
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": colour("grid"),
        "zeroline": False,
        "fixedrange": True,
        "automargin": True,
        "ticks": "outside",  # invisible ticks keep labels away from markers on the axis
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",
        "nticks": 6,
    } | options


def y_axis_for(title: str, values: Sequence[float]) -> Layout:
    """A y axis: logarithmic, with round ticks, if the values span more than a decade."""
    positive = [value for value in values if value > 0]
    if not positive or len(positive) < len(values) or max(positive) / min(positive) < 10:
        return y_axis(title)
    low, high = math.log10(min(positive)), math.log10(max(positive))
    margin = 0.05 * (high - low)
    ticks = _log_ticks(low - margin, high + margin)
    return y_axis(
        title,
        type="log",
        range=[low - margin, high + margin],
        tickmode="array",
        tickvals=ticks,
        ticktext=[f"{tick:,g}" for tick in ticks],
    )


def y_axis_at(title: str, values: Sequence[float]) -> Layout:
    """A y axis with a tick at each value if there are few (powers of two); else as `y_axis_for`."""
    few = sorted(set(values))
    if len(few) > MAX_NAMED_TICKS:
        return y_axis_for(title, values)
    low, high = math.log10(few[0]) - 0.15, math.log10(few[-1]) + 0.15
    ticks = {"tickmode": "array", "tickvals": few, "ticktext": [f"{value:,g}" for value in few]}
    return y_axis(title, type="log", range=[low, high], **ticks)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = high - low
    digits = (1, 2, 5) if decades <= 2.5 else (1,)
    stride = max(1, math.ceil(decades / 7))
    powers = [power for power in range(math.floor(low), math.ceil(high) + 1) if power % stride == 0]
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]


def two_panels(last_step: float, upper: Layout, lower: Layout) -> Layout:
    """Two panels over the same steps, one above the other: with two scales in one panel, crossings would mislead."""
    return layout(
        last_step,
        upper | {"domain": [0.56, 1.0]},
        xaxis=x_axis(last_step, anchor="y2"),
        yaxis2=lower | {"domain": [0.0, 0.44], "anchor": "x"},
        height=380,
    )


def phase_shades(phases: Sequence[tuple[str, float, float]]) -> Layout:
    """A shade behind every second phase of the curriculum, and its name at the top where it begins."""
    if len(phases) < 2 or len(phases) > MAX_PHASES:
        return {}
    shapes, notes = [], []
    for number, (name, first, last) in enumerate(phases):
        begin = 0 if number == 0 else first
        end = phases[number + 1][1] if number + 1 < len(phases) else last
        corners = {"x0": begin, "x1": end, "y0": 0, "y1": 1}
        place = {"type": "rect", "xref": "x", "yref": "paper", "layer": "below"}
        fill = colour("shade") if number % 2 else "rgba(0,0,0,0)"
        shapes.append({**place, **corners, "fillcolor": fill, "line": {"width": 0}})
        notes.append(
            {
                "x": begin,
                "y": 1,
                "xref": "x",
                "yref": "paper",
                "text": label(name),
                "showarrow": False,
                "xanchor": "left",
                "yanchor": "top",
                "xshift": 4,
                "font": {"size": 11, "color": colour("ink")},
            }
        )
    return {"shapes": shapes, "annotations": notes}
