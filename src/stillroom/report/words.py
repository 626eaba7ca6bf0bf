"""The result of a run in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stillroom.doctor.rules import TRIAL_STEPS
from stillroom.report.history import RunRecord
from stillroom.telemetry.record import BASELINES
from stillroom.telemetry.wording import (
    as_number,
    changed_inputs_lines,
    clean,
    format_count,
    format_duration,
    format_percent,
    format_result,
    reading,
    section,
)

_MUCH, _LITTLE = 0.5, 0.1  # shares of the gap to the teacher
_BEYOND = 1.1  # of the gap to the teacher: better than it by more than chance alone gives


def verdict(run: RunRecord) -> str:
    """Say in one sentence whether the run worked; empty where it did not finish or there is nothing to compare."""
    student, before, teacher = (_bits(run, row) for row in ("student", "student_before", "teacher"))
    if not run.is_finished or student is None or before is None:
        return ""
    if 0 < run.steps.last < TRIAL_STEPS:
        return f"{format_count(run.steps.last)} steps are too few to tell what the student learns."
    if as_number(section(run.start, "data").get("teacher_contexts")):
        return _verdict_of_kl(*(reading(run.result(row), "kl") for row in ("student", "student_before")))
    if student >= before:
        return "Training did not help: the student is no better than before."
    own = run.perplexity("student")
    if own is not None and any(own >= plain for plain in _plain_perplexities(run)):
        return "The student learned, but plain training did as well: distillation did not pay."
    if teacher is None or teacher >= before:
        return "Training helped: the student predicts held-out text better than before."
    share = (before - student) / (before - teacher)
    if share > _BEYOND:
        return "The student predicts held-out text better than its teacher: this teacher does not know the text well."
    if share >= 1:
        return "Distillation worked: the student is as good as its teacher on held-out text."
    closed = f"{format_percent(share, 0)} of the gap to its teacher in bits per byte"
    return f"Distillation {_word(share)}: the student closed {closed}."


def _word(share: float) -> str:
    return "worked" if share >= _MUCH else "worked in part" if share >= _LITTLE else "changed little"


def _verdict_of_kl(student: float | None, before: float | None) -> str:
    """Of a teacher that reads more than its student: what the labels say is not what was to be learned."""
    if student is None or before is None or not 0 < before < math.inf:
        return ""
    share = 1 - student / before
    if share <= 0:
        return "Training did not help: the student is no closer to its teacher in context than before."
    closed = f"{format_percent(share, 0)} of the KL to the teacher in context is gone"
    return f"Distillation {_word(share)}: {closed}, and the student does without the context."


def _bits(run: RunRecord, row: str) -> float | None:
    """The held-out loss of a model as bits per byte, which can be subtracted; else the logarithm of its perplexity."""
    bits = reading(run.result(row), "bits_per_byte")
    if bits is not None and all(reading(run.result(other), "bits_per_byte") is not None for other in _COMPARED):
        return bits if math.isfinite(bits) else None
    perplexity = run.perplexity(row)
    return math.log(perplexity) if perplexity is not None and 0 < perplexity < math.inf else None


_COMPARED = ("student", "student_before")


def headline(run: RunRecord) -> list[str]:
    """A few sentences: first whether the run failed, then the result, then the comparison with plain training."""
    return [*_how_it_ended(run), *_what_was_reached(run), *_against_plain_training(run)]


def story(run: RunRecord) -> list[str]:
    """Inputs that changed under the run, and sentences in the summary, such as the demo's on its comparison."""
    changed = [line for event in run.history.of_kind("changed_inputs") for line in changed_inputs_lines(event)]
    sentences = run.summary.get("story")
    return [*changed, *map(clean, sentences if isinstance(sentences, list) else [])]


def _how_it_ended(run: RunRecord) -> list[str]:
    if run.is_finished:
        return []
    if run.is_running:
        of = f" of {format_count(run.num_steps_planned)}" if run.num_steps_planned else ""
        return [f"The run is at step {format_count(run.steps.last)}{of}."]
    if not len(run.steps) and not run.evals and not run.end:
        return ["Nothing of this run's training was recorded."]
    planned = f" of {format_count(run.num_steps_planned)}" if run.num_steps_planned else ""
    place = f"step {format_count(run.steps.last)}{planned}"
    status = clean(run.summary.get("status") or run.end.get("status") or "")
    code = as_number(run.end.get("exit_code"))
    if not status:
        return [f"The run did not finish: its record breaks off at {place}."]
    code_part = f" (exit code {code:.0f})" if code else ""
    reason = clean(run.end.get("reason") or run.summary.get("reason") or "").rstrip(".")
    if status == "diverged":
        return [f"The run took all its steps and got worse{code_part}: {reason}."]
    if reason:
        return [f"The run did not finish: it ended at {place}{code_part}.", f"The reason given: {reason}."]
    return [f"The run did not finish: it ended as \u201c{status}\u201d at {place}{code_part}."]


def _what_was_reached(run: RunRecord) -> list[str]:
    student, before, teacher = (run.perplexity(row) for row in ("student", "student_before", "teacher"))
    if student is None:
        return []
    teacher_part = f"; the teacher has {format_result(teacher)}" if teacher is not None else ""
    if not math.isfinite(student):
        return [f"The student is broken: its held-out perplexity is {student}{teacher_part}."]
    bits = reading(run.result("student"), "bits_per_byte")
    bits_part = f" ({format_result(bits)} bits per byte)" if bits is not None else ""
    reached = f"held-out perplexity of {format_result(student)}{bits_part}"
    if before is None:
        return [f"The student has a {reached}{teacher_part}."]
    if student > before:
        return [f"The student got worse: it ended at a {reached}, up from {format_result(before)}{teacher_part}."]
    return [f"The student reached a {reached}, from {format_result(before)} before training{teacher_part}."]


def _plain_perplexities(run: RunRecord) -> list[float]:
    return [value for value in map(run.perplexity, BASELINES) if value is not None and math.isfinite(value)]


def _against_plain_training(run: RunRecord) -> list[str]:
    student, teacher = run.perplexity("student"), run.perplexity("teacher")
    plain = _plain_perplexities(run)
    if student is None or not math.isfinite(student) or not plain:
        return []
    baseline = min(plain)
    which = "the better plain-training baseline" if len(plain) > 1 else "the plain-training baseline"
    reference = f"{which} ({format_result(baseline)})"
    if student >= baseline:
        return [f"That is no better than {reference}: distillation did not pay in this run."]
    if teacher is None or not math.isfinite(teacher):
        return [f"That is {format_percent(1 - student / baseline, 0)} below {reference}."]
    if baseline <= teacher:
        return [f"There is no gap to close: {reference} is already as good as the teacher."]
    if student <= teacher:
        return [f"On this data it is as good as the teacher, and ahead of {reference}."]
    closed = (baseline - student) / (baseline - teacher)
    return [f"It closes {format_percent(closed, 0)} of the gap in perplexity between {reference} and the teacher."]


def cost(run: RunRecord) -> list[tuple[str, str]]:
    """What the run took, as (label, value): time, tokens, memory; and the size of the student."""
    summary = run.summary
    numbers = (
        ("time", as_number(summary.get("total_seconds")) or as_number(summary.get("seconds")), format_duration),
        ("tokens seen", as_number(summary.get("tokens")), format_count),
        ("peak GPU memory", _peak(run, "gpu_memory_gb"), _gigabytes),
        ("peak memory", _peak(run, "memory_gb"), _gigabytes),
    )
    found = [(label, form(value)) for label, value, form in numbers if value is not None]
    return [*found, *_size(run)]


def _size(run: RunRecord) -> list[tuple[str, str]]:
    teacher, student = (as_number(run.result(row).get("parameters")) for row in ("teacher", "student"))
    if not student:
        return []
    share = f", {format_percent(student / teacher, 0)} of the teacher's" if teacher else ""
    return [("student's parameters", f"{format_count(student)}{share}")]


def _peak(run: RunRecord, name: str) -> float | None:
    """The largest value over the steps; None where there is none or it is 0, as memory of a GPU without one."""
    _steps, values = run.steps.curve(name)
    return (float(values.max()) or None) if len(values) else None


def _gigabytes(value: float) -> str:
    return f"{format_result(value)} GB"


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """The run's other numbers as (label, value)."""
    summary = run.summary
    steps = as_number(summary.get("steps"))
    if steps is None and len(run.steps):
        steps = float(run.steps.last)
    numbers = (
        ("steps", steps, format_count),
        ("time of the steps", as_number(summary.get("seconds")), format_duration),
        ("steps kept", as_number(summary.get("success_rate")), format_percent),
        ("skipped", as_number(summary.get("skipped")), format_count),
        ("rollbacks", as_number(summary.get("rollbacks")), format_count),
        ("positions taught by labels alone", as_number(summary.get("label_taught_rows")) or None, format_count),
    )
    labelled = [(label, form(value)) for label, value, form in numbers if value is not None]
    precision = run.start.get("precision")
    if isinstance(precision, dict) and precision.get("mode"):
        labelled.append(("precision", clean(precision["mode"])))
    quantisation = section(summary, "teacher_quantisation") or next(iter(run.history.of_kind("teacher_quantised")), {})
    kl = as_number(quantisation.get("kl"))
    if kl is not None:
        labelled.append(("teacher in", f"{clean(quantisation.get('kind'))}, KL to full {kl:.2g}"))
    return labelled


def headline_of_several(runs: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Which of several runs has the best student."""
    scored = [(value, name) for run, name in zip(runs, names, strict=True) if (value := run.perplexity("student"))]
    finite = [(value, name) for value, name in scored if value < float("inf")]
    if not finite:
        return f"{len(runs)} runs, none of which has a result"
    value, name = min(finite)
    return f"Of {len(runs)} runs, {name} has the lowest held-out perplexity: {format_result(value)}"
