"""Laws of question files: each layout is read, and a line that is no question is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from stillroom.core.errors import DataError
from stillroom.metrics.questions import Question, read_questions

CHOICES = ("red", "green", "blue")


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "value",
    [
        {"question": "q", "choices": CHOICES, "answer": 1},
        {"question": "q", "choices": CHOICES, "answer": "B"},
        {"question": "q", "choices": CHOICES, "answer": "green"},
        {"query": "q", "options": CHOICES, "label": "1"},
        {"ctx": "q", "endings": CHOICES, "label": 1},
        {"question": "q", "choices": {"text": CHOICES, "label": ["1", "2", "3"]}, "answerKey": "2"},
    ],
)
def test_every_way_to_name_the_right_choice_is_read(value: Any, tmp_path: Path) -> None:
    assert read_questions(write(tmp_path / "q.jsonl", value)) == [Question("q", False, ("green",), CHOICES, 1)]


def test_answers_without_choices_and_prompts_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "q", "answer": 7}, {"prompt": "p", "answers": ["a", "b"]})
    assert read_questions(path) == [Question("q", False, ("7",)), Question("p", True, ("a", "b"))]


@pytest.mark.parametrize(
    "value",
    [
        [1], {"question": "q"}, {"answer": "a"}, {"question": 3, "answer": "a"}, {"question": "q", "answer": {}},
        {"question": "q", "choices": ["one"], "answer": 0}, {"question": "q", "choices": CHOICES, "answer": 3},
        {"question": "q", "choices": CHOICES, "answer": "purple"}, {"question": "q", "answer": []},
        {"question": "q", "choices": CHOICES, "answer": True},
    ],
)  # fmt: skip
def test_a_line_that_is_no_question_is_named(value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {"question": "q", "answer": "a"}, value)
    with pytest.raises(DataError) as refused:
        read_questions(path)
    assert refused.value.where == f"{path}:2" and refused.value.advice


def test_a_file_that_cannot_be_read_or_is_empty_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "none.jsonl"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with refused(DataError, "bytes.jsonl"):
        read_questions(tmp_path / "bytes.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with refused(DataError, "empty.jsonl"):
        read_questions(tmp_path / "empty.jsonl")
