"""The page's part about what `stillroom eval` measured: teacher and student side by side, and what is retained."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord, mapping
from stillroom.report.sections import number_cell
from stillroom.telemetry.evaluation_record import evaluation_notes
from stillroom.telemetry.figure_rows import FigureRow, figure_rows
from stillroom.telemetry.wording import clean, clip

_MAX_ROWS = 120
_MAX_NOTES = 12
_RETAINED = (
    "Retained: of quality the share of the teacher's (perplexities and bits inverted), of size and speed how many "
    "times the teacher's. Small figures are 95 % intervals. Seconds, speed and memory are of one sitting there."
)


def evaluated_part(run: RunRecord) -> Html | None:
    """A table of every figure, after a warning where the student is no longer the one that was measured."""
    record, doubt = run.evaluated.record, run.evaluated.doubt
    rows = figure_rows(record)
    if not rows:
        return None
    more = len(rows) - _MAX_ROWS
    parts = [
        element("aside", element("p", doubt)) if doubt else None,
        _table(rows[:_MAX_ROWS], bool(mapping(record, "teacher"))),
        element("p", f"{more:,} more figures stand in eval.json.", class_="note") if more > 0 else None,
        element("p", " ".join([_about(record), _RETAINED]), class_="note"),
        _notes(evaluation_notes(record)),
    ]
    return join(part for part in parts if part is not None)


def _table(rows: list[FigureRow], has_teacher: bool) -> Html:
    heads = ("teacher", "student", "retained") if has_teacher else ("student",)
    head = element("tr", element("th", ""), *(element("th", name, scope="col") for name in heads))
    body = []
    for row in rows:
        theirs = number_cell("teacher", row.teacher.value, row.teacher.interval)
        ours = number_cell("student", row.student.value, row.student.interval)
        cells = [theirs, ours, number_cell("retained", row.retained or "-", "")] if has_teacher else [ours]
        body.append(element("tr", element("th", clip(row.label, 80), scope="row"), *cells))
    return element("table", element("thead", head), element("tbody", *body), class_="results figures-table")


def _about(record: Mapping[str, Any]) -> str:
    """On which text, when and where it was measured, and with which options."""
    parts = [f"On {clip(record.get('data'), 120)}" if record.get("data") else "", _when(record)]
    device, machine = record.get("device"), mapping(record, "machine")
    if device:
        cores = f", {clean(machine['cores'])} cores" if machine.get("cores") else ""
        parts.append(f"device {clip(device, 40)}{cores}")
    settings = mapping(record, "settings")
    parts += [f"{clean(key)} {clip(value, 80)}" for key, value in settings.items() if value not in (None, "", False)]
    return ", ".join(part for part in parts if part) + "."


def _when(record: Mapping[str, Any]) -> str:
    try:
        return f"{datetime.fromisoformat(str(record.get('time'))).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return ""


def _notes(notes: list[str]) -> Html | None:
    if not notes:
        return None
    shown = [clip(note, 400) for note in notes[:_MAX_NOTES]]
    shown += [f"{len(notes) - _MAX_NOTES} more notes stand in eval.json"] if len(notes) > _MAX_NOTES else []
    return element("ul", *(element("li", note) for note in shown), class_="notes")
