"""The timeline of the guard: the loss scale, and a mark for each attempt that was not simply kept."""

from __future__ import annotations

import numpy as np

from stillroom.report.curves import thin
from stillroom.report.drawing import (
    OTHER_COLOURS,
    Figure,
    Trace,
    colour,
    label,
    layout,
    line,
    marks,
    two_panels,
    y_axis,
    y_axis_at,
)
from stillroom.report.record import RunRecord
from stillroom.report.steps import Floats, joined
from stillroom.telemetry.wording import clean, format_count

MAX_WORDS = 8
MAX_MARKS = 4000
_MILD = ("retry", "examine")


def verdicts(run: RunRecord, until: float) -> Figure | None:
    """None where no loss scale is in use and every step was kept."""
    scale = run.steps.curve("loss_scale", above=0)
    is_scaled = len(scale[0]) > 0 and (np.ptp(scale[1]) > 0 or scale[1][0] != 1.0)
    words = _steps_by_word(run)
    if not is_scaled and not words:
        return None
    traces: list[Trace] = []
    if is_scaled:
        traces.append(line(thin(scale), "loss scale", colour("ink"), width=1.5))
        traces[0]["line"]["shape"] = "hv"
    lower: list[Trace] = []
    strokes = iter(OTHER_COLOURS * MAX_WORDS)
    for word, steps in list(words.items())[:MAX_WORDS]:
        stroke = next(strokes) if word in _MILD else colour("refused")
        drawn = steps if len(steps) <= MAX_MARKS else steps[:: -(-len(steps) // MAX_MARKS)]
        trace = marks((drawn, np.zeros(len(drawn))), label(word), stroke, "line-ns-open", size=12)
        lower.append(trace | {"y": [label(word)] * len(drawn), "showlegend": False, "hovertemplate": "step %{x:,d}"})
    title, caption = _words(words, float(scale[1][-1]) if is_scaled else None)
    names = y_axis("", type="category", gridcolor="rgba(0,0,0,0)", nticks=MAX_WORDS)
    if not lower:
        picture = layout(until, y_axis_at("loss scale", scale[1].tolist()), height=280)
        return Figure("verdicts", title, caption, traces, picture, is_wide=True)
    if not traces:
        return Figure("verdicts", title, caption, lower, layout(until, names, height=240), is_wide=True)
    picture = two_panels(until, y_axis_at("loss scale", scale[1].tolist()), names)
    return Figure("verdicts", title, caption, traces + [trace | {"yaxis": "y2"} for trace in lower], picture, True)


def _steps_by_word(run: RunRecord) -> dict[str, Floats]:
    """Refused attempts by their verdict; guard events at steps that have no such record."""
    found = run.history.refused.by_word()
    for word, steps in run.history.guarded.by_word().items():
        known = found.get(word, np.empty(0))
        more = np.setdiff1d(steps, known)
        if len(more) or word not in found:
            found[word] = np.sort(joined([known, more]))
    return {word or "no word": steps for word, steps in found.items() if len(steps)}


def _words(words: dict[str, Floats], scale: float | None) -> tuple[str, str]:
    counted = ", ".join(f"{clean(word)} {format_count(len(steps))}" for word, steps in list(words.items())[:MAX_WORDS])
    parts = [f"The loss scale ends at {format_count(scale)}"] if scale is not None else []
    parts.append(f"verdicts: {counted}" if counted else "every attempt was kept")
    title = "; ".join(parts)
    caption = "A mark for each attempt that was not simply kept, by verdict."
    if any(len(steps) > MAX_MARKS for steps in words.values()):
        caption += f" Of a verdict with more than {MAX_MARKS:,}, every n-th is drawn."
    return title[0].upper() + title[1:], caption if counted else "Every step was kept at the first attempt."
