"""Laws of the figures that `stillroom eval` keeps in a run's folder: whose they are, and that they are whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stillroom.telemetry.record import EVALUATED, evaluation_notes, read_evaluation, student_sum, write_evaluation
from stillroom.telemetry.results import figure_rows

SCORES: dict[str, Any] = {
    "perplexity": 57.1, "intervals": {"perplexity": [54.2, 60.3]}, "parameters": 401220, "notes": ["read in blocks"],
}  # fmt: skip
RESULT: dict[str, Any] = {
    "data": "held.jsonl",
    "student": SCORES,
    "teacher": {**SCORES, "perplexity": 20.3, "parameters": 3214112},
    "retained": {"perplexity": 0.3555, "parameters": 0.1248},
    "notes": ["read in blocks", "5 records were left out"],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    student = tmp_path / "student"
    student.mkdir()
    (student / "model.safetensors").write_bytes(b"weights")
    (student / "config.json").write_text("{}")
    return tmp_path


def test_what_is_written_is_read_as_the_student_s_own(run: Path) -> None:
    write_evaluation(run, student_sum(run), RESULT)
    found = read_evaluation(run, missing := [])
    assert found.doubt == "" and not missing and found.record["student"]["perplexity"] == 57.1
    assert not list(run.glob(".tmp-*"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model-2.safetensors"])
def test_a_student_that_changed_since_is_told_apart(run: Path, name: str) -> None:
    write_evaluation(run, student_sum(run), RESULT)
    (run / "student" / name).write_bytes(b"other")
    assert "has changed since" in read_evaluation(run, []).doubt


def test_files_beside_the_weights_do_not_make_another_student(run: Path) -> None:
    before = student_sum(run)
    (run / "student" / "README.md").write_text("words")
    assert student_sum(run) == before != ""


def test_without_the_student_nothing_is_claimed(run: Path) -> None:
    write_evaluation(run, student_sum(run), RESULT)
    (run / "student" / "model.safetensors").unlink()
    assert student_sum(run) == "" and "cannot be said" in read_evaluation(run, []).doubt


@pytest.mark.parametrize("text", ["", "{", "[]", '{"student": 3}', "[" * 100_000])
def test_a_damaged_record_is_no_record(run: Path, text: str) -> None:
    (run / EVALUATED).write_text(text)
    missing: list[str] = []
    assert not read_evaluation(run, missing).record
    assert bool(missing) == (text != '{"student": 3}')
    assert not read_evaluation(run / "none", missing := []).record and not missing


def test_a_value_that_is_not_finite_is_kept_by_name(run: Path) -> None:
    write_evaluation(run, student_sum(run), {"student": {"perplexity": math.inf}})
    json.loads((run / EVALUATED).read_text(), parse_constant=lambda word: pytest.fail(word))
    (row,) = figure_rows(read_evaluation(run, []).record)
    assert row.student.value == "inf" and row.teacher.value == "-"


def test_a_note_is_told_once() -> None:
    assert evaluation_notes(RESULT) == ["read in blocks", "5 records were left out"]
