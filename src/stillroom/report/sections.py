"""The text and tables of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stillroom.report.configured import flat, shown
from stillroom.report.markup import Html, element, join, text
from stillroom.report.record import RunRecord, mapping
from stillroom.telemetry.events import Event
from stillroom.telemetry.reading import items, show, show_interval
from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_count,
    format_duration,
    format_percent,
    format_result,
)
from stillroom.yardsticks import MIN_DOCUMENTS

MAX_SAMPLES = 12
MAX_SAMPLE_CHARACTERS = 1600

ROWS = (
    ("teacher", "teacher"),
    ("student_before", "student before training"),
    ("student", "student, distilled"),
    ("baseline", "plain training, equal tokens"),
    ("baseline_equal_compute", "plain training, equal compute"),
)
Column = tuple[str, str, Callable[[float], str]]  # key, title, format

COLUMNS: tuple[Column, ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits per byte", format_result),
    ("kl", "KL to teacher", format_result),
    ("agreement", "agreement", format_percent),
    ("parameters", "parameters", format_count),
    ("steps", "steps", format_count),
    ("seconds", "time", format_duration),
    ("tokens", "tokens seen", format_count),
)
CLOSER_COLUMNS: tuple[Column, ...] = (
    ("acceptance", "acceptance rate", format_percent),
    ("top5_agreement", "teacher's choice in top 5", format_percent),
    ("top5_overlap", "top-5 overlap", format_percent),
    ("calibration_error", "calibration error", format_percent),
)


def results_table(run: RunRecord) -> Html | None:
    rows = [(key, name, dict(run.result(key))) for key, name in ROWS if run.result(key)]
    if not rows:
        return None
    for key, _, row in rows:
        if key == "student":  # the run's own totals are the student's
            row |= {name: run.summary.get(name) for name in ("steps", "seconds", "tokens") if row.get(name) is None}
    return _table(rows, COLUMNS)


def yardsticks_table(run: RunRecord) -> Html | None:
    """How close each model is to the teacher, token by token, and how well it is calibrated."""
    table = _table([(key, name, run.result(key)) for key, name in ROWS if run.result(key)], CLOSER_COLUMNS)
    if table is None:
        return None
    note = (
        "Acceptance rate: how often the teacher would take the student's token in speculative decoding. Calibration "
        "error: how far confidence and accuracy of the likeliest token lie apart."
    )
    scored, held_out = as_number(run.result("student").get("documents")), _num_held_out(run)
    if scored is not None and scored < MIN_DOCUMENTS:
        note += (
            f" There are no intervals: it takes {MIN_DOCUMENTS} held-out documents (scored: {format_count(scored)})."
        )
    elif scored is not None:
        documents = f"{format_count(scored)} held-out documents"
        if held_out is not None and scored < held_out:
            documents = f"{format_count(scored)} of {format_count(held_out)} held-out documents, those that were scored"
        note += f" Small figures are 95 % intervals over {documents}, redrawn 1,000 times."
    return join([table, element("p", note, class_="note")])


def _num_held_out(run: RunRecord) -> float | None:
    return as_number(mapping(run.start, "data").get("eval_documents"))


def _table(rows: Sequence[tuple[str, str, Mapping[str, Any]]], wanted: Sequence[Column]) -> Html | None:
    """A table without the columns that are empty in all rows; None if no column is left."""
    columns = [column for column in wanted if any(show(row, column[0], column[2]) != "-" for _, _, row in rows)]
    if not columns:
        return None
    head = element("tr", element("th", ""), *(element("th", name, scope="col") for _, name, _ in columns))
    body = [
        element(
            "tr",
            element("th", element("span", "", class_=f"dot role-{key}"), name, scope="row"),
            *(
                number_cell(name, show(row, field, form), show_interval(row, field, form))
                for field, name, form in columns
            ),
            class_="leading" if key == "student" else None,
        )
        for key, name, row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body), class_="results")


def number_cell(column: str, value: str, interval: str) -> Html:
    if value == "-":
        return element("td", Html("&ndash;"), data_label=column, class_="absent")
    bounds = element("span", interval, class_="interval") if interval else None
    return element("td", value, bounds, data_label=column)


def checks_list(run: RunRecord) -> Html | None:
    checks = [check for check in items(run.summary, "checks") if isinstance(check, Mapping)]
    if not checks:
        return None
    rows = []
    for check in checks:
        word = "passed" if check.get("passed") is True else "failed"
        detail = element("span", check["text"], class_="detail") if check.get("text") else None
        name = element("span", check.get("name"), class_="name")
        rows.append(element("li", element("span", word, class_=f"verdict {word}"), name, detail))
    return element("ul", *rows, class_="checks")


# -- guard -----------------------------------------------------------------------------------------------


def guard_table(run: RunRecord) -> Html:
    shown, num_guards = run.history.guards, run.history.num_guards
    if not num_guards:
        return element("p", "Every step was kept. The guard had nothing to do.", class_="note")
    actions = ", ".join(f"{clean(action)} {count}" for action, count in run.history.guard_counts.most_common(12))
    left_out = num_guards - len(shown)
    summary = f"{num_guards} events: {actions}."
    summary += f" {left_out} from the middle are left out here and stand in events.jsonl." if left_out else ""
    names = ("step", "action", "reason", "samples", "evidence")
    head = element("tr", *(element("th", name, scope="col") for name in names))
    table = element("table", element("thead", head), element("tbody", *map(_guard_row, shown)), class_="guard")
    return join([element("p", summary, class_="note"), table])


def _guard_row(event: Event) -> Html:
    action = clean(event.get("action"))
    samples = ", ".join(clip(name, 32) for name in items(event, "sample_ids")[:4])
    evidence = ", ".join(
        f"{clean(name)} {shown(value)}" for name, value in flat(_with_words(mapping(event, "evidence")))
    )
    return element(
        "tr",
        element("td", show(event, "step", format_count), data_label="step", class_="number"),
        element("td", element("span", action, class_="action"), data_label="action"),
        element("td", event.get("reason") or "", data_label="reason"),
        element("td", samples, data_label="samples", class_="names"),
        element("td", clip(evidence, 160), data_label="evidence", class_="evidence"),
    )


def _with_words(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evidence with `nan` or `inf` in place of null and its sibling key."""
    siblings = {key for key in evidence if key.endswith("_nonfinite")}
    return {key: evidence.get(f"{key}_nonfinite", value) for key, value in evidence.items() if key not in siblings}


# -- samples ---------------------------------------------------------------------------------------------


def samples_part(run: RunRecord) -> Html | None:
    samples = run.history.samples[-MAX_SAMPLES:]
    return join(map(_sample, samples)) if samples else None


def _sample(event: Event) -> Html:
    voices = [voice for voice in ("teacher", "student", "reference") if isinstance(event.get(voice), str)]
    columns = [
        element("div", element("h4", voice, class_=f"voice-{voice}"), _quote(event[voice]), class_="voice")
        for voice in voices
    ]
    prompt = element("div", element("h4", "prompt"), _quote(event.get("prompt") or ""), class_="prompt")
    return element("article", prompt, element("div", *columns, class_="voices"), class_="sample")


def _quote(value: str) -> Html:
    more = len(value) - MAX_SAMPLE_CHARACTERS
    shown = text(value[:MAX_SAMPLE_CHARACTERS], keep_lines=True)
    rest = element("span", f" ... {format_count(more)} more characters", class_="note") if more > 0 else None
    return element("pre", shown, rest, dir="auto")


# -- settings --------------------------------------------------------------------------------------------


def settings_part(run: RunRecord) -> Html | None:
    """Configuration, versions and machine, folded by default."""
    groups = [
        ("Configuration", run.config),
        ("Versions", mapping(run.start, "versions")),
        ("Machine", mapping(run.start, "machine")),
        ("Models", {name: run.start[name] for name in ("teacher", "student") if mapping(run.start, name)}),
    ]
    folds = [
        element("details", element("summary", title), element("div", *_groups(values), class_="settings"))
        for title, values in groups
        if values
    ]
    return join(folds) if folds else None


def _groups(values: Mapping[str, Any]) -> Iterator[Html]:
    """A list for each section, after one for the values outside any section."""
    loose = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if loose:
        yield _definitions(loose)
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield element("section", element("h4", key), _definitions(value))


def _definitions(values: Mapping[str, Any]) -> Html:
    pairs = [element("div", element("dt", clean(name)), element("dd", shown(value))) for name, value in flat(values)]
    return element("dl", *pairs)


def notes_list(run: RunRecord) -> Html | None:
    notes = [*run.history.notes]
    if run.history.num_notes_left_out:
        notes.append(f"{format_count(run.history.num_notes_left_out)} more notes stand in events.jsonl")
    precision = mapping(run.start, "precision")
    if precision.get("reason"):
        notes.insert(0, f"precision {clean(precision.get('mode'))}: {clean(precision['reason'])}")
    if not notes:
        return None
    return element("ul", *(element("li", note) for note in dict.fromkeys(map(clean, notes))), class_="notes")
