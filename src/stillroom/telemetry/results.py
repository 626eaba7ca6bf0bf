"""The lines a command prints at its end: the table of a run, the yardsticks of a model, a quarantined batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stillroom.telemetry.figure_rows import figure_rows
from stillroom.telemetry.record import Fields, Format, items, reading, section, show, show_interval
from stillroom.telemetry.wording import (
    as_number,
    clean,
    clip,
    format_count,
    format_loss,
    format_norm,
    format_percent,
    format_result,
)
from stillroom.yardsticks import MIN_DOCUMENTS

# The rows of the table: key in summary.json, label on the screen.
RESULT_ROWS = (
    ("teacher", "teacher"),
    ("student_before", "student before"),
    ("student", "student"),
    ("baseline", "plain, equal tokens"),
    ("baseline_equal_compute", "plain, equal compute"),
)
RESULT_COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL", format_result),
    ("agreement", "agreement", format_percent),
    ("parameters", "parameters", format_count),
)


# -- a run ---------------------------------------------------------------------------------------------


def summary_lines(summary: Fields, report: object = None) -> list[str]:
    """The result as a table, the checks, and the path of the report."""
    rows = [(label, section(summary, key)) for key, label in RESULT_ROWS if section(summary, key)]
    lines: list[str] = []
    if rows:
        lines.append(f"{'':<20}" + "".join(f"  {label:>10}" for _, label, _ in RESULT_COLUMNS))
        lines += [
            f"{label:<20}" + "".join(f"  {show(row, key, form):>10}" for key, _, form in RESULT_COLUMNS)
            for label, row in rows
        ]
    lines += _interval_line(section(summary, "student"))
    lines += [clean(sentence) for sentence in items(summary, "story")]
    for check in items(summary, "checks"):
        if isinstance(check, Mapping):
            word = "passed" if check.get("passed") else "failed"
            detail = f": {clean(check['text'])}" if check.get("text") else ""
            lines.append(f"check {word}  {clean(check.get('name'))}{detail}")
    if report is not None:
        lines.append(f"report  {clean(report)}")
    return lines


def _interval_line(student: Fields) -> list[str]:
    """The intervals of the student's numbers, in one line of at most 80 characters."""
    ranges = [
        f"{label} {show_interval(student, key, form)}"
        for key, label, form in (("perplexity", "perplexity", format_result), ("kl", "KL", format_result))
        if show_interval(student, key, form)
    ]
    if not ranges:
        return no_interval_lines(student)
    return [f"95 % interval over {show(student, 'documents', format_count)} documents: student's {', '.join(ranges)}"]


def no_interval_lines(row: Fields) -> list[str]:
    """A line that explains a missing interval, if the documents are too few for one."""
    documents = as_number(row.get("documents"))
    if documents is None or documents >= MIN_DOCUMENTS:
        return []
    return [f"no 95 % interval: it takes {MIN_DOCUMENTS} held-out documents (scored: {format_count(documents)})"]


# -- a model on its own ----------------------------------------------------------------------------------

_MAX_LABEL = 40


def assessment_lines(result: Fields) -> list[str]:
    """The figures of a model, one a line, beside those of its teacher."""
    voices = [(name, section(result, name)) for name in ("student", "teacher") if section(result, name)]
    lines = [f"{key:<6}  {clean(result[key])}" for key in ("model", "data", "device") if result.get(key)]
    lines += _figure_table(result, [name for name, _ in voices])
    if reading(result, "retention") is not None:
        lines.append(
            f"retention  {show(result, 'retention', format_percent)} (teacher's perplexity over the student's)"
        )
    memory = " and ".join(
        f"{show(result, key, format_result)} GB {where}"
        for key, where in (("memory_gb", "of the process"), ("gpu_memory_gb", "on the GPU"))
        if as_number(result.get(key))
    )
    lines += [f"memory  {memory}"] if memory else []
    lines += no_interval_lines(voices[0][1]) if voices and not section(voices[0][1], "intervals") else []
    lines += [f"note  {name}: {clean(text)}" for name, row in voices for text in row.get("notes") or ()]
    return [*lines, *(f"note  {clean(note)}" for note in items(result, "notes"))]


def _figure_table(result: Fields, names: Sequence[str]) -> list[str]:
    """A line for each figure: both models, each with its interval where there are any, and what is retained."""
    rows = figure_rows(result)
    has_intervals = any(row.student.interval or row.teacher.interval for row in rows)
    labels = [clip(row.label, _MAX_LABEL) for row in rows]
    width = max([18, *map(len, labels)])

    def line(label: str, values: Sequence[str], bounds: Sequence[str], share: str) -> str:
        cells = (
            f"  {value:>12}" + (f"  {bound:<15}" if has_intervals else "")
            for value, bound in zip(values, bounds, strict=True)
        )
        return f"{label:<{width}}{''.join(cells)}{share:>10}".rstrip()

    lines = []
    if len(names) > 1 or has_intervals:
        head = "retained" if any(row.retained for row in rows) else ""
        lines.append(line("", names, ["95 % interval"] * len(names), head))
    for label, row in zip(labels, rows, strict=True):
        sides = [row.student if name == "student" else row.teacher for name in names]
        lines.append(line(label, [side.value for side in sides], [side.interval for side in sides], row.retained))
    return lines


# -- a quarantined batch ---------------------------------------------------------------------------------

_SHOWN_TEXTS = 4
_SHOWN_CHARACTERS = 160


def replay_lines(result: Fields) -> list[str]:
    """What a quarantined batch did in the run and does now."""
    then, now = section(result, "then"), section(result, "now")
    lines = [
        f"step {result.get('step')}, scored again with the checkpoint of step {result.get('checkpoint')}",
        f"then  {clean(then.get('verdict'))}: {clean(then.get('reason'))}",
        f"      loss {show(then, 'loss', format_loss)}  grad {show(then, 'grad_norm', format_norm)}",
    ]
    if then.get("located"):
        lines.append(f"      {clean(then['located'])}")
    lines.append(f"now   loss {show(now, 'loss', format_loss)}  grad {show(now, 'grad_norm', format_norm)}")
    lines.append(f"      {clean(now['located'])}" if now.get("located") else "      finite throughout")
    for name, text in list(zip(items(result, "samples"), items(result, "text"), strict=False))[:_SHOWN_TEXTS]:
        lines.append(f"sample {clean(name)}: {clip(text, _SHOWN_CHARACTERS)}")
    return lines
