"""The table of a run's sources: how often each was seen, and its terms at the end."""

from __future__ import annotations

from collections.abc import Mapping

from stillroom.report.markup import Html, element, join
from stillroom.report.record import RunRecord
from stillroom.telemetry.reading import items, show
from stillroom.telemetry.wording import clean, format_count, format_loss

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
    late = run.steps.first_of_last(_SHARE_AT_THE_END)
    targets = dict(zip(*(part.tolist() for part in run.steps.curve("source", name, "targets")), strict=True))
    found = {}
    for term in run.steps.source_terms(name):
        points = zip(*(part.tolist() for part in run.steps.curve("source", name, term)), strict=True)
        weighted = [(value, targets.get(step, 0.0)) for step, value in points if step >= late and term != "targets"]
        total = sum(weight for _, weight in weighted)
        if total:
            found[term] = sum(value * weight for value, weight in weighted) / total
    return found
