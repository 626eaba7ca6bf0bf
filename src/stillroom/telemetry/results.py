"""The lines a command prints at its end: the table of a run, the yardsticks of a model, a quarantined batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stillroom.telemetry.reading import Fields, Format, items, reading, section, show, show_interval
from stillroom.telemetry.retention import show_retained
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

ASSESSMENT_ROWS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL to teacher", format_result),
    ("kl_per_byte", "KL, bits/byte", format_result),
    ("agreement", "agreement", format_percent),
    ("top5_agreement", "teacher's in top 5", format_percent),
    ("top5_overlap", "top-5 overlap", format_percent),
    ("acceptance", "acceptance", format_percent),
    ("calibration_error", "calibration error", format_percent),
    ("parameters", "parameters", format_count),
    ("weight_megabytes", "weights, MB", format_result),
    ("disk_megabytes", "on disk, MB", format_result),
    ("load_seconds", "load, s", format_result),
    ("tokens_per_second", "tokens/s", format_count),
    ("prefill_tokens_per_second", "reading, tokens/s", format_count),
    ("decode_tokens_per_second", "writing, tokens/s", format_result),
    ("peak_memory_gb", "peak memory, GB", format_result),
    ("questions", "questions", format_count),
    ("choice_accuracy", "choices right", format_percent),
    ("choice_accuracy_by_byte", "choices, by byte", format_percent),
    ("exact_match", "exact match", format_percent),
    ("answer_perplexity", "answer perplexity", format_result),
    ("too_long", "questions too long", format_count),
    ("documents", "documents", format_count),
    ("tokens", "tokens scored", format_count),
    ("unscored_tokens", "tokens not scored", format_count),
)


def assessment_lines(result: Fields) -> list[str]:
    """The yardsticks of a model, one a line, beside those of its teacher."""
    voices = [(name, flat_scores(section(result, name))) for name in ("student", "teacher") if section(result, name)]
    kept = section(result, "retained")
    lines = [f"{key:<6}  {clean(result[key])}" for key in ("model", "data", "device") if result.get(key)]
    has_intervals = any(section(row, "intervals") for _, row in voices)

    def line(label: str, values: Sequence[str], bounds: Sequence[str], share: str = "") -> str:
        cells = (
            f"  {value:>12}" + (f"  {bound:<15}" if has_intervals else "")
            for value, bound in zip(values, bounds, strict=True)
        )
        return f"{label:<18}{''.join(cells)}{share:>10}".rstrip()

    if len(voices) > 1 or has_intervals:
        lines.append(
            line("", [name for name, _ in voices], ["95 % interval"] * len(voices), "retained" if kept else "")
        )
    for key, label, form in ASSESSMENT_ROWS:
        values = [show(row, key, form) for _, row in voices]
        bounds = [show_interval(row, key, form) for _, row in voices]
        if any(value != "-" for value in values):
            lines.append(line(label, values, bounds, show_retained(kept, key)))
    if reading(result, "retention") is not None:
        lines.append(
            f"retention  {show(result, 'retention', format_percent)} (teacher's perplexity over the student's)"
        )
    lines += _task_lines(voices)
    memory = " and ".join(
        f"{show(result, key, format_result)} GB {where}"
        for key, where in (("memory_gb", "of the process"), ("gpu_memory_gb", "on the GPU"))
        if as_number(result.get(key))
    )
    lines += [f"memory  {memory}"] if memory else []
    lines += no_interval_lines(voices[0][1]) if voices and not has_intervals else []
    lines += [f"note  {name}: {clean(text)}" for name, row in voices for text in row.get("notes") or ()]
    return [*lines, *(f"note  {clean(note)}" for note in items(result, "notes"))]


def flat_scores(row: Fields) -> Fields:
    """A model's figures with those of its questions beside them."""
    asked = section(row, "questions")
    return {**row, **asked, "intervals": {**section(row, "intervals"), **section(asked, "intervals")}}


def _task_lines(voices: Sequence[tuple[str, Fields]]) -> list[str]:
    """Each figure of each benchmark, one a line."""
    return [
        f"{name}  {clean(task)}  {clean(figure)} {show(section(section(row, 'tasks'), task), figure, format_result)}"
        for name, row in voices
        for task in section(row, "tasks")
        for figure in section(section(row, "tasks"), task)
    ]


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
