"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from stillroom.errors import ConfigError

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, where: str = "--device-memory") -> int:
    """16GB, 15.9 GiB or 500MB. GB are powers of ten, GiB of two. A number without a unit could mean GB or bytes."""
    found = _AMOUNT.fullmatch(text)
    if found is not None and not found[2]:
        raise ConfigError(
            f"{text!r} has no unit", where=where, advice=[f"{where} {text.strip()}GB", f"{where} {text.strip()}B"]
        )
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or int(float(found[1]) * unit) < 1:
        raise ConfigError(
            f"{text!r} is no amount of memory", where=where, advice=[f"{where} 16GB, {where} 15.9GiB, {where} 800MB"]
        )
    return int(float(found[1]) * unit)
