"""The figures of `stillroom eval` as rows: a student's, its teacher's, and what is retained, each as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stillroom.telemetry.record import Fields, Format, section, show, show_interval
from stillroom.telemetry.retention import show_retained, task_key
from stillroom.telemetry.wording import format_count, format_percent, format_result

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
    """A model's figures with those of its questions beside them."""
    asked = section(row, "questions")
    return {**row, **asked, "intervals": {**section(row, "intervals"), **section(asked, "intervals")}}
