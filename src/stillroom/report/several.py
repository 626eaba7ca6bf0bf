"""Several runs on one page: curves overlaid, a table of results, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stillroom.report import sections
from stillroom.report.configured import flat, shown
from stillroom.report.curves import curve, smooth, thin
from stillroom.report.document import document, figures_part, section
from stillroom.report.drawing import OTHER_COLOURS, Figure, Trace, colour, label, layout, line, y_axis, y_axis_for
from stillroom.report.figures import last_step
from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord
from stillroom.report.steps import Curve, joined
from stillroom.telemetry.reading import show
from stillroom.telemetry.wording import clean, clip, format_count, format_duration, format_percent, format_result

MAX_POINTS = 300  # of a curve: many runs share the page
MAX_SETTINGS = 80
_STROKES = (colour("student"), colour("teacher"), *OTHER_COLOURS, colour("baseline"))


def render_several(runs: Sequence[RunRecord]) -> str:
    names = unique_names(runs)
    figures = [figure for figure in _figures(runs, names) if figure is not None]
    parts = [
        section("result", "Results", _results(runs, names)),
        section("curves", "Curves", figures_part(figures), "No step was recorded, so there is nothing to draw."),
        section("settings", "Settings that differ", _settings(runs, names)),
        section("missing", "Parts that are missing", _missing(runs, names)),
    ]
    header = element(
        "header",
        element("p", "stillroom", class_="eyebrow"),
        element("h1", _headline(runs, names)),
        element("p", "A run's colour is the same in every figure.", class_="lead"),
    )
    body = element("main", header, *(part for part in parts if part is not None))
    return document(f"{len(runs)} runs", body, figures, None)


def unique_names(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names, numbered where two have the same."""
    names = [clip(run.name, 40) for run in runs]
    counts = {name: names.count(name) for name in names}
    return [f"{name} ({place + 1})" if counts[name] > 1 else name for place, name in enumerate(names)]


def _headline(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    scored = [(value, name) for run, name in zip(runs, names, strict=True) if (value := run.perplexity("student"))]
    finite = [(value, name) for value, name in scored if value < float("inf")]
    if not finite:
        return f"{len(runs)} runs, none of which has a result"
    value, name = min(finite)
    return f"Of {len(runs)} runs, {name} has the lowest held-out perplexity: {format_result(value)}"


def _results(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    columns = (*sections.COLUMNS[:4], ("parameters", "parameters", format_count))
    whole: tuple[sections.Column, ...] = (
        ("steps", "steps", format_count),
        ("seconds", "time", format_duration),
        ("tokens", "tokens", format_count),
        ("success_rate", "steps kept", format_percent),
        ("skipped", "skipped", format_count),
    )
    heads = ("", "status", *(name for _, name, _ in (*columns, *whole)))
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    body = []
    for run, name in zip(runs, names, strict=True):
        status = clean(run.summary.get("status") or run.end.get("status") or "unfinished")
        row: dict[str, Any] = {"steps": run.steps.last, **run.summary}
        cells = [("status", status)]
        cells += [(title, show(run.result("student"), key, form)) for key, title, form in columns]
        cells += [(title, show(row, key, form)) for key, title, form in whole]
        body.append(
            element(
                "tr",
                element("th", name, scope="row"),
                *(element("td", value, data_label=title) for title, value in cells),
            )
        )
    return element("table", element("thead", head), element("tbody", *body), class_="results")


def _figures(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Figure | None]:
    until = max(map(last_step, runs))
    perplexities = [curve(run.evals, "perplexity", above=0) for run in runs]
    losses = [smooth(run.steps.curve("train_loss")) for run in runs]
    norms = [smooth(run.steps.curve("grad_norm", above=0)) for run in runs]
    rates = [run.steps.curve("lr", above=0) for run in runs]
    return [
        _overlaid("perplexity", "Held-out perplexity", "Lower is better.", perplexities, names, until, is_wide=True),
        _overlaid("objective", "Objective in training", "Smoothed; comparable at equal weights.", losses, names, until),
        _overlaid("gradients", "Gradient norm", "Smoothed, before clipping.", norms, names, until),
        _overlaid("rates", "Learning rate", "Of applied steps.", rates, names, until, is_wide=True),
    ]


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
            traces.append(line(thin(drawn, MAX_POINTS), label(name), stroke, dash=dash))
    if not traces:
        return None
    values = joined(ys for _, ys in curves).tolist()
    axis = y_axis("learning rate", tickformat=".1e") if key == "rates" else y_axis_for(title.lower(), values)
    return Figure(key, title, caption, traces, layout(until, axis, height=380), is_wide)


def _settings(runs: Sequence[RunRecord], names: Sequence[str]) -> Html:
    tables = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    differing = [key for key in keys if len({shown(table.get(key)) for table in tables}) > 1]
    if not differing:
        return element("p", "The configurations are the same.", class_="note")
    head = element("tr", *(element("th", name, scope="col") for name in ("setting", *names)))
    body = [
        element(
            "tr",
            element("th", clean(key), scope="row"),
            *(
                element("td", clip(shown(table.get(key)), 80), data_label=name)
                for table, name in zip(tables, names, strict=True)
            ),
        )
        for key in differing[:MAX_SETTINGS]
    ]
    more = len(differing) - MAX_SETTINGS
    note = element("p", f"{more} more settings differ.", class_="note") if more > 0 else Html("")
    return join([element("table", element("thead", head), element("tbody", *body), class_="differences"), note])


def _missing(runs: Sequence[RunRecord], names: Sequence[str]) -> Html | None:
    lines = [f"{name}: {sentence}" for run, name in zip(runs, names, strict=True) for sentence in run.missing]
    return element("ul", *(element("li", said) for said in lines), class_="notes") if lines else None
