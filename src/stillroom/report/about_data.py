"""The page's part about the data: how much, in what shape and length, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.reading import items
from stillroom.telemetry.wording import as_number, clean, format_count

_SIDES = (("train", "transfer set"), ("eval", "held out"))
_UNITS = ("documents", "tokens", "targets")
_WORDS = {
    "bad_records": "records that could not be read",
    "invalid_utf8": "texts with half a character, replaced by U+FFFD",
    "truncated_records": "records cut at data.max_length",
    "truncated_tokens": "tokens cut off",
    "truncated_targets": "scored tokens cut off",
    "rows_without_targets": "rows without a token to score",
    "overlapping_records": "records that stand in both sets",
    "empty_answers": "empty answers",
    "documents_without_tokens": "documents without tokens",
}


def data_part(run: RunRecord) -> Html | None:
    data = mapping(run.start, "data")
    if not data:
        return None
    parts = [_sizes(data), _lengths(data), *_sentences(run, data), _left_out(data)]
    present = [part for part in parts if part is not None]
    return join(present) if present else None


def _sizes(data: Mapping[str, Any]) -> Html | None:
    rows = []
    for side, name in _SIDES:
        counts = {unit: as_number(data.get(f"{side}_{unit}")) for unit in _UNITS}
        if counts["tokens"] is None:
            continue
        documents = counts["documents"]
        mean = counts["tokens"] / documents if documents else None
        cells = [*counts.values(), mean]
        columns = (*_UNITS, "tokens a document")
        shown = [
            element("td", "-" if value is None else format_count(value), data_label=column)
            for column, value in zip(columns, cells, strict=True)
        ]
        rows.append(element("tr", element("th", name, scope="row"), *shown))
    if not rows:
        return None
    heads = ("", *_UNITS, "tokens a document")
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    return element("table", element("thead", head), element("tbody", *rows), class_="results")


def _lengths(data: Mapping[str, Any]) -> Html | None:
    parts = []
    for side, name in _SIDES:
        found = mapping(mapping(data, "lengths"), side)
        named = [(clean(key).replace("_", " "), as_number(value)) for key, value in found.items()]
        values = [f"{key} {format_count(value)}" for key, value in named if value is not None]
        if values:
            parts.append(f"{name}: {', '.join(values)}")
    return element("p", f"Tokens in a row, {'; '.join(parts)}.", class_="note") if parts else None


def _sentences(run: RunRecord, data: Mapping[str, Any]) -> list[Html]:
    settings = mapping(run.config, "data")
    found = []
    shapes = {clean(name): as_number(count) for name, count in mapping(data, "shapes").items()}
    if shapes:
        listed = ", ".join(f"{name} {format_count(count)}" for name, count in shapes.items() if count is not None)
        found.append(f"Shapes of the records: {listed}.")
    length, packing = as_number(settings.get("max_length")), settings.get("packing")
    if length is not None:
        found.append(f"Rows of at most {format_count(length)} tokens, packing {clean(packing)}.")
    return [element("p", sentence, class_="note") for sentence in found]


def _left_out(data: Mapping[str, Any]) -> Html:
    counts = [(key, as_number(value)) for key, value in data.items() if key in _WORDS]
    lines = [f"{format_count(value)} {_WORDS[key]}" for key, value in counts if value]
    lines += [clean(note) for note in items(data, "notes")[:40]]
    if not lines:
        return element("p", "Nothing was left out.", class_="note")
    return join([element("h3", "Left out, and other notes"), element("ul", *(element("li", line) for line in lines))])
