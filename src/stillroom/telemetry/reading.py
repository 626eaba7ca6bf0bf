"""Read values of a record without raising for missing ones: a view must not end a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stillroom.telemetry.wording import as_number

Fields = Mapping[str, Any]
Format = Callable[[float], str]


def reading(record: Fields, key: str) -> float | None:
    """A number of a record; NaN and infinity are restored from the sibling key."""
    word = record.get(f"{key}_nonfinite")
    if word in ("nan", "inf", "-inf"):
        return float(str(word))
    return as_number(record.get(key))


def show(record: Fields, key: str, form: Format) -> str:
    """A number of a record as text: formatted, or `nan`, `inf`, or `-` if there is none."""
    value = reading(record, key)
    return "-" if value is None else form(value)


def show_interval(record: Fields, key: str, form: Format) -> str:
    """The 95 % interval of a yardstick, `55.0 to 59.3`; empty if there is none or both ends print the same."""
    bounds = [as_number(bound) for bound in items(section(record, "intervals"), key)]
    if len(bounds) != 2 or bounds[0] is None or bounds[1] is None:
        return ""
    low, high = form(bounds[0]), form(bounds[1])
    return f"{low} to {high}" if low != high else ""


def section(record: Fields, key: str) -> Fields:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def items(record: Fields, key: str) -> Sequence[Any]:
    value = record.get(key)
    return value if isinstance(value, list | tuple) else ()
