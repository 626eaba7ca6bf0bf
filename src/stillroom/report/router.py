"""The teacher's gates in the report: how the teacher did while they moved, and what each of them does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stillroom.report.drawing import Curve, Figure, Trace, colour, level, line, marks, two_panels, y_axis
from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import items, show
from stillroom.telemetry.router_lines import largest_drift
from stillroom.telemetry.wording import as_number, clean, format_count, format_loss, format_percent

MAX_ROWS = 48


def records(run: RunRecord) -> list[Event]:
    """One record a step, in order; after a rollback the later one counts."""
    found = {event["step"]: event for event in run.of("router") if isinstance(event.get("step"), int)}
    return [found[step] for step in sorted(found)]


def router_figure(run: RunRecord) -> Figure | None:
    """The teacher's held-out loss over the run, with the bound of the alarm, above the drift of its gates."""
    events = records(run)
    nll = _curve(events, "teacher_nll")
    if len(nll[0]) < 2:
        return None
    last, start = max(nll[0]), nll[1][0]
    traces: list[Trace] = [line(nll, "teacher, held out", colour("teacher"), mode="lines+markers", marker={"size": 6})]
    bound = as_number(mapping(mapping(run.config, "teacher"), "router").get("max_degradation"))
    is_trained = any((as_number(event.get("updates")) or 0) > 0 for event in events)
    if bound is not None and is_trained:
        traces.append(level(start + bound, last, "alarm", colour("refused"), dash="dot"))
    alarms = [event for event in events if event.get("alarm")]
    if alarms:
        traces.append(marks(_curve(alarms, "teacher_nll"), "restored and frozen", colour("refused"), "x", size=10))
    drift = ([float(event["step"]) for event in events], [largest_drift(event) for event in events])
    kl = _curve(events, "kl_to_original")
    traces.append(line(drift, "largest gate drift", colour("ink"), width=1.5) | {"yaxis": "y2"})
    traces.append(line(kl, "KL to the original teacher", colour("student"), width=1.5, dash="dash") | {"yaxis": "y2"})
    title = f"The teacher's held-out loss goes from {format_loss(start)} to {format_loss(nll[1][-1])}"
    if alarms:
        title += f"; its gates were restored at step {format_count(float(alarms[0]['step']))}"
    caption = "Drift is a gate's change over its original length. The alarm restores the original gates."
    picture = two_panels(last, y_axis("teacher, nats"), y_axis("drift, KL", rangemode="tozero"))
    return Figure("router", title, caption, traces, picture)


def _curve(events: Sequence[Event], key: str) -> Curve:
    found = [(float(event["step"]), as_number(event.get(key))) for event in events]
    kept = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def router_part(run: RunRecord) -> Html | None:
    """The probe's finding and a row for each gate; None where the run had nothing to do with gates."""
    events = records(run)
    if not events:
        return None
    last = events[-1]
    layers = [layer for layer in items(last, "layers") if isinstance(layer, Mapping)]
    told = [_sentence(last), *(_probe(event) for event in run.of("router_probe")[-1:])]
    names = ("gate", "entropy, nats", "drift", "most used expert", "least used expert")
    head = element("tr", *(element("th", name, scope="col") for name in names))
    rows = [_row(layer) for layer in layers[:MAX_ROWS]]
    if len(layers) > MAX_ROWS:
        told.append(f"{len(layers) - MAX_ROWS} more gates stand in events.jsonl.")
    table = element("table", element("thead", head), element("tbody", *rows), class_="results")
    return join([element("p", " ".join(told), class_="note"), table])


def _sentence(event: Event) -> str:
    state = "frozen" if event.get("is_frozen") else "in use"
    return (
        f"Mode {clean(event.get('mode'))}, {show(event, 'updates', format_count)} updates, "
        f"{show(event, 'skipped', format_count)} skipped, {show(event, 'mended', format_count)} mended; gates {state}."
    )


def _probe(event: Event) -> str:
    found = "worthwhile" if event.get("is_worthwhile") else "pointless"
    return (
        f"The probe found router training {found}: {show(event, 'updates', format_count)} updates on the labels moved "
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
