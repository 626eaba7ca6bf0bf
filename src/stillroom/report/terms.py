"""Figures of the objective's terms: raw, weighted, as shares, and their pull on the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from stillroom.report.curves import curve_of, edges_of, means, smooth, thin
from stillroom.report.drawing import (
    OTHER_COLOURS,
    TERM_COLOURS,
    Figure,
    Trace,
    colour,
    label,
    layout,
    line,
    phase_shades,
    two_panels,
    y_axis,
    y_axis_for,
)
from stillroom.report.record import RunRecord, mapping
from stillroom.report.steps import Curve, joined
from stillroom.telemetry.wording import as_number, clean, format_loss, format_percent

MAX_TERMS = 10  # drawn; the others are named in the caption


def raw_terms(run: RunRecord, until: float) -> Figure | None:
    """Each term before its weight: comparable over the run even where the curriculum moves the weights."""
    names, curves = _curves(run, "raw")
    if not names:
        return None
    ends = ", ".join(f"{clean(name)} {format_loss(float(smooth(curves[name])[1][-1]))}" for name in names[:3])
    caption = "Mean over the scored tokens, before any weight; smoothed, with each step pale." + _unnamed(run)
    return _drawn(run, until, "raw", f"Raw terms end at {ends}", caption, curves, "raw value")


def weighted_terms(run: RunRecord, until: float) -> Figure | None:
    """Each term as it enters the loss."""
    names, curves = _curves(run, "scaled")
    if len(names) < 2:
        return None
    last = {name: float(smooth(curves[name])[1][-1]) for name in names}
    largest = max(last, key=last.__getitem__)
    title = f"Weighted, {clean(largest)} is the largest term at the end: {format_loss(last[largest])}"
    caption = "Raw value times weight: what each term adds to the loss; smoothed, with each step pale."
    return _drawn(run, until, "weighted", title, caption, curves, "weighted value")


def _curves(run: RunRecord, part: str) -> tuple[list[str], dict[str, Curve]]:
    found = {name: run.steps.curve(part, name) for name in run.steps.terms()[:MAX_TERMS]}
    curves = {name: curve for name, curve in found.items() if len(curve[0])}
    return list(curves), curves


def _unnamed(run: RunRecord) -> str:
    more = len(run.steps.terms()) - MAX_TERMS
    return f" {more} more terms are in events.jsonl." if more > 0 else ""


def _drawn(
    run: RunRecord, until: float, key: str, title: str, caption: str, curves: dict[str, Curve], axis: str
) -> Figure:
    traces: list[Trace] = []
    for (name, curve), stroke in zip(curves.items(), strokes(list(curves)), strict=True):
        group = {"legendgroup": label(name)}
        if len(curves) <= 4:  # beyond, the pale lines of all terms hide each other
            pale = line(thin(curve, 300), label(name), stroke, width=1, hoverinfo="skip", showlegend=False, **group)
            traces.append(pale | {"opacity": 0.25})
        traces.append(line(thin(smooth(curve), 300), label(name), stroke, **group))
    values = joined(curve[1] for curve in curves.values())
    drawn = values[values > 0] if np.mean(values > 0) > 0.5 else values  # a term that is off would hide the others
    picture = layout(until, y_axis_for(axis, drawn.tolist()), height=380) | phase_shades(run.steps.phases())
    return Figure(key, title, caption, traces, picture)


def strokes(names: Sequence[str]) -> Iterator[str]:
    """The colour of each term, the same in every figure."""
    others = itertools.cycle(OTHER_COLOURS)
    for name in names:
        yield TERM_COLOURS.get(name) or next(others)


def shares(run: RunRecord, until: float) -> Figure | None:
    names, curves = _curves(run, "share")
    if len(names) < 2:
        return None
    edges = edges_of(max((curve[0] for curve in curves.values()), key=len))
    places = edges[1:].copy()
    places[0] = edges[0] + 1
    traces: list[Trace] = []
    for name, stroke in zip(names, strokes(names), strict=True):
        heights = 100 * means(curves[name], edges)
        traces.append(line((places, heights), label(name), stroke, width=0.5, stackgroup="terms"))
        traces[-1]["hovertemplate"] = "%{y:.1f}%"
    late = run.steps.first_of_last(20)
    last = {name: float(ys[xs >= late].mean()) if (xs >= late).any() else 0.0 for name, (xs, ys) in curves.items()}
    largest = max(last, key=last.__getitem__)
    title = f"{clean(largest)} makes {format_percent(last[largest], 0)} of the objective at the end"
    caption = "Each term's share of the objective: raw value times weight, over the sum of all."
    axis = y_axis("share of the objective", range=[0, 100], ticksuffix="%")
    return Figure("shares", title, caption, traces, layout(until, axis) | phase_shades(run.steps.phases()))


def pulls(run: RunRecord, until: float) -> Figure | None:
    """Each term's share of the gradient, and the cosines between terms, if they were measured."""
    by_step = {event["step"]: event for event in run.history.of_kind("gradients") if type(event.get("step")) is int}
    records = sorted(by_step.items())
    names = list(dict.fromkeys(name for _, event in records for name in mapping(event, "terms")))[:MAX_TERMS]
    if len(names) < 2:
        return None
    traces: list[Trace] = []
    style = {"mode": "lines+markers", "marker": {"size": 5}} if len(records) <= 100 else {}
    for name, stroke in zip(names, strokes(names), strict=True):
        found = [(step, as_number(mapping(mapping(event, "terms"), name).get("share"))) for step, event in records]
        heights = curve_of([(float(step), None if value is None else 100 * value) for step, value in found])
        traces.append(line(thin(heights, 300), label(name), stroke, **style))
        traces[-1]["hovertemplate"] = "%{y:.1f}%"
    pairs = list(dict.fromkeys(pair for _, event in records for pair in mapping(event, "cosines")))
    for pair in pairs[:MAX_TERMS]:
        cosines = curve_of([(float(step), as_number(mapping(event, "cosines").get(pair))) for step, event in records])
        dotted = line(thin(cosines, 300), label(pair), colour("ink"), width=1.5, dash="dot", **style)
        traces.append(dotted | {"yaxis": "y2"})
    last = {name: as_number(mapping(mapping(records[-1][1], "terms"), name).get("share")) or 0.0 for name in names}
    largest = max(last, key=last.__getitem__)
    title = f"{clean(largest)} makes {format_percent(last[largest], 0)} of the gradient at the end"
    caption = "Above: each term's share of the gradient norms. Below: 1 is the same direction, below 0 they disagree."
    upper = y_axis("share of the gradient", range=[0, 100], ticksuffix="%")
    picture = two_panels(until, upper, y_axis("cosine", range=[-1, 1]))
    return Figure("pulls", title, caption, traces, picture)
