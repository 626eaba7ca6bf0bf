"""Convert values to strict JSON: a number that is not finite becomes null, with a sibling key that names it.

Everything that is written as a record or printed as JSON passes here, so this is also where keys are masked.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

from stillroom.secret_keys import masked

NONFINITE = "_nonfinite"
NONFINITE_WORDS = ("nan", "inf", "-inf")


def strict(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping as plain JSON values, with a sibling key for each value that is not finite.

    The sibling of a list maps indices to names: `"norms": [0.5, null], "norms_nonfinite": {"1": "nan"}`; indices into
    nested lists are joined by dots.
    """
    plain: dict[str, Any] = {}
    siblings: dict[str, Any] = {}
    for key, value in fields.items():
        lost: dict[str, str] = {}
        name = masked(str(key))
        plain[name] = _plain(value, "", lost)
        if lost:
            siblings[f"{name}{NONFINITE}"] = lost.get("", lost)
    return plain | siblings


def _plain(value: Any, place: str, lost: dict[str, str]) -> Any:
    """`value` as JSON. What is not finite becomes None and is noted in `lost` under its index."""
    match value:
        case None | bool():
            return value
        case str():
            return masked(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():  # numpy's scalars too
            number = float(value)
            if math.isfinite(number):
                return number
            lost[place] = _word(number)
            return None
        case Mapping():
            return strict(value)
        case list() | tuple():
            below = f"{place}." if place else ""
            return [_plain(item, f"{below}{index}", lost) for index, item in enumerate(value)]
        case os.PathLike():
            return masked(str(os.fspath(value)))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return strict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    raise TypeError(f"{type(value).__name__} has no place in an event: give numbers, text, lists or mappings")


def _word(number: float) -> str:
    if math.isnan(number):
        return "nan"
    return "inf" if number > 0 else "-inf"
