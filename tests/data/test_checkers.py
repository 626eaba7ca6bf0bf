"""Laws of checkers: what each finds right, and that a foreign one is held to its promise."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused

from stillroom.config.schema import CHECKERS
from stillroom.core.errors import ConfigError
from stillroom.data.checkers import RIGHT, needs_reference, open_checker


@pytest.mark.parametrize(
    ("name", "answer", "reference", "is_right"),
    [
        ("exact", "The  Room.", "room", True),
        ("exact", "the room upstairs", "room", False),
        ("exact", "", "", False),
        ("number", "so 3 + 4 = 7.", "#### 7", True),
        ("number", "1,200 apples", "1200", True),
        ("number", "it is -5", "5", False),
        ("number", "seven", "7", False),
        ("number", "7.0", "7", True),
        ("json", '{"a": [1, 2]}', "an object", True),
        ("json", '{"a": 1}', '{"a": 1.0}', True),
        ("json", '{"a": 1}', '{"a": 2}', False),
        ("json", "{a: 1}", "an object", False),
        ("regex:^yes", "yes, it is", "", True),
        ("regex:^yes", "no", "", False),
        (r"regex:Answer: (\w+)", "Answer: red\nAnswer: Blue", "blue", True),
        (r"regex:Answer: (\w+)", "Answer: blue\nAnswer: red", "blue", False),
    ],
)
def test_what_is_right(name: str, answer: str, reference: str, is_right: bool) -> None:
    assert (open_checker(name)(answer, reference, "q") >= RIGHT) == is_right


def test_which_need_a_reference() -> None:
    names = ["exact", "number", "json", "regex:a", "regex:(a)"]
    assert [needs_reference(name) for name in names] == [True, True, False, False, True]


@pytest.mark.parametrize("returned", [2.0, -1.0, float("nan"), "much", None])
def test_a_foreign_checker_that_breaks_its_promise_is_named(monkeypatch: Any, returned: Any) -> None:
    monkeypatch.setitem(CHECKERS._things, "theirs", lambda *_words: returned)
    with refused(ConfigError, "theirs", "theirs"):
        open_checker("theirs")("a", "b", "q")


def test_true_is_right_and_false_is_wrong(monkeypatch: Any) -> None:
    monkeypatch.setitem(CHECKERS._things, "theirs", lambda answer, *_words: answer == "a")
    check = open_checker("theirs")
    assert check("a", "", "") == 1.0 and check("b", "", "") == 0.0
