"""The figures of the report. Each function returns a figure, or None if the run has no data for it.

Titles state the result with the run's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stillroom.report.curves import curve, curve_of, short, smooth, thin
from stillroom.report.drawing import (
    Figure,
    Trace,
    colour,
    layout,
    level,
    line,
    marks,
    noisy,
    phase_shades,
    two_panels,
    y_axis,
    y_axis_for,
)
from stillroom.report.record import RunRecord, mapping
from stillroom.report.router import router_figure
from stillroom.report.terms import pulls, raw_terms, shares, weighted_terms
from stillroom.report.verdicts import MAX_MARKS, verdicts
from stillroom.telemetry.reading import items
from stillroom.telemetry.wording import (
    as_number,
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
    until = last_step(run)
    tried = [perplexity(run), objective(run), shares(run, until), raw_terms(run, until), weighted_terms(run, until)]
    tried += [pulls(run, until), gradients(run), rates(run), pace(run), verdicts(run, until), router_figure(run)]
    drawn = [figure for figure in tried if figure is not None]
    if sum(not figure.is_wide for figure in drawn) % 2:  # else the last one would be beside an empty place
        drawn[-1] = replace(drawn[-1], is_wide=True)
    return drawn


def last_step(run: RunRecord) -> float:
    return max([float(run.steps.last), *(float(event["step"]) for event in run.evals[-1:])])


def perplexity(run: RunRecord) -> Figure | None:
    xs, ys = (part.tolist() for part in curve(run.evals, "perplexity", above=0))
    before = as_number(mapping(run.summary, "student_before").get("perplexity"))
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
    clip = as_number(mapping(run.config, "train").get("max_grad_norm"))
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
