"""Checkers: whether a written answer is right.

A checker is a function (answer, reference, prompt) -> number from 0 to 1, or true or false. An answer is right from 0.5
on; samples of one prompt are ranked by it. Packages add their own by entry points of the group `stillroom.checkers`.

exact          the text equals the reference, both without case, punctuation, articles and double spaces
number         the last number of the answer is the last number of the reference, as question sets of sums have it
json           the answer is one JSON value; equal to the reference's where that is one too
regex:PATTERN  the pattern is found; where it has a group, what the last match's first group holds is the reference
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable
from decimal import Decimal, InvalidOperation

from stillroom.config.schema import CHECKERS, REGEX
from stillroom.core.errors import ConfigError
from stillroom.core.files import reason_of

Check = Callable[[str, str, str], float]

RIGHT = 0.5  # the least score of a right answer
NEEDS_REFERENCE = frozenset({"exact", "number"})

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d{1,3})?")


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and double spaces (Rajpurkar et al. 2016)."""
    plain = "".join(" " if character in "-/" else character for character in text.lower())
    plain = "".join(character for character in plain if character not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_same_text(answer: str, *references: str) -> bool:
    """Whether two texts are equal, normalised. One of which nothing is left, such as "A", is compared as it stands."""
    written, *right = (normalised(one) or one.strip().lower() for one in (answer, *references))
    return bool(written) and written in right


def _exact(answer: str, reference: str, _prompt: str) -> float:
    return float(is_same_text(answer, reference))


def _number(answer: str, reference: str, _prompt: str) -> float:
    found, wanted = _last_number(answer), _last_number(reference)
    return float(found is not None and found == wanted)


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _json(answer: str, reference: str, _prompt: str) -> float:
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(bool(found == json.loads(reference)))
    except (ValueError, RecursionError):
        return 1.0


def _matches(pattern: re.Pattern[str]) -> Check:
    def check(answer: str, reference: str, _prompt: str) -> float:
        found = list(pattern.finditer(answer))
        if not found or not pattern.groups:
            return float(bool(found))
        return float(is_same_text(found[-1][1] or "", reference))

    return check


for _name, _check in {"exact": _exact, "number": _number, "json": _json}.items():
    CHECKERS.register(_name, _check)


def needs_reference(name: str) -> bool:
    return name in NEEDS_REFERENCE or (name.startswith(REGEX) and bool(re.compile(name.removeprefix(REGEX)).groups))


def open_checker(name: str) -> Check:
    """Look up a checker. What another package's function returns is checked at each call."""
    if name.startswith(REGEX):
        return _matches(re.compile(name.removeprefix(REGEX), re.DOTALL))
    check: Check = CHECKERS.find(name)
    if CHECKERS.is_built_in(name):
        return check

    def checked(answer: str, reference: str, prompt: str) -> float:
        try:
            score = float(check(answer, reference, prompt))
        except Exception as error:  # a foreign function may raise anything
            raise ConfigError(
                f"the checker {name} fails on an answer: {type(error).__name__}: {reason_of(error)}",
                where=name,
                advice=["fix it: a checker takes answer, reference and prompt, and returns a number from 0 to 1"],
            ) from error
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise ConfigError(f"the checker {name} returns {score}, not a number from 0 to 1", where=name)
        return score

    return checked
