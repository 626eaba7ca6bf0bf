"""Questions with known answers, one JSON object a line, in the layouts that question sets are published in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stillroom.errors import DataError

_QUESTIONS = ("question", "query", "input", "ctx")  # asked; a "prompt" is continued as it stands
_CHOICES = ("choices", "options", "endings")
_ANSWERS = ("answers", "answer", "answerKey", "label", "target", "output")


@dataclass(frozen=True)
class Question:
    """A question with its right answers, or with choices of which one is right."""

    text: str
    is_prompt: bool
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    right: int = -1  # of the choices


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. A line that is none is an error: an accuracy over some of them would be another."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the questions in {path} cannot be read: {error}", where=str(path)) from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, TypeError, LookupError) as error:
            raise DataError(
                f"a line is no question: {error}",
                where=f"{path}:{number}",
                advice=[
                    'a line is an object with "question" and "answer", and "choices" where there are some',
                    'with choices "answer" is the place of the right one from 0, its letter, or its text',
                ],
            ) from error
    if not found:
        raise DataError(f"{path} holds no questions", where=str(path))
    return found


def _question(value: Any) -> Question:
    if not isinstance(value, Mapping):
        raise TypeError("it is not an object")
    is_prompt = "prompt" in value
    text = value["prompt"] if is_prompt else _first(value, _QUESTIONS)
    answer = _first(value, _ANSWERS)
    if not isinstance(text, str):
        raise TypeError("the question is not a text")
    given = next((value[name] for name in _CHOICES if value.get(name)), None)
    if given is None:
        answers = answer if isinstance(answer, list) else [answer]
        if not answers or not all(isinstance(one, str | int | float) for one in answers):
            raise TypeError("the answer is not a text")
        return Question(text, is_prompt, tuple(str(one) for one in answers))
    labels: Sequence[Any] = ()
    if isinstance(given, Mapping):  # as ARC has it
        given, labels = given["text"], given.get("label", ())
    choices = tuple(str(choice) for choice in given)
    if len(choices) < 2:
        raise ValueError("there are fewer than two choices")
    right = _place(answer, choices, labels)
    return Question(text, is_prompt, (choices[right],), choices, right)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if value.get(name) is not None:
            return value[name]
    raise LookupError(f"it has none of {', '.join(names)}")


def _place(answer: Any, choices: Sequence[str], labels: Sequence[Any]) -> int:
    """Which choice is right: by its text, its label, its letter, or its place from 0."""
    if isinstance(answer, str):
        for known in (choices, [str(label) for label in labels]):
            if answer in known:
                return list(known).index(answer)
        letter = answer.strip().upper()
        if len(letter) == 1 and letter.isalpha():
            answer = ord(letter) - ord("A")
        elif letter.isdigit():
            answer = int(letter)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise ValueError(f"the answer {answer!r} is none of the {len(choices)} choices")
