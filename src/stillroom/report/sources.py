"""The table of a run's sources: how often each was seen, and its terms at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.reading import items, show
from stillroom.telemetry.wording import as_number, clean, format_count, format_loss

_SHARE_AT_THE_END = 20  # the last of so many parts of the steps


def sources_table(run: RunRecord) -> Html | None:
    """None where the training data is one source."""
    told = [source for source in items(run.summary, "sources") if isinstance(source, Mapping)]
    if not told:
        return None
    ends = {str(source.get("name")): _last_terms(run, str(source.get("name"))) for source in told}
    terms = list(dict.fromkeys(term for means in ends.values() for term in means))
    head = ["source", "learned from", "weight", "rows", "epochs", *terms]
    body = []
    for source in told:
        learned = "labels" if source.get("objectives") == "labels" else "teacher and labels"
        means = ends[str(source.get("name"))]
        cells = [
            learned,
            show(source, "weight", "{:g}".format),
            show(source, "rows", format_count),
            show(source, "epochs", "{:.2f}".format),
            *(format_loss(means[term]) if term in means else "-" for term in terms),
        ]
        named = [element("td", cell, data_label=column) for cell, column in zip(cells, head[1:], strict=True)]
        body.append(element("tr", element("th", clean(source.get("name")), scope="row"), *named))
    row = element("tr", *(element("th", name, scope="col") for name in head))
    note = "Epochs: how often the source was seen. Terms: unweighted means over the last twentieth of the steps."
    table = element("table", element("thead", row), element("tbody", *body), class_="results")
    return join([table, element("p", note, class_="note")])


def _last_terms(run: RunRecord, name: str) -> dict[str, float]:
    """The mean of each term over the targets of the last steps."""
    steps = run.kept_steps
    last = [mapping(mapping(step, "sources"), name) for step in steps[-max(1, len(steps) // _SHARE_AT_THE_END) :]]
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for record in last:
        targets = as_number(record.get("targets")) or 0.0
        for term, mean in _means(record).items():
            sums[term] = sums.get(term, 0.0) + mean * targets
            counts[term] = counts.get(term, 0.0) + targets
    return {term: total / counts[term] for term, total in sums.items() if counts[term]}


def _means(record: Mapping[str, Any]) -> dict[str, float]:
    found = {str(term): as_number(value) for term, value in record.items() if term != "targets"}
    return {term: value for term, value in found.items() if value is not None}
