"""The figures of `stillroom eval`, kept in the folder of the run whose student was measured.

Figures belong to the files that were measured, so the record holds their sha256. Whoever shows it compares the sum with
the student that is there now, and says so where they differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stillroom.files import write_atomically
from stillroom.telemetry.reading import Fields, items, section
from stillroom.telemetry.run_record import read_object
from stillroom.telemetry.strict import strict

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


def evaluation_notes(record: Fields) -> list[str]:
    """What the models and the text were noted for, each once."""
    owners = [record, *(section(record, role) for role in ("student", "teacher"))]
    return list(dict.fromkeys(str(note) for owner in owners for note in items(owner, "notes")))
