"""The figures of the report. Each function returns a figure, or None if the run has no data for it.

Titles state the result with the run's numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from stillroom.report.drawing import (
    OTHER_COLOURS,
    TERM_COLOURS,
    Figure,
    Trace,
    colour,
    curve,
    label,
    layout,
    level,
    line,
    marks,
    noisy,
    phase_lines,
    short,
    smooth,
    stretches,
    thin,
    two_panels,
    y_axis,
    y_axis_at,
    y_axis_for,
)
from stillroom.report.record import RunRecord, mapping
from stillroom.report.router import router_figure
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import items
from stillroom.telemetry.wording import (
    as_number,
    clean,
    format_count,
    format_loss,
    format_lr,
    format_norm,
    format_percent,
    format_result,
)

LEVELS = (
    ("teacher", "teacher", "dash"),
    ("baseline", "plain training, equal tokens", "dashdot"),
    ("baseline_equal_compute", "plain training, equal compute", "dot"),
)


def all_figures(run: RunRecord) -> list[Figure]:
    tried = [perplexity(run), objective(run), shares(run), pulls(run), gradients(run), rates(run), pace(run)]
    tried.append(router_figure(run))
    drawn = [figure for figure in tried if figure is not None]
    if sum(not figure.is_wide for figure in drawn) % 2:  # else the last one would be beside an empty place
        drawn[-1] = replace(drawn[-1], is_wide=True)
    return drawn


def last_step(run: RunRecord) -> float:
    steps = [*run.kept_steps[-1:], *run.evals[-1:]]
    return max((float(event["step"]) for event in steps), default=0.0)


def perplexity(run: RunRecord) -> Figure | None:
    xs, ys = curve(run.evals, "perplexity", above=0)
    before = as_number(mapping(run.summary, "student_before").get("perplexity"))
    if xs and xs[0] > 0 and before:
        xs, ys = [0.0, *xs], [before, *ys]
    if not xs:
        return None
    traces = [line((xs, ys), "student", colour("student"), mode="lines+markers", width=2.5, marker={"size": 6})]
    traces[0] |= _whiskers(run, xs, ys)
    best = min(range(len(ys)), key=ys.__getitem__)
    ring = {"symbol": "circle-open", "size": 14, "color": colour("student"), "line": {"width": 2}}
    traces.append(marks(([xs[best]], [ys[best]]), "best student", colour("student"), marker=ring))
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
    intervals = {float(event["step"]): items(mapping(event, "intervals"), "perplexity") for event in run.evals}
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
    train, held_out = curve(run.kept_steps, "train_loss"), curve(run.evals, "objective")
    if not train[0] and not held_out[0]:
        return None
    traces: list[Trace] = []
    ends: list[str] = []
    if train[0]:
        traces += noisy(train, "training, each step", "training, smoothed")
        ends.append(f"{format_loss(smooth(train)[1][-1])} in training")
    if held_out[0]:
        traces.append(
            line(held_out, "held out", colour("ink"), mode="lines+markers", width=1.5, dash="dot", marker={"size": 7})
        )
        ends.append(f"{format_loss(held_out[1][-1])} held out")
    title = f"The objective ends at {' and '.join(ends)}"
    caption = "The same objective at the same weights for both, so the distance between the curves is real."
    axis = y_axis_for("objective", [*train[1], *held_out[1]])
    return Figure("objective", title, caption, traces, layout(last_step(run), axis) | phase_lines(run.of("phase")))


def shares(run: RunRecord) -> Figure | None:
    steps = [event for event in run.kept_steps if mapping(event, "terms")]
    names = list(dict.fromkeys(name for event in steps for name in mapping(event, "terms")))
    if not steps or len(names) < 2:
        return None
    parts = stretches(steps)
    places = [float(part[-1]["step"]) for part in parts]
    places[0] = float(steps[0]["step"])
    strokes = iter(OTHER_COLOURS * len(names))
    traces: list[Trace] = []
    for name in names:
        heights = [100 * statistics.fmean(_share(event, name) for event in part) for part in parts]
        stroke = TERM_COLOURS.get(name) or next(strokes)
        traces.append(line((places, heights), label(name), stroke, width=0.5, stackgroup="terms"))
        traces[-1]["hovertemplate"] = "%{y:.1f}%"
    last = {name: statistics.fmean(_share(event, name) for event in steps[-len(steps) // 20 :]) for name in names}
    largest = max(last, key=last.__getitem__)
    title = f"{clean(largest)} makes {format_percent(last[largest], 0)} of the objective at the end"
    caption = "Each term's share of the objective: raw value times weight, over the sum of all."
    axis = y_axis("share of the objective", range=[0, 100], ticksuffix="%")
    return Figure("shares", title, caption, traces, layout(last_step(run), axis) | phase_lines(run.of("phase")))


def _share(event: Event, name: str) -> float:
    return as_number(mapping(mapping(event, "terms"), name).get("share")) or 0.0


def pulls(run: RunRecord) -> Figure | None:
    """Each term's share of the gradient, and the cosines between terms, if they were measured."""
    records = sorted({event["step"]: event for event in run.of("gradients") if _is_step(event)}.items())
    names = list(dict.fromkeys(name for _, event in records for name in mapping(event, "terms")))
    if len(names) < 2:
        return None
    strokes = iter(OTHER_COLOURS * len(names))
    traces: list[Trace] = []
    style = {"mode": "lines+markers", "marker": {"size": 5}}
    for name in names:
        heights = [as_number(mapping(mapping(event, "terms"), name).get("share")) for _, event in records]
        points = [
            (float(step), 100 * value) for (step, _), value in zip(records, heights, strict=True) if value is not None
        ]
        stroke = TERM_COLOURS.get(name) or next(strokes)
        traces.append(line(([x for x, _ in points], [y for _, y in points]), label(name), stroke, **style))
        traces[-1]["hovertemplate"] = "%{y:.1f}%"
    for pair in dict.fromkeys(pair for _, event in records for pair in mapping(event, "cosines")):
        cosines = [(float(step), as_number(mapping(event, "cosines").get(pair))) for step, event in records]
        points = [(step, value) for step, value in cosines if value is not None]
        curve_of = ([x for x, _ in points], [y for _, y in points])
        traces.append(line(curve_of, label(pair), colour("ink"), width=1.5, dash="dot", **style) | {"yaxis": "y2"})
    last = {name: as_number(mapping(mapping(records[-1][1], "terms"), name).get("share")) or 0.0 for name in names}
    largest = max(last, key=last.__getitem__)
    title = f"{clean(largest)} makes {format_percent(last[largest], 0)} of the gradient at the end"
    caption = "Above: each term's share of the gradient norms. Below: 1 is the same direction, below 0 they disagree."
    upper = y_axis("share of the gradient", range=[0, 100], ticksuffix="%")
    picture = two_panels(last_step(run), upper, y_axis("cosine", range=[-1, 1]))
    return Figure("pulls", title, caption, traces, picture)


def _is_step(event: Event) -> bool:
    return isinstance(event.get("step"), int)


def gradients(run: RunRecord) -> Figure | None:
    norms = curve(run.kept_steps, "grad_norm", above=0)
    refused = run.refused_steps
    if not norms[0] and not refused:
        return None
    clip = as_number(mapping(run.config, "train").get("max_grad_norm"))
    seen = [*norms[1], *curve(refused, "grad_norm", above=0)[1], *([clip] if clip else [])]
    roof = 1.3 * max(seen, default=1.0)
    traces = noisy(norms, "each step", "smoothed") if norms[0] else []
    if clip:
        traces.append(level(clip, last_step(run), f"clipped at {clip:g}", colour("muted")))
    if refused:
        places = [(float(event["step"]), as_number(event.get("grad_norm"))) for event in refused]
        # Mark a norm that is not finite at the top.
        heights = [value if value is not None and value > 0 else roof for _, value in places]
        spots = ([step for step, _ in places], heights)
        traces.append(marks(spots, "refused", colour("refused"), "x", size=9))
    parts = [f"median {format_norm(statistics.median(norms[1]))}"] if norms[0] else []
    if clip and norms[0]:
        parts.append(f"{format_percent(statistics.fmean(value > clip for value in norms[1]), 0)} of the steps clipped")
    parts.append(f"{len(refused)} attempts refused" if refused else "none refused")
    title = f"Gradient norm: {', '.join(parts)}"
    caption = "Before clipping."
    if refused:
        caption += " A refused attempt changed no weight; crosses at the top had no finite norm."
    picture = layout(last_step(run), y_axis_for("gradient norm", [*seen, roof]), height=380)
    return Figure("gradients", title, caption, traces, picture)


def rates(run: RunRecord) -> Figure | None:
    rate, scale = curve(run.kept_steps, "lr", above=0), curve(run.kept_steps, "loss_scale", above=0)
    if not rate[0]:
        return None
    upper = line(thin(rate), "learning rate", colour("student"))
    title = f"The learning rate peaks at {_unbroken(max(rate[1]))} and ends at {_unbroken(rate[1][-1])}"
    axis = y_axis("learning rate", tickformat=".1e", rangemode="tozero")
    caption = "Counted in optimizer steps; a refused step does not move it."
    if len(set(scale[1])) < 2 and scale[1][:1] in ([], [1.0]):
        picture = layout(last_step(run), axis, height=380)
        return Figure("rates", title, f"{caption} No loss scale is in use.", [upper], picture)
    lower = line(thin(scale), "loss scale", colour("ink"), width=1.5) | {"yaxis": "y2"}
    lower["line"]["shape"] = "hv"
    title += f"; the loss scale at {format_count(scale[1][-1])}"
    picture = two_panels(last_step(run), axis, y_axis_at("loss scale", scale[1]))
    return Figure("rates", title, caption, [upper, lower], picture)


def _unbroken(rate: float) -> str:
    """Prevent a line break at the hyphen of a rate."""
    return format_lr(rate).replace("-", "\u2011")


def pace(run: RunRecord) -> Figure | None:
    speed = curve(run.kept_steps, "tokens_per_second", above=0)
    on_gpu = curve(run.kept_steps, "gpu_memory_gb", above=0)
    memory = on_gpu if on_gpu[0] else curve(run.kept_steps, "memory_gb", above=0)
    if not speed[0]:
        return None
    upper = noisy(speed, "each step", "tokens a second, smoothed")
    title = f"{format_count(statistics.median(speed[1]))} tokens a second"
    axis = y_axis("tokens / s", rangemode="tozero", tickformat=",d")
    if not memory[0]:
        return Figure("pace", title, "Memory was not recorded.", upper, layout(last_step(run), axis, height=380))
    where = "on the GPU" if on_gpu[0] else "of the process"
    lower = line(thin(memory), f"memory {where}", colour("ink"), width=1.5) | {"yaxis": "y2"}
    title += f"; memory {where} peaks at {format_result(max(memory[1]))} GB"
    picture = two_panels(last_step(run), axis, y_axis("memory, GB", rangemode="tozero"))
    return Figure("pace", title, "The median over the steps, and the memory after each.", [*upper, lower], picture)
