"""The lines a command prints at its end: the table of a run, the figures of a model, a quarantined batch.

The figures of `stillroom eval` as rows are here for the page and the model card too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.metrics.metrics import MIN_DOCUMENTS
from stillroom.telemetry.record import read_object
from stillroom.telemetry.wording import (
    Fields,
    Format,
    as_number,
    clean,
    clip,
    format_count,
    format_loss,
    format_norm,
    format_percent,
    format_result,
    items,
    reading,
    section,
    show,
    show_interval,
)

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

# Of prompts answered in a run's evaluations, `answers` of a row of the summary.
ANSWER_COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("prompts", "prompts", format_count),
    ("exact_match", "exactly right", format_percent),
    ("checker", "right by checker", format_percent),
    ("ended", "ended", format_percent),
    ("loops", "loops", format_percent),
    ("length", "mean tokens", format_result),
    ("teacher_log_likelihood", "teacher's log-likelihood", format_result),
    ("own_kl", "KL on own text", format_result),
)


def answer_rows(summary: Fields) -> list[tuple[str, Fields]]:
    """(label, figures) of each model that answered the prompts."""
    rows = [(label, section(section(summary, key), "answers")) for key, label in RESULT_ROWS]
    return [(label, figures) for label, figures in rows if figures]


# -- a run ---------------------------------------------------------------------------------------------


def summary_lines(summary: Fields, report: object = None, *, verbose: bool = False) -> list[str]:
    """The result as a table, the checks, and the path of the report. Checks that passed are counted, or listed."""
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
    checks = [check for check in items(summary, "checks") if isinstance(check, Mapping)]
    for check in checks:
        word = "passed" if check.get("passed") else "failed"
        detail = f": {clean(check['text'])}" if check.get("text") else ""
        if verbose or word == "failed":
            lines.append(f"check {word}  {clean(check.get('name'))}{detail}")
    if checks:
        lines.append(f"checks passed  {sum(bool(check.get('passed')) for check in checks)} of {len(checks)}")
    if report is not None:
        lines.append(f"report  {clean(report)}")
    return lines


_PROMPT_WIDTH = 24


def next_commands(folder: object, prompt: str = "") -> list[tuple[str, str]]:
    """(what for, command) of what to do with a finished run: try the student, then measure it, then export it.

    A student with a chat template is talked to; another one continues the beginning of `prompt`, a held-out text.
    """
    name = shlex.quote(clean(folder))
    start = next((line.strip() for line in prompt.splitlines() if line.strip()), "") or "The"
    start = start if len(start) <= _PROMPT_WIDTH else start[:_PROMPT_WIDTH].rsplit(" ", 1)[0]
    is_chat = _has_chat_template(Path(str(folder)) / "student")
    talk = f"stillroom chat {name}" if is_chat else f"stillroom generate {name} --prompt {shlex.quote(start)}"
    return [
        ("try it", talk),
        ("measure it", f"stillroom eval {name}"),
        ("use it elsewhere", f"stillroom export {name} --out student"),
    ]


def next_lines(folder: object, prompt: str = "") -> list[str]:
    return [f"{label:<18}{command}" for label, command in next_commands(folder, prompt)]


def _has_chat_template(student: Path) -> bool:
    if (student / "chat_template.jinja").exists():
        return True
    return "chat_template" in read_object(student / "tokenizer_config.json", [])


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
    return [f"no 95 % interval: it needs {MIN_DOCUMENTS} held-out documents (scored: {format_count(documents)})"]


# -- what a student retains of its teacher's figures -----------------------------------------------------

# Quality: the share that is retained, 1 for a student as good as its teacher.
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "answer_perplexity")
_HIGHER_IS_BETTER = ("choice_accuracy", "choice_accuracy_by_byte", "exact_match")
QUALITY = (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER)
# Cost: how many times the teacher's.
_COSTS = (
    "parameters", "weight_megabytes", "disk_megabytes", "load_seconds", "tokens_per_second",
    "prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_gb",
)  # fmt: skip


def retained(student: Fields, teacher: Fields) -> dict[str, float]:
    """For quality the share of the teacher's that is retained, for cost how many times the teacher's it is.

    Figures that one of both lacks are left out.
    """
    ours, theirs = ({**row, **(row.get("questions") or {})} for row in (student, teacher))
    shares = {}
    for name in (*QUALITY, *_COSTS):
        top, bottom = as_number(ours.get(name)), as_number(theirs.get(name))
        if name in _LOWER_IS_BETTER:
            top, bottom = bottom, top
        if top is not None and bottom:
            shares[name] = top / bottom
    return shares | _of_tasks(section(student, "tasks"), section(teacher, "tasks"))


def _of_tasks(ours: Fields, theirs: Fields) -> dict[str, float]:
    """Of each benchmark's figures of which it is known whether higher is better, as `task/figure`."""
    shares = {}
    for task in ours:
        mine, other = section(ours, task), section(theirs, task)
        for name, is_higher in section(mine, "higher_is_better").items():
            top, bottom = as_number(mine.get(name)), as_number(other.get(name))
            if is_higher is False:
                top, bottom = bottom, top
            if is_higher is not None and top is not None and bottom:
                shares[task_key(task, name)] = top / bottom
    return shares


def task_key(task: str, figure: str) -> str:
    return f"{task}/{figure}"


def show_retained(shares: Fields, name: str) -> str:
    """`98.5%` of a quality, `0.24x` of a cost; empty if there is none."""
    value = as_number(shares.get(name))
    if value is None:
        return ""
    return format_percent(value) if name in QUALITY or name not in _COSTS else f"{format_result(value)}x"


# -- the figures of a model ------------------------------------------------------------------------------

ASSESSMENT_ROWS: tuple[tuple[str, str, Format], ...] = (
    ("perplexity", "perplexity", format_result),
    ("bits_per_byte", "bits/byte", format_result),
    ("kl", "KL to teacher", format_result),
    ("kl_per_byte", "KL, bits/byte", format_result),
    ("text_agreement", "same text, greedy", format_percent),
    ("continued_prompts", "texts continued", format_count),
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
_SAMPLES = "samples"  # of a benchmark, a count
_NO_FIGURES = ("intervals", "higher_is_better")


@dataclass(frozen=True)
class Side:
    """One model's figure as text, `-` where there is none, and its interval, empty where there is none."""

    value: str
    interval: str


@dataclass(frozen=True)
class FigureRow:
    label: str
    student: Side
    teacher: Side
    retained: str  # empty where there is nothing to compare


def figure_rows(result: Fields) -> list[FigureRow]:
    """Every figure that at least one of both models has, those of questions and benchmarks included."""
    student, teacher = (_flat(section(result, role)) for role in ("student", "teacher"))
    kept = section(result, "retained")
    rows = [
        FigureRow(label, _side(student, key, form), _side(teacher, key, form), show_retained(kept, key))
        for key, label, form in ASSESSMENT_ROWS
    ]
    rows += _task_rows(section(student, "tasks"), section(teacher, "tasks"), kept)
    return [row for row in rows if (row.student.value, row.teacher.value) != ("-", "-")]


def _task_rows(ours: Fields, theirs: Fields, kept: Fields) -> Iterator[FigureRow]:
    for task in dict.fromkeys([*ours, *theirs]):
        mine, other = section(ours, task), section(theirs, task)
        for name in dict.fromkeys([*mine, *other]):
            if name not in _NO_FIGURES:
                form = format_count if name == _SAMPLES else format_result
                share = show_retained(kept, task_key(task, name))
                yield FigureRow(f"{task} {name}", _side(mine, name, form), _side(other, name, form), share)


def _side(row: Fields, key: str, form: Format) -> Side:
    return Side(show(row, key, form), show_interval(row, key, form))


def _flat(row: Fields) -> Fields:
    """A model's figures with those of its questions."""
    asked = section(row, "questions")
    return {**row, **asked, "intervals": {**section(row, "intervals"), **section(asked, "intervals")}}


_MAX_LABEL = 40


def assessment_lines(result: Fields) -> list[str]:
    """The figures of a model, one a line, next to those of its teacher."""
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
