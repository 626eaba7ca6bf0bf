"""Format numbers and names for terminal, log and report.

No colours and no layout. All text goes through `clean` before it is shown, at the latest where it is printed: a model's
name must not be able to move the cursor, hide a line or reverse text, and no key that we know may be read.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from stillroom.core.errors import masked

# CSI, OSC and the other string sequences, then two-byte escapes; 0x80-0x9f are their one-byte forms.
_ESCAPE_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
)
_SPACES = {"\t": "    ", "\n": "\n", "\u2028": "\n", "\u2029": "\n"}
# Invisible, but needed to write Persian and Indian scripts.
_JOINERS = frozenset("\u200c\u200d")
_UNSEEN = frozenset({"Cc", "Cf"})


def clean(text: object, *, keep_lines: bool = False) -> str:
    """`text` without control characters, escape sequences, direction overrides and known keys.

    Without `keep_lines` the result is one line. A lone surrogate becomes "?": a JSON file can hold it, a terminal
    cannot show it.
    """
    plain = _ESCAPE_SEQUENCE.sub("", str(text).replace("\r\n", "\n").replace("\r", "\n"))
    if not plain.isprintable():
        plain = "".join(_visible(character) for character in plain)
    return masked(plain if keep_lines else plain.replace("\n", " "))


def _visible(character: str) -> str:
    if character in _SPACES:
        return _SPACES[character]
    if character in _JOINERS:
        return character
    category = unicodedata.category(character)
    if category == "Cs":
        return "?"
    return "" if category in _UNSEEN else character


def clip(text: object, width: int) -> str:
    """One clean line of at most `width` characters, ending in dots if it was cut."""
    line = clean(text)
    return line if len(line) <= width else line[: max(width - 3, 0)].rstrip() + "..."


# -- numbers ---------------------------------------------------------------------------------------------


def as_number(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def format_lr(value: float) -> str:
    """Three significant digits. A positive rate is never shown as zero."""
    return f"{value:.2e}"


def format_loss(value: float) -> str:
    """Usually three decimals: 2.314, 0.412, 95.873, 1,204.5, 0.00812, 3.10e-05."""
    if abs(value) < 1e6:
        return f"{value:,.1f}" if abs(value) >= 1000 else _small(value, 3)
    return f"{value:.2e}"


def format_norm(value: float) -> str:
    """Two decimals, or three significant digits of small and large norms: 0.83, 0.0123, 2.50e+04."""
    return _small(value, 2) if abs(value) < 1000 else f"{value:.2e}"


def _small(value: float, decimals: int) -> str:
    if value == 0 or abs(value) >= 0.1:
        return f"{value:.{decimals}f}"
    return f"{value:#.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def format_result(value: float) -> str:
    """Three significant digits; whole numbers from a hundred on: 1.62, 57.1, 134, 2,031."""
    size = abs(value)
    if math.isnan(value):
        return "nan"
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        return f"{value:.2e}"
    # Round first: 99.96 must not show as 100.0.
    digits = math.floor(math.log10(float(f"{size:.2e}")))
    return f"{value:,.{max(0, 2 - digits)}f}"


def format_count(value: float) -> str:
    return f"{value:,.0f}"


def format_percent(share: float, decimals: int = 1) -> str:
    return f"{100 * share:.{decimals}f}%"


def format_duration(seconds: float) -> str:
    """Two units at most: 0.4s, 12s, 2m10s, 3h05m, 2d04h."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f}s"
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
