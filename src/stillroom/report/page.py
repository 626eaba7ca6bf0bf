"""The report as one HTML document that loads nothing: style, scripts and data are in it.

Functions here turn a run into plain values; the templates turn values into HTML. What a run recorded (names, samples,
paths, reasons) may contain anything: the environment cleans and escapes every value that a template prints, and the
content security policy lists the page's scripts by their hashes, so a browser would run no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stillroom.config import preset_names
from stillroom.config.load import build, read_preset
from stillroom.core.errors import CannotSave, StillroomError
from stillroom.core.files import reason_of, write_atomically
from stillroom.metrics.metrics import MIN_DOCUMENTS
from stillroom.report.drawing import APART, ROLES, Figure, dark_partners
from stillroom.report.figures import all_figures, shared_figures
from stillroom.report.history import RunRecord
from stillroom.report.words import cost, facts, headline, headline_of_several, story, verdict
from stillroom.telemetry.record import Event, evaluation_notes
from stillroom.telemetry.results import ANSWER_COLUMNS, figure_rows, next_commands
from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_count,
    format_duration,
    format_loss,
    format_percent,
    format_result,
    items,
    section,
    show,
    show_interval,
)

PAGE = "report.html"
REFRESH_SECONDS = 30

MAX_ADVICE = 20
MAX_ADVICE_STEPS = 8
MAX_GATES = 48
MAX_SAMPLE_CHARACTERS = 1600
MAX_EXAMPLE_CHARACTERS = 320  # of each text on the first screen
MAX_EXAMPLE_LINES = 5
MAX_DATA_NOTES = 40
MAX_EVALUATED_ROWS = 120
MAX_EVALUATED_NOTES = 12
MAX_DIFFERENCES = 60
MAX_SETTINGS = 80  # of several runs
MAX_SETTING_CHARACTERS = 300
MAX_CONFIG_CHARACTERS = 60_000
MAX_TOKEN_ROWS = 8
MAX_TOKENS = 128  # of a row
MAX_TOKEN_CHARACTERS = 40

Column = tuple[str, str, Callable[[float], str]]  # key, title, format

ROWS = (
    ("teacher", "teacher"),
    ("student_before", "student before training"),
    ("student", "student, distilled"),
    ("baseline", "plain training, equal tokens"),
    ("baseline_equal_compute", "plain training, equal compute"),
)
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
RUN_COLUMNS: tuple[Column, ...] = (
    ("steps", "steps", format_count),
    ("seconds", "time", format_duration),
    ("tokens", "tokens", format_count),
    ("success_rate", "steps kept", format_percent),
    ("skipped", "skipped", format_count),
)


# -- the document ----------------------------------------------------------------------------------------


def render(run: RunRecord, foot: str = "") -> str:
    """The report of one run, in the order in which a reader asks."""
    first, *rest = [one for one in (verdict(run), *headline(run)) if one] or ["This run has no result."]
    samples = [_sample(event) for event in run.history.samples]
    return _document(
        "run.html",
        run.name,
        all_figures(run),
        token_data(run),
        is_running=run.is_running,
        headline=first,
        lead=" ".join(rest),
        story=story(run),
        missing=run.missing,
        cost=cost(run),
        facts=facts(run),
        example=_example(run),
        next_commands=commands(run),
        results=results(run),
        closeness=closeness(run),
        evaluated=evaluated(run),
        checks=checks(run),
        advice=advice(run),
        token_view=token_view(run),
        router=router(run),
        guard=guard(run) if run.history.num_events else None,
        answers=answers(run),
        samples=samples,
        num_more_samples=run.history.num_samples_left_out,
        data=data(run),
        sources=sources(run),
        notes=notes(run),
        preset=preset(run),
        settings=settings(run),
        again=again(run),
        foot=foot,
    )


def render_several(runs: Sequence[RunRecord]) -> str:
    """Several runs on one page: curves overlaid, a table of results, and the settings in which they differ."""
    names = unique_names(runs)
    return _document(
        "several.html",
        f"{len(runs)} runs",
        shared_figures(runs, names),
        None,
        is_running=False,
        headline=headline_of_several(runs, names),
        results=_results_of_several(runs, names),
        differences=_differences_of_several(runs, names),
        missing=[f"{name}: {text}" for run, name in zip(runs, names, strict=True) for text in run.missing],
    )


def save(path: Path, page: str) -> Path:
    """Write a page so that a reader sees the old one or the new one, never a part."""
    try:
        write_atomically(path, page.encode("utf-8"))
    except OSError as error:
        raise CannotSave(
            f"the report cannot be written: {reason_of(error)}",
            where=str(path),
            advice=(f"free space on the disk, then: stillroom report {path.parent}",),
        ) from error
    return path


def _document(
    template: str,
    name: str,
    figures: Sequence[Figure],
    tokens: dict[str, Any] | None,
    *,
    is_running: bool,
    **values: Any,
) -> str:
    """A page. While a run is running, the browser loads it again every REFRESH_SECONDS."""
    drawn = [{"id": f"figure-{one.key}", "data": one.traces, "layout": one.layout} for one in figures]
    scripts = [_script("plotly-basic.min.js")] if figures else []
    scripts += [_script("page.js")] if figures or tokens else []
    page = _environment().get_template(template)
    return page.render(
        name=name,
        figures=figures,
        drawings={"figures": drawn, "dark": dark_partners()},
        tokens=tokens,
        scripts=scripts,
        style=_style(),
        is_running=is_running,
        refresh_seconds=REFRESH_SECONDS,
        **values,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stillroom.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["lines"] = lambda value: Markup.escape(clean(value, keep_lines=True))
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": True, "allow_nan": False, "separators": (",", ":")}
    return environment


def _printed(value: object) -> object:
    """What a template prints: one line without control characters, direction overrides and known keys."""
    if isinstance(value, Markup):
        return value
    return "" if value is None else clean(value)


@dataclass(frozen=True)
class Script:
    source: Markup
    digest: str  # sha256 in base64, as the content security policy names it


@cache
def _script(name: str) -> Script:
    source = _asset(name)
    return Script(Markup(source), base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii"))


@cache
def _style() -> Markup:
    roles = {**ROLES, **APART}
    light = "".join(f"--{role}:{colours[0]};" for role, colours in roles.items())
    dark = "".join(f"--{role}:{colours[1]};" for role, colours in roles.items())
    schemes = f":root{{{light}}}@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
    return Markup(schemes + _asset("page.css"))


def _asset(name: str) -> str:
    return files("stillroom.report").joinpath("assets", name).read_text(encoding="utf-8")


# -- the result ------------------------------------------------------------------------------------------


def results(run: RunRecord) -> dict[str, Any] | None:
    rows = [(key, name, dict(run.result(key))) for key, name in ROWS if run.result(key)]
    for key, _, row in rows:
        if key == "student":  # the run's totals are the student's
            row |= {name: run.summary.get(name) for name in ("steps", "seconds", "tokens") if row.get(name) is None}
    return _table_of_models(rows, COLUMNS)


def closeness(run: RunRecord) -> dict[str, Any] | None:
    """How close each model is to the teacher, token by token, and how well it is calibrated."""
    table = _table_of_models([(key, name, run.result(key)) for key, name in ROWS if run.result(key)], CLOSER_COLUMNS)
    if table is None:
        return None
    note = (
        "Acceptance rate: how often the teacher would take the student's token in speculative decoding. Calibration "
        "error: how far confidence and accuracy of the top token lie apart."
    )
    scored = as_number(run.result("student").get("documents"))
    held_out = as_number(section(run.start, "data").get("eval_documents"))
    if scored is not None and scored < MIN_DOCUMENTS:
        note += (
            f" There are no intervals: they need {MIN_DOCUMENTS} held-out documents (scored: {format_count(scored)})."
        )
    elif scored is not None:
        documents = f"{format_count(scored)} held-out documents"
        if held_out is not None and scored < held_out:
            documents = f"{format_count(scored)} of {format_count(held_out)} held-out documents, those that were scored"
        note += f" Small figures are 95 % intervals over {documents}, redrawn 1,000 times."
    return table | {"note": note}


def answers(run: RunRecord) -> dict[str, Any] | None:
    """What each model wrote to the held-out prompts of the evaluations; None where none were answered."""
    rows = [(key, name, section(run.result(key), "answers")) for key, name in ROWS]
    return _table_of_models([row for row in rows if row[2]], ANSWER_COLUMNS)


def _table_of_models(
    rows: Sequence[tuple[str, str, Mapping[str, Any]]], wanted: Sequence[Column]
) -> dict[str, Any] | None:
    """A table without the columns that are empty in all rows; None if no column is left."""
    columns = [column for column in wanted if any(show(row, column[0], column[2]) != "-" for _, _, row in rows)]
    if not columns:
        return None
    body = [
        (key, name, [(show(row, field, form), show_interval(row, field, form)) for field, _, form in columns])
        for key, name, row in rows
    ]
    return {"heads": [name for _, name, _ in columns], "rows": body}


def evaluated(run: RunRecord) -> dict[str, Any] | None:
    """Every figure of `stillroom eval`, with a warning if the student has changed since."""
    record = run.evaluated.record
    rows = figure_rows(record)
    if not rows:
        return None
    has_teacher = bool(section(record, "teacher"))
    body = []
    for row in rows[:MAX_EVALUATED_ROWS]:
        ours, theirs = ((side.value, side.interval) for side in (row.student, row.teacher))
        cells = [theirs, ours, (row.retained or "-", "")] if has_teacher else [ours]
        body.append((None, clip(row.label, 80), cells))
    said = evaluation_notes(record)
    shown = [clip(note, 400) for note in said[:MAX_EVALUATED_NOTES]]
    more_notes = len(said) - MAX_EVALUATED_NOTES
    return {
        "doubt": run.evaluated.doubt,
        "table": {"heads": ["teacher", "student", "retained"] if has_teacher else ["student"], "rows": body},
        "num_more": max(0, len(rows) - MAX_EVALUATED_ROWS),
        "about": _about_evaluation(record),
        "notes": [*shown, *([f"{more_notes} more notes are in eval.json"] if more_notes > 0 else [])],
    }


def _about_evaluation(record: Mapping[str, Any]) -> str:
    """On which text, when and where it was measured, and with which options."""
    parts = [f"On {clip(record.get('data'), 120)}" if record.get("data") else "", _when(record)]
    device, machine = record.get("device"), section(record, "machine")
    if device:
        cores = f", {clean(machine['cores'])} cores" if machine.get("cores") else ""
        parts.append(f"device {clip(device, 40)}{cores}")
    options = section(record, "settings")
    parts += [f"{clean(key)} {clip(value, 80)}" for key, value in options.items() if value not in (None, "", False)]
    return ", ".join(part for part in parts if part) + "."


def _when(record: Mapping[str, Any]) -> str:
    try:
        return f"{datetime.fromisoformat(str(record.get('time'))).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return ""


def checks(run: RunRecord) -> list[dict[str, Any]]:
    found = [check for check in items(run.summary, "checks") if isinstance(check, Mapping)]
    return [
        {
            "word": "passed" if check.get("passed") is True else "failed",
            "name": check.get("name"),
            "text": check.get("text"),
        }
        for check in found
    ]


def advice(run: RunRecord) -> list[dict[str, str]]:
    """What could be better. An entry of the summary is a sentence, or {cause, steps, evidence, advice}."""
    found = []
    for value in items(run.summary, "advice")[:MAX_ADVICE]:
        if isinstance(value, str):
            entry = {"cause": "", "advice": value.strip(), "steps": "", "evidence": ""}
        elif isinstance(value, Mapping):
            numbers = [as_number(step) for step in items(value, "steps")[:MAX_ADVICE_STEPS] if type(step) is int]
            steps = [format_count(number) for number in numbers if number is not None]
            more = ", ..." if len(items(value, "steps")) > MAX_ADVICE_STEPS else ""
            entry = {
                "cause": clean(value.get("cause") or "").replace("_", " "),
                "advice": clean(value.get("advice") or ""),
                "steps": f"Steps {', '.join(steps)}{more}." if steps else "",
                "evidence": clip(value.get("evidence") or "", 400),
            }
        else:
            continue
        if any(entry.values()):
            found.append(entry)
    left_out = len(items(run.summary, "advice")) - MAX_ADVICE
    if left_out > 0:
        found.append({"cause": "", "advice": "", "steps": "", "evidence": f"{left_out} more are in summary.json."})
    return found


# -- what happened ---------------------------------------------------------------------------------------


def router(run: RunRecord) -> dict[str, Any] | None:
    """The probe's result and a row for each gate of the teacher; None if the run recorded no gates."""
    if not run.history.routers:
        return None
    last = run.history.last_router
    layers = [layer for layer in items(last, "layers") if isinstance(layer, Mapping)]
    state = "frozen" if last.get("is_frozen") else "in use"
    sentences = [
        f"Mode {clean(last.get('mode'))}, {show(last, 'updates', format_count)} updates, "
        f"{show(last, 'skipped', format_count)} skipped, {show(last, 'mended', format_count)} mended; gates {state}."
    ]
    for event in run.history.of_kind("router_probe")[-1:]:
        answer = "worthwhile" if event.get("is_worthwhile") else "pointless"
        sentences.append(
            f"The probe found router training {answer}: {show(event, 'updates', format_count)} updates on the labels "
            f"moved the teacher's held-out loss from {show(event, 'nll_before', format_loss)} to "
            f"{show(event, 'nll_after', format_loss)}."
        )
    if len(layers) > MAX_GATES:
        sentences.append(f"{len(layers) - MAX_GATES} more gates are in events.jsonl.")
    heads = ["gate", "entropy, nats", "drift", "most used expert", "least used expert"]
    rows = []
    for layer in layers[:MAX_GATES]:
        usage = [value for value in map(as_number, items(layer, "usage")) if value is not None]
        most, least = (format_percent(pick(usage)) if usage else "-" for pick in (max, min))
        cells = [show(layer, "entropy", format_loss), show(layer, "drift", format_loss), most, least]
        rows.append((clean(layer.get("name")), cells))
    return {"text": " ".join(sentences), "heads": heads, "rows": rows}


def guard(run: RunRecord) -> dict[str, Any]:
    """What the guard did: the counts of its actions, and the first and last events."""
    shown, num_guards = run.history.guards, run.history.num_guards
    actions = ", ".join(f"{clean(action)} {count}" for action, count in run.history.guard_counts.most_common(12))
    left_out = num_guards - len(shown)
    text = f"{num_guards} events: {actions}."
    text += f" {left_out} from the middle are left out here; events.jsonl has them." if left_out else ""
    return {"num_events": num_guards, "text": text, "rows": [_guard_row(event) for event in shown]}


def _guard_row(event: Event) -> dict[str, str]:
    recorded, named = flat(_with_words(section(event, "evidence"))), items(event, "sample_ids")
    return {
        "step": show(event, "step", format_count),
        "action": clean(event.get("action")),
        "reason": event.get("reason") or "",
        "samples": ", ".join([*(clip(name, 32) for name in named[:4]), *(["..."] if len(named) > 4 else [])]),
        "evidence": clip(", ".join(f"{clean(name)} {shown_setting(value)}" for name, value in recorded), 160),
    }


def _with_words(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """The evidence with `nan` or `inf` in place of null and its sibling key."""
    siblings = {key for key in evidence if key.endswith("_nonfinite")}
    return {key: evidence.get(f"{key}_nonfinite", value) for key, value in evidence.items() if key not in siblings}


def _sample(event: Event) -> dict[str, Any]:
    voices = [voice for voice in ("teacher", "student", "reference") if isinstance(event.get(voice), str)]
    prompt = event.get("prompt")
    return {
        "prompt": _quote(prompt if isinstance(prompt, str) else ""),
        "voices": [(voice, _quote(event[voice]), _mark(event, voice)) for voice in voices],
    }


def _mark(event: Event, voice: str) -> str:
    """Whether an answer is right, where it was checked."""
    is_right = event.get({"student": "right", "teacher": "teacher_right"}.get(voice, ""))
    return {True: ", right", False: ", wrong"}.get(is_right, "") if isinstance(is_right, bool) else ""


def _quote(text: str) -> dict[str, str]:
    return _cut(text, MAX_SAMPLE_CHARACTERS)


def _cut(text: str, limit: int) -> dict[str, str]:
    more = len(text) - limit
    return {"text": text[:limit], "more": format_count(more) if more > 0 else ""}


def _short(text: str) -> dict[str, str]:
    """The first lines of a text, without blank ones at its start."""
    text = clean(text, keep_lines=True).strip()
    lines = text.split("\n")[:MAX_EXAMPLE_LINES]
    return _cut(text, min(MAX_EXAMPLE_CHARACTERS, len("\n".join(lines))))


def _example(run: RunRecord) -> dict[str, Any] | None:
    """The first sample with both models' answers, short enough for the first screen."""
    for event in run.history.samples:
        voices = [voice for voice in ("teacher", "student") if isinstance(event.get(voice), str)]
        if isinstance(event.get("prompt"), str) and "student" in voices:
            return {"prompt": _short(event["prompt"]), "voices": [(voice, _short(event[voice])) for voice in voices]}
    return None


def commands(run: RunRecord) -> list[tuple[str, str]]:
    """(what for, command) of what to do next."""
    if not run.folder:
        return []
    folder = shlex.quote(clean(run.folder))
    if run.is_running:
        return [("follow it", f"stillroom watch {folder}")]
    if run.summary.get("status") == "diverged":
        return [("find the cause", f"stillroom diagnose {folder}")]
    if not run.is_finished:
        return [("continue it", f"stillroom resume {folder}"), ("find the cause", f"stillroom diagnose {folder}")]
    prompts = [clean(event.get("prompt")) for event in run.history.samples[:1]]
    return next_commands(run.folder, *prompts)


def notes(run: RunRecord) -> list[str]:
    found = [*run.history.notes]
    if run.history.num_notes_left_out:
        found.append(f"{format_count(run.history.num_notes_left_out)} more notes are in events.jsonl")
    precision = section(run.start, "precision")
    if precision.get("reason"):
        found.insert(0, f"precision {clean(precision.get('mode'))}: {clean(precision['reason'])}")
    return list(dict.fromkeys(map(clean, found)))


# -- token by token --------------------------------------------------------------------------------------

BOUNDS = (0.05, 0.15, 0.3, 0.5, 0.7)  # distances at which the colour of a token changes
_SPACE, _LINE, _NOTHING = "\u00b7", "\u21b5", "\u25ab"  # how white space and a token without text are shown


def token_view(run: RunRecord) -> dict[str, Any] | None:
    """Teacher against student on held-out text: each token coloured by how far the two differ before it.

    The tokens of a row are one stop of the tab key, and arrow keys move among them; the script shows both models' top
    five tokens for the one that is focused or pointed at.
    """
    rows = list(_token_rows(run))
    if not rows:
        note = run.tokens.get("note")
        return {"text": f"Not shown: {clean(note)}.", "rows": []} if note else None
    distances = [distance for row in rows for token in row["tokens"] if (distance := _distance(token)) is not None]
    if not distances:
        return None
    text = (
        f"On {format_count(len(distances))} held-out tokens, student and teacher place "
        f"{format_percent(sum(distances) / len(distances), 0)} of their probability on different tokens on average. "
        f"Compared over {clean(run.tokens.get('compared', 'the stored tokens'))}. Underlined: their top tokens "
        "differ. Point at a token, or tab to a row and use the arrow keys."
    )
    shown = []
    for row in rows:
        left_out = as_number(row.get("left_out"))
        more = f" ... {format_count(left_out)} more tokens" if left_out else ""
        shown.append(
            {"name": clip(row.get("id"), 60), "tokens": [_token(token) for token in row["tokens"]], "more": more}
        )
    return {"text": text, "bounds": [f"{bound:g}" for bound in (0, *BOUNDS)], "rows": shown}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    """One token with its white space; a line break is also seen, and a token without text has a place."""
    text = clean(token.get("text"), keep_lines=True)[:MAX_TOKEN_CHARACTERS].replace("\n", f"{_LINE}\n") or _NOTHING
    distance = _distance(token)
    teacher, student = (_pairs(token, side) for side in ("teacher", "student"))
    return {
        "text": text,
        "apart": None if distance is None else sum(distance >= bound for bound in BOUNDS),
        "differs": bool(teacher and student) and teacher[0][0] != student[0][0],
    }


def token_data(run: RunRecord) -> dict[str, Any] | None:
    """What the script shows of each token: [distance, p of the teacher, p of the student, its top 5, theirs]."""
    rows = [[_numbers(token) for token in row["tokens"]] for row in _token_rows(run)]
    if not any(token for row in rows for token in row):
        return None
    used = {str(id_) for row in rows for token in row if token for id_, _ in [*token[3], *token[4]]}
    texts = {id_: visible(value) for id_, value in section(run.tokens, "texts").items() if id_ in used}
    return {"rows": rows, "texts": texts}


def _token_rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    for row in items(run.tokens, "rows")[:MAX_TOKEN_ROWS]:
        if isinstance(row, Mapping):
            tokens = [token for token in items(row, "tokens") if isinstance(token, Mapping)]
            yield {**row, "tokens": tokens[:MAX_TOKENS]}


def _numbers(token: Mapping[str, Any]) -> list[Any] | None:
    distance = _distance(token)
    if distance is None:
        return None
    chances = [as_number(token.get(f"{side}_probability")) for side in ("teacher", "student")]
    return [distance, *chances, *(_pairs(token, side) for side in ("teacher", "student"))]


def _pairs(token: Mapping[str, Any], side: str) -> list[list[float]]:
    pairs = [pair for pair in items(token, side)[:5] if isinstance(pair, list) and len(pair) == 2]
    return [[int(id_), chance] for id_, chance in pairs if isinstance(id_, int) and as_number(chance) is not None]


def _distance(token: Mapping[str, Any]) -> float | None:
    distance = as_number(token.get("distance"))
    return distance if distance is not None and 0.0 <= distance <= 1.0 else None


def visible(value: object) -> str:
    """One line in which leading and trailing spaces, line breaks and emptiness can be seen."""
    shown = clean(value, keep_lines=True).replace("\n", _LINE)[:MAX_TOKEN_CHARACTERS]
    start, end = len(shown) - len(shown.lstrip(" ")), len(shown.rstrip(" "))
    if not shown.strip(" "):
        return _SPACE * len(shown) or _NOTHING
    return _SPACE * start + shown[start:end] + _SPACE * (len(shown) - end)


# -- the data --------------------------------------------------------------------------------------------

_SIDES = (("train", "transfer set"), ("eval", "held out"))
_UNITS = ("documents", "tokens", "targets")
_LEFT_OUT = {
    "bad_records": "records that could not be read",
    "invalid_utf8": "texts with half a character, replaced by U+FFFD",
    "truncated_records": "records cut at data.max_length",
    "truncated_tokens": "tokens cut off",
    "truncated_targets": "scored tokens cut off",
    "rows_without_targets": "rows without a token to score",
    "overlapping_records": "records that are in both sets",
    "empty_answers": "empty answers",
    "documents_without_tokens": "documents without tokens",
}


def data(run: RunRecord) -> dict[str, Any] | None:
    """How much data, in what shape and length, and what was left out."""
    found = section(run.start, "data")
    if not found:
        return None
    counts = [(key, as_number(value)) for key, value in found.items() if key in _LEFT_OUT]
    left_out = [f"{format_count(value)} {_LEFT_OUT[key]}" for key, value in counts if value]
    said = items(found, "notes")
    left_out += [clean(note) for note in said[:MAX_DATA_NOTES]]
    if len(said) > MAX_DATA_NOTES:
        left_out.append(f"{len(said) - MAX_DATA_NOTES} more notes are in events.jsonl")
    return {
        "heads": ["", *_UNITS, "tokens a document"],
        "rows": _data_sizes(found),
        "sentences": _data_sentences(found, section(run.config, "data")),
        "left_out": left_out,
    }


def _data_sizes(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    rows = []
    for side, name in _SIDES:
        documents, tokens, targets = (as_number(found.get(f"{side}_{unit}")) for unit in _UNITS)
        if tokens is not None:
            cells = [documents, tokens, targets, tokens / documents if documents else None]
            rows.append((name, ["-" if value is None else format_count(value) for value in cells]))
    return rows


def _data_sentences(found: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    sentences, parts = [], []
    for side, name in _SIDES:
        lengths = section(section(found, "lengths"), side)
        named = [(clean(key).replace("_", " "), as_number(value)) for key, value in lengths.items()]
        values = [f"{key} {format_count(value)}" for key, value in named if value is not None]
        parts += [f"{name}: {', '.join(values)}"] if values else []
    if parts:
        sentences.append(f"Tokens in a row, {'; '.join(parts)}.")
    shapes = {clean(name): as_number(count) for name, count in section(found, "shapes").items()}
    if shapes:
        listed = ", ".join(f"{name} {format_count(count)}" for name, count in shapes.items() if count is not None)
        sentences.append(f"Shapes of the records: {listed}.")
    length = as_number(configured.get("max_length"))
    if length is not None:
        sentences.append(f"Rows of at most {format_count(length)} tokens, packing {clean(configured.get('packing'))}.")
    return sentences


_LATE = 20  # the last of so many parts of the steps


def sources(run: RunRecord) -> dict[str, Any] | None:
    """How often each source was seen, and its terms at the end; None where the training data is one source."""
    told = [source for source in items(run.summary, "sources") if isinstance(source, Mapping)]
    if not told:
        return None
    ends = {str(source.get("name")): _last_terms(run, str(source.get("name"))) for source in told}
    terms = list(dict.fromkeys(term for means in ends.values() for term in means))
    rows = []
    for source in told:
        means = ends[str(source.get("name"))]
        cells = [
            "labels" if source.get("objectives") == "labels" else "teacher and labels",
            show(source, "weight", "{:g}".format),
            show(source, "rows", format_count),
            show(source, "epochs", "{:.2f}".format),
            *(format_loss(means[term]) if term in means else "-" for term in terms),
        ]
        rows.append((clean(source.get("name")), cells))
    return {"heads": ["source", "learned from", "weight", "rows", "epochs", *terms], "rows": rows}


def _last_terms(run: RunRecord, name: str) -> dict[str, float]:
    """The mean of each term over the targets of the last steps."""
    late = run.steps.first_of_last(_LATE)
    targets = dict(zip(*(part.tolist() for part in run.steps.curve("source", name, "targets")), strict=True))
    found = {}
    for term in run.steps.source_terms(name):
        points = zip(*(part.tolist() for part in run.steps.curve("source", name, term)), strict=True)
        weighted = [(value, targets.get(step, 0.0)) for step, value in points if step >= late and term != "targets"]
        total = sum(weight for _, weight in weighted)
        if total:
            found[term] = sum(value * weight for value, weight in weighted) / total
    return found


# -- the configuration -----------------------------------------------------------------------------------


def preset(run: RunRecord) -> dict[str, Any] | None:
    """The settings in which the run differs from the preset that is nearest to it."""
    name, differing = nearest_preset(run.config) if run.config else (None, [])
    if name is None:
        return None
    if not differing:
        return {"text": f"The configuration is that of the preset {name}.", "rows": []}
    text = f"The nearest preset is {name}; {len(differing)} settings differ from it."
    if len(differing) > MAX_DIFFERENCES:
        text += f" The first {MAX_DIFFERENCES} are listed."
    rows = [(key, [shown_setting(there), shown_setting(here)]) for key, there, here in differing[:MAX_DIFFERENCES]]
    return {"text": text, "heads": ["setting", f"preset {name}", "this run"], "rows": rows}


def nearest_preset(config: Mapping[str, Any]) -> tuple[str | None, list[tuple[str, Any, Any]]]:
    """(the preset with the fewest differing settings, (key, its value, ours) of each). None: no preset can be read."""
    best: tuple[str | None, list[tuple[str, Any, Any]]] = (None, [])
    ours = dict(flat(config))
    for name in preset_names():
        try:
            theirs = dict(flat(build(read_preset(name), name).to_dict()))
        except StillroomError:  # a preset of an objective that is not installed here
            continue
        keys = [key for key in ours if theirs.get(key) != ours[key]]  # one that the run did not know is no difference
        if best[0] is None or len(keys) < len(best[1]):
            best = name, [(key, theirs.get(key), ours.get(key)) for key in keys]
    return best


def settings(run: RunRecord) -> list[tuple[str, list[tuple[str | None, list[tuple[str, str]]]]]]:
    """(title, groups) of configuration, versions, machine and models; a group is (name or None, (key, value) pairs)."""
    parts = [
        ("Configuration", run.config),
        ("Versions", section(run.start, "versions")),
        ("Machine", section(run.start, "machine")),
        ("Models", {name: run.start[name] for name in ("teacher", "student") if section(run.start, name)}),
    ]
    return [(title, list(_groups(values))) for title, values in parts if values]


def _groups(values: Mapping[str, Any]) -> Iterator[tuple[str | None, list[tuple[str, str]]]]:
    """A group for each section, after one for the values outside any section."""
    loose = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if loose:
        yield None, [(key, shown_setting(value)) for key, value in flat(loose)]
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield key, [(name, shown_setting(inner)) for name, inner in flat(value)]


def again(run: RunRecord) -> dict[str, str] | None:
    """Commands that run the same configuration again."""
    if not run.config or not run.start:
        return None
    versions = section(run.start, "versions")
    wanted = [name for name in ("torch", "transformers") if versions.get(name)]  # stillroom is on no index
    named = " ".join(f"{name}=={clean(versions[name]).split('+')[0]}" for name in wanted)
    made_with = [f"{name.title()} {clean(versions[name])}, " for name in ("python", "stillroom") if versions.get(name)]
    commands = [
        *([f"pip install {named}"] if named else []),
        """python -c "import json; print(json.dumps(json.load(open('config.json'))['config']))" > again.json""",
        "stillroom distill again.json --out runs/again",
        "stillroom report . runs/again",
    ]
    machine = ", ".join(f"{clean(key)} {clip(value, 60)}" for key, value in section(run.start, "machine").items())
    text = f"In the run's folder, with {''.join(made_with)}and the models and data where the configuration names them."
    if machine:
        text += f" The run was made on: {machine}. Other devices and versions round differently."
    whole = json.dumps(run.config, indent=1, ensure_ascii=True, default=str)
    if len(whole) > MAX_CONFIG_CHARACTERS:
        whole = f"{whole[:MAX_CONFIG_CHARACTERS]}\n... the rest is in config.json"
    return {"text": text, "commands": "\n".join(commands), "config": whole}


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested sections."""
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def shown_setting(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return clip(text, MAX_SETTING_CHARACTERS)


# -- several runs ----------------------------------------------------------------------------------------


def unique_names(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names, numbered where two have the same."""
    names = [clip(run.name, 40) for run in runs]
    counts = {name: names.count(name) for name in names}
    return [f"{name} ({place + 1})" if counts[name] > 1 else name for place, name in enumerate(names)]


def _results_of_several(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    columns = COLUMNS[:5]
    rows = []
    for run, name in zip(runs, names, strict=True):
        status = clean(run.summary.get("status") or run.end.get("status") or "unfinished")
        totals: dict[str, Any] = {"steps": run.steps.last, **run.summary}
        cells = [show(run.result("student"), key, form) for key, _, form in columns]
        cells += [show(totals, key, form) for key, _, form in RUN_COLUMNS]
        rows.append((name, [status, *cells]))
    return {"heads": ["", "status", *(title for _, title, _ in (*columns, *RUN_COLUMNS))], "rows": rows}


def _differences_of_several(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    tables = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    differing = [key for key in keys if len({shown_setting(table.get(key)) for table in tables}) > 1]
    rows = [(key, [clip(shown_setting(table.get(key)), 80) for table in tables]) for key in differing[:MAX_SETTINGS]]
    return {"heads": ["setting", *names], "rows": rows, "num_more": max(0, len(differing) - MAX_SETTINGS)}
