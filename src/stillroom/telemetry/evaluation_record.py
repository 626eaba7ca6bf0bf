"""The figures of `stillroom eval`, kept in the folder of the run whose student was measured.

Figures belong to the files that were measured, so the record holds their sha256. Whoever shows it compares the sum with
the student that is there now, and says so where they differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stillroom.files import write_atomically
from stillroom.telemetry.reading import Fields, Format, items, section, show, show_interval
from stillroom.telemetry.results import ASSESSMENT_ROWS, flat_scores
from stillroom.telemetry.retention import show_retained
from stillroom.telemetry.run_record import read_object
from stillroom.telemetry.strict import strict
from stillroom.telemetry.wording import format_result

EVALUATED = "eval.json"
_STUDENT = "student"
_MEASURED = ("*.safetensors", "config.json", "tokenizer.json")  # what decides the figures
_SUM = "student_sha256"
_CHANGED = (
    "The student has changed since it was measured: these are figures of an earlier one. `stillroom eval` takes them "
    "again."
)
_UNKNOWN = "The student's files are not in the folder, so it cannot be said whether these figures are still its own."


@dataclass(frozen=True)
class Evaluated:
    """A record of `stillroom eval`, empty if there is none, and why its figures may not be those of the student."""

    record: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""


@dataclass(frozen=True)
class FigureRow:
    """One figure of both models as text; `-` where there is none."""

    label: str
    teacher: str
    teacher_interval: str
    student: str
    student_interval: str
    retained: str


def student_sum(run: Path) -> str:
    """sha256 over the files of a run's student that decide its figures; empty if it has no weights."""
    folder = run / _STUDENT
    files = sorted(path for pattern in _MEASURED for path in folder.glob(pattern))
    if not any(path.suffix == ".safetensors" for path in files):
        return ""
    whole = hashlib.sha256()
    try:
        for path in files:
            with path.open("rb") as file:
                whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError:  # replaced while it was read
        return ""
    return whole.hexdigest()


def write_evaluation(run: Path, measured: str, result: Mapping[str, Any]) -> Path:
    """Replace the run's record by a result. `measured` is the student's sum from before it was loaded.

    A student that was replaced in between has another sum, so the figures are then shown as those of an earlier one.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = strict({"schema": 1, "time": now, _SUM: measured, **result})
    path = run / EVALUATED
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False).encode("utf-8"))
    return path


def read_evaluation(run: Path, missing: list[str]) -> Evaluated:
    """The run's record. One that is damaged is told in `missing`; a run without one is nothing to tell."""
    path = run / EVALUATED
    if not path.exists():
        return Evaluated()
    record = read_object(path, missing)
    if not section(record, "student"):
        return Evaluated()
    now = student_sum(run)
    return Evaluated(record, "" if now and now == record.get(_SUM) else _CHANGED if now else _UNKNOWN)


def figure_rows(record: Fields) -> list[FigureRow]:
    """Every figure that at least one of both models has, those of questions and benchmarks included."""
    student, teacher = (flat_scores(section(record, role)) for role in ("student", "teacher"))
    kept = section(record, "retained")
    rows = [_row(label, teacher, student, key, form, show_retained(kept, key)) for key, label, form in ASSESSMENT_ROWS]
    rows += [
        _row(f"{task} {figure}", theirs, ours, figure, format_result)
        for task, figure, ours, theirs in _of_tasks(record)
    ]
    return [row for row in rows if (row.student, row.teacher) != ("-", "-")]


def _row(label: str, teacher: Fields, student: Fields, key: str, form: Format, share: str = "") -> FigureRow:
    sides = [(show(row, key, form), show_interval(row, key, form)) for row in (teacher, student)]
    return FigureRow(label, *sides[0], *sides[1], share)


def _of_tasks(record: Fields) -> Iterator[tuple[str, str, Fields, Fields]]:
    ours, theirs = (section(section(record, role), "tasks") for role in ("student", "teacher"))
    for task in dict.fromkeys([*ours, *theirs]):
        rows = section(ours, task), section(theirs, task)
        for figure in dict.fromkeys([*rows[0], *rows[1]]):
            yield task, figure, *rows


def evaluation_notes(record: Fields) -> list[str]:
    """What the models and the text were noted for, each once."""
    owners = [record, *(section(record, role) for role in ("student", "teacher"))]
    return list(dict.fromkeys(str(note) for owner in owners for note in items(owner, "notes")))
