"""The teacher's gates in the report: the teacher's loss and the gates' drift over the run, and a row for each gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.report.curves import curve, thin
from stillroom.report.drawing import Figure, Trace, colour, level, line, marks, two_panels, y_axis
from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import items, show
from stillroom.telemetry.wording import as_number, clean, format_count, format_loss, format_percent

MAX_ROWS = 48


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
    bound = as_number(mapping(mapping(run.config, "teacher"), "router").get("max_degradation"))
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


def router_part(run: RunRecord) -> Html | None:
    """The probe's result and a row for each gate; None if the run recorded no gates."""
    events = run.history.routers
    if not events:
        return None
    last = run.history.last_router
    layers = [layer for layer in items(last, "layers") if isinstance(layer, Mapping)]
    sentences = [_sentence(last), *(_probe(event) for event in run.history.of_kind("router_probe")[-1:])]
    names = ("gate", "entropy, nats", "drift", "most used expert", "least used expert")
    head = element("tr", *(element("th", name, scope="col") for name in names))
    rows = [_row(layer) for layer in layers[:MAX_ROWS]]
    if len(layers) > MAX_ROWS:
        sentences.append(f"{len(layers) - MAX_ROWS} more gates stand in events.jsonl.")
    table = element("table", element("thead", head), element("tbody", *rows), class_="results")
    return join([element("p", " ".join(sentences), class_="note"), table])


def _sentence(event: Event) -> str:
    state = "frozen" if event.get("is_frozen") else "in use"
    return (
        f"Mode {clean(event.get('mode'))}, {show(event, 'updates', format_count)} updates, "
        f"{show(event, 'skipped', format_count)} skipped, {show(event, 'mended', format_count)} mended; gates {state}."
    )


def _probe(event: Event) -> str:
    answer = "worthwhile" if event.get("is_worthwhile") else "pointless"
    return (
        f"The probe found router training {answer}: {show(event, 'updates', format_count)} updates on the labels moved "
        f"the teacher's held-out loss from {show(event, 'nll_before', format_loss)} to "
        f"{show(event, 'nll_after', format_loss)}."
    )


def _row(layer: Mapping[str, Any]) -> Html:
    usage = [value for value in map(as_number, items(layer, "usage")) if value is not None]
    most, least = (format_percent(pick(usage)) if usage else "-" for pick in (max, min))
    return element(
        "tr",
        element("th", clean(layer.get("name")), scope="row"),
        element("td", show(layer, "entropy", format_loss), data_label="entropy, nats"),
        element("td", show(layer, "drift", format_loss), data_label="drift"),
        element("td", most, data_label="most used expert"),
        element("td", least, data_label="least used expert"),
    )
