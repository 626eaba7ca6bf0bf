"""The figures of the report. Each function returns a figure, or None if the run has no data for it.

Titles state the result with the run's numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stillroom.report.drawing import (
    OTHER_COLOURS,
    TERM_COLOURS,
    Figure,
    Trace,
    colour,
    curve,
    curve_of,
    edges_of,
    label,
    layout,
    level,
    line,
    marks,
    means,
    noisy,
    phase_shades,
    short,
    smooth,
    thin,
    two_panels,
    y_axis,
    y_axis_at,
    y_axis_for,
)
from stillroom.report.history import Curve, Floats, RunRecord, joined
from stillroom.telemetry.wording import (
    as_number,
    clean,
    format_count,
    format_loss,
    format_lr,
    format_norm,
    format_percent,
    format_result,
    items,
    section,
)

MAX_TERMS = 10  # drawn; the caption counts the others
MAX_WORDS = 8
MAX_MARKS = 4000
MAX_SHARED_POINTS = 300  # of a curve where many runs share the page
_MILD = ("retry", "examine")  # verdicts after which the same step may still be applied
_STROKES = (colour("student"), colour("teacher"), *OTHER_COLOURS, colour("baseline"))
LEVELS = (
    ("teacher", "teacher", "dash"),
    ("baseline", "plain training, equal tokens", "dashdot"),
    ("baseline_equal_compute", "plain training, equal compute", "dot"),
)


def all_figures(run: RunRecord) -> list[Figure]:
    until = last_step(run)
    tried = [perplexity(run), objective(run), shares(run, until), raw_terms(run, until), weighted_terms(run, until)]
    tried += [pulls(run, until), gradients(run), rates(run), pace(run), verdicts(run, until), router_figure(run)]
    drawn = [figure for figure in tried if figure is not None]
    if sum(not figure.is_wide for figure in drawn) % 2:  # else the last one would stand next to an empty place
        drawn[-1] = replace(drawn[-1], is_wide=True)
    return drawn


def last_step(run: RunRecord) -> float:
    return max([float(run.steps.last), *(float(event["step"]) for event in run.evals[-1:])])


def perplexity(run: RunRecord) -> Figure | None:
    xs, ys = (part.tolist() for part in curve(run.evals, "perplexity", above=0))
    before = as_number(section(run.summary, "student_before").get("perplexity"))
    if xs and xs[0] > 0 and before:
        xs, ys = [0.0, *xs], [before, *ys]
    if not xs:
        return None
    drawn = curve_of(list(zip(xs, ys, strict=True)))
    traces = [line(drawn, "student", colour("student"), mode="lines+markers", width=2.5, marker={"size": 6})]
    traces[0] |= _whiskers(run, xs, ys)
    best = min(range(len(ys)), key=ys.__getitem__)
    ring = {"symbol": "circle-open", "size": 14, "color": colour("student"), "line": {"width": 2}}
    traces.append(marks(curve_of([(xs[best], ys[best])]), "best student", colour("student"), marker=ring))
    shown = list(ys)
    for row, name, dash in LEVELS:
        value = as_number(run.result(row).get("perplexity"))
        if value is not None and value > 0:
            traces.append(level(value, last_step(run), name, colour(row), dash=dash))
            shown.append(value)
    title = _perplexity_title(ys, as_number(run.result("teacher").get("perplexity")))
    caption = "Lower is better."
    if "error_y" in traces[0]:
        caption += " Whiskers: 95 % interval over the held-out documents."
    if len(shown) > len(ys):
        caption += (
            " Broken lines: the teacher, and the same student trained on the data alone, where they were measured."
        )
    picture = layout(last_step(run), y_axis_for("perplexity", shown), height=380)
    return Figure("perplexity", title, caption, traces, picture, is_wide=True)


def _whiskers(run: RunRecord, xs: Sequence[float], ys: Sequence[float]) -> Trace:
    """Error bars of the evaluations that have an interval."""
    intervals = {float(event["step"]): items(section(event, "intervals"), "perplexity") for event in run.evals}
    bounds = [[as_number(bound) for bound in intervals.get(x, ())] for x in xs]
    if not any(len(pair) == 2 and None not in pair for pair in bounds):
        return {}
    above, below = [], []
    for pair, value in zip(bounds, ys, strict=True):
        low, high = (pair[0], pair[1]) if len(pair) == 2 else (None, None)
        above.append(short(max(high - value, 0.0)) if high is not None else 0.0)
        below.append(short(max(value - low, 0.0)) if low is not None else 0.0)
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 3}
    return {"error_y": bars}


def _perplexity_title(values: Sequence[float], teacher: float | None) -> str:
    first, best, last = format_result(values[0]), format_result(min(values)), format_result(values[-1])
    if len(values) == 1:
        title = f"Held-out perplexity is {first}"
    elif min(values) == values[0]:
        title = f"Held-out perplexity rose from {first} to {last}"
    else:
        title = f"Held-out perplexity fell from {first} to {best}"
        title += f" and ended at {last}" if last != best else ""
    return title + (f"; the teacher has {format_result(teacher)}" if teacher is not None else "")


def objective(run: RunRecord) -> Figure | None:
    train, held_out = run.steps.curve("train_loss"), curve(run.evals, "objective")
    if not len(train[0]) and not len(held_out[0]):
        return None
    traces: list[Trace] = []
    ends: list[str] = []
    if len(train[0]):
        traces += noisy(train, "training, each step", "training, smoothed")
        ends.append(f"{format_loss(float(smooth(train)[1][-1]))} in training")
    if len(held_out[0]):
        traces.append(
            line(
                thin(held_out),
                "held out",
                colour("ink"),
                mode="lines+markers",
                width=1.5,
                dash="dot",
                marker={"size": 7},
            )
        )
        ends.append(f"{format_loss(float(held_out[1][-1]))} held out")
    title = f"The objective ends at {' and '.join(ends)}"
    caption = "The same objective at the same weights for both, so the distance between the curves is real."
    axis = y_axis_for("objective", [*train[1], *held_out[1]])
    return Figure("objective", title, caption, traces, layout(last_step(run), axis) | phase_shades(run.steps.phases()))


def gradients(run: RunRecord) -> Figure | None:
    norms = run.steps.curve("grad_norm", above=0)
    refused = run.refused
    if not len(norms[0]) and not refused:
        return None
    clip = as_number(section(run.config, "train").get("max_grad_norm"))
    seen = [*norms[1].tolist(), *(norm for _, norm, _ in refused if norm > 0), *([clip] if clip else [])]
    roof = 1.3 * max(seen, default=1.0)
    traces = noisy(norms, "each step", "smoothed") if len(norms[0]) else []
    if clip:
        traces.append(level(clip, last_step(run), f"clipped at {clip:g}", colour("muted")))
    if refused:
        # Mark a norm that is not finite at the top.
        spots = curve_of([(step, norm if norm > 0 else roof) for step, norm, _ in refused])
        traces.append(marks(thin(spots, MAX_MARKS), "refused", colour("refused"), "x", size=9))
    parts = [f"median {format_norm(float(np.median(norms[1])))}"] if len(norms[0]) else []
    if clip and len(norms[0]):
        parts.append(f"{format_percent(float(np.mean(norms[1] > clip)), 0)} of the steps clipped")
    parts.append(f"{format_count(len(refused))} attempts refused" if refused else "none refused")
    title = f"Gradient norm: {', '.join(parts)}"
    caption = "Before clipping."
    if refused:
        caption += " A refused attempt changed no weight; crosses at the top had no finite norm."
    if len(refused) > MAX_MARKS:
        caption += f" Of the refused, the lowest and highest of each of {MAX_MARKS // 2:,} stretches are drawn."
    picture = layout(last_step(run), y_axis_for("gradient norm", [*seen, roof]), height=380)
    return Figure("gradients", title, caption, traces, picture)


def rates(run: RunRecord) -> Figure | None:
    rate = run.steps.curve("lr", above=0)
    if not len(rate[0]):
        return None
    upper = line(thin(rate), "learning rate", colour("student"))
    title = f"The learning rate peaks at {_unbroken(float(rate[1].max()))} and ends at {_unbroken(float(rate[1][-1]))}"
    axis = y_axis("learning rate", tickformat=".1e", rangemode="tozero")
    caption = "Counted in optimizer steps; a refused step does not move it."
    picture = layout(last_step(run), axis, height=380) | phase_shades(run.steps.phases())
    return Figure("rates", title, caption, [upper], picture)


def _unbroken(rate: float) -> str:
    """Prevent a line break at the hyphen of a rate."""
    return format_lr(rate).replace("-", "\u2011")


def pace(run: RunRecord) -> Figure | None:
    speed = run.steps.curve("tokens_per_second", above=0)
    on_gpu = run.steps.curve("gpu_memory_gb", above=0)
    memory = on_gpu if len(on_gpu[0]) else run.steps.curve("memory_gb", above=0)
    if not len(speed[0]):
        return None
    upper = noisy(speed, "each step", "tokens a second, smoothed")
    title = f"{format_count(float(np.median(speed[1])))} tokens a second"
    axis = y_axis("tokens / s", rangemode="tozero", tickformat=",d")
    if not len(memory[0]):
        return Figure("pace", title, "Memory was not recorded.", upper, layout(last_step(run), axis, height=380))
    where = "on the GPU" if len(on_gpu[0]) else "of the process"
    lower = line(thin(memory), f"memory {where}", colour("ink"), width=1.5) | {"yaxis": "y2"}
    title += f"; memory {where} peaks at {format_result(float(memory[1].max()))} GB"
    picture = two_panels(last_step(run), axis, y_axis("memory, GB", rangemode="tozero"))
    return Figure("pace", title, "The median over the steps, and the memory after each.", [*upper, lower], picture)


# -- terms of the objective ----------------------------------------------------------------------------


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
    for (name, values), stroke in zip(curves.items(), strokes(list(curves)), strict=True):
        group = {"legendgroup": label(name)}
        if len(curves) <= 4:  # beyond, the pale lines of all terms hide each other
            pale = line(thin(values, 300), label(name), stroke, width=1, hoverinfo="skip", showlegend=False, **group)
            traces.append(pale | {"opacity": 0.25})
        traces.append(line(thin(smooth(values), 300), label(name), stroke, **group))
    heights = joined(values[1] for values in curves.values())
    drawn = heights[heights > 0] if np.mean(heights > 0) > 0.5 else heights  # a term that is off would hide the others
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
    names = list(dict.fromkeys(name for _, event in records for name in section(event, "terms")))[:MAX_TERMS]
    if len(names) < 2:
        return None
    traces: list[Trace] = []
    style = {"mode": "lines+markers", "marker": {"size": 5}} if len(records) <= 100 else {}
    for name, stroke in zip(names, strokes(names), strict=True):
        found = [(step, as_number(section(section(event, "terms"), name).get("share"))) for step, event in records]
        heights = curve_of([(float(step), None if value is None else 100 * value) for step, value in found])
        traces.append(line(thin(heights, 300), label(name), stroke, **style))
        traces[-1]["hovertemplate"] = "%{y:.1f}%"
    pairs = list(dict.fromkeys(pair for _, event in records for pair in section(event, "cosines")))
    for pair in pairs[:MAX_TERMS]:
        cosines = curve_of([(float(step), as_number(section(event, "cosines").get(pair))) for step, event in records])
        dotted = line(thin(cosines, 300), label(pair), colour("ink"), width=1.5, dash="dot", **style)
        traces.append(dotted | {"yaxis": "y2"})
    last = {name: as_number(section(section(records[-1][1], "terms"), name).get("share")) or 0.0 for name in names}
    largest = max(last, key=last.__getitem__)
    title = f"{clean(largest)} makes {format_percent(last[largest], 0)} of the gradient at the end"
    caption = "Above: each term's share of the gradient norms. Below: 1 is the same direction, below 0 they disagree."
    upper = y_axis("share of the gradient", range=[0, 100], ticksuffix="%")
    picture = two_panels(until, upper, y_axis("cosine", range=[-1, 1]))
    return Figure("pulls", title, caption, traces, picture)


# -- the guard -----------------------------------------------------------------------------------------


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
    title, caption = _verdict_words(words, float(scale[1][-1]) if is_scaled else None)
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


def _verdict_words(words: dict[str, Floats], scale: float | None) -> tuple[str, str]:
    counted = ", ".join(f"{clean(word)} {format_count(len(steps))}" for word, steps in list(words.items())[:MAX_WORDS])
    parts = [f"The loss scale ends at {format_count(scale)}"] if scale is not None else []
    parts.append(f"verdicts: {counted}" if counted else "every attempt was kept")
    title = "; ".join(parts)
    caption = "A mark for each attempt that was not simply kept, by verdict."
    if any(len(steps) > MAX_MARKS for steps in words.values()):
        caption += f" Of a verdict with more than {MAX_MARKS:,}, every n-th is drawn."
    if len(words) > MAX_WORDS:
        caption += f" {len(words) - MAX_WORDS} more verdicts are in events.jsonl."
    return title[0].upper() + title[1:], caption if counted else "Every step was kept at the first attempt."


# -- the teacher's router ------------------------------------------------------------------------------


def router_figure(run: RunRecord) -> Figure | None:
    """The teacher's held-out loss and the bound of the alarm, above the drift of its gates."""
    events = run.history.routers
    nll = curve(events, "teacher_nll")
    if len(nll[0]) < 2:
        return None
    last, start = float(nll[0].max()), float(nll[1][0])
    traces: list[Trace] = [
        line(thin(nll), "teacher, held out", colour("teacher"), mode="lines+markers", marker={"size": 6})
    ]
    bound = as_number(section(section(run.config, "teacher"), "router").get("max_degradation"))
    is_trained = any((as_number(event.get("updates")) or 0) > 0 for event in events)
    if bound is not None and is_trained:
        traces.append(level(start + bound, last, "alarm", colour("refused"), dash="dot"))
    alarms = [event for event in events if event.get("alarm")]
    if alarms:
        traces.append(marks(curve(alarms, "teacher_nll"), "restored and frozen", colour("refused"), "x", size=10))
    drift = curve(events, "largest_drift")
    kl = curve(events, "kl_to_original")
    traces.append(line(thin(drift), "largest gate drift", colour("ink"), width=1.5) | {"yaxis": "y2"})
    traces.append(
        line(thin(kl), "KL to the original teacher", colour("student"), width=1.5, dash="dash") | {"yaxis": "y2"}
    )
    title = f"The teacher's held-out loss goes from {format_loss(start)} to {format_loss(float(nll[1][-1]))}"
    if alarms:
        title += f"; its gates were restored at step {format_count(float(alarms[0]['step']))}"
    caption = "Drift is a gate's change over its original length. The alarm restores the original gates."
    picture = two_panels(last, y_axis("teacher, nats"), y_axis("drift, KL", rangemode="tozero"))
    return Figure("router", title, caption, traces, picture)


# -- several runs --------------------------------------------------------------------------------------


def shared_figures(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Figure]:
    """Curves of several runs in the same axes."""
    until = max(map(last_step, runs))
    perplexities = [curve(run.evals, "perplexity", above=0) for run in runs]
    losses = [smooth(run.steps.curve("train_loss")) for run in runs]
    norms = [smooth(run.steps.curve("grad_norm", above=0)) for run in runs]
    rates = [run.steps.curve("lr", above=0) for run in runs]
    tried = [
        _overlaid("perplexity", "Held-out perplexity", "Lower is better.", perplexities, names, until, is_wide=True),
        _overlaid("objective", "Objective in training", "Smoothed; comparable at equal weights.", losses, names, until),
        _overlaid("gradients", "Gradient norm", "Smoothed, before clipping.", norms, names, until),
        _overlaid("rates", "Learning rate", "Of applied steps.", rates, names, until, is_wide=True),
    ]
    return [figure for figure in tried if figure is not None]


def _overlaid(
    key: str,
    title: str,
    caption: str,
    curves: Sequence[Curve],
    names: Sequence[str],
    until: float,
    *,
    is_wide: bool = False,
) -> Figure | None:
    traces: list[Trace] = []
    for place, (drawn, name) in enumerate(zip(curves, names, strict=True)):
        if len(drawn[0]):
            dash = ("solid", "dash", "dot", "dashdot")[place // len(_STROKES) % 4]
            stroke = _STROKES[place % len(_STROKES)]
            traces.append(line(thin(drawn, MAX_SHARED_POINTS), label(name), stroke, dash=dash))
    if not traces:
        return None
    values = joined(ys for _, ys in curves).tolist()
    axis = y_axis("learning rate", tickformat=".1e") if key == "rates" else y_axis_for(title.lower(), values)
    return Figure(key, title, caption, traces, layout(until, axis, height=380), is_wide)
