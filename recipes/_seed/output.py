"""Write lines to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from stillroom.telemetry.wording import clean

RULE = "=" * 70


def say(*lines: str) -> None:
    """Write lines and flush, so that `| grep` and `tail -f` see them as they come. Control characters are removed."""
    out = sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    text = "".join(clean(line) + "\n" for line in lines)
    out.write(text.encode(encoding, "backslashreplace").decode(encoding))
    out.flush()


def boxed(title: str, lines: Iterable[str]) -> list[str]:
    """A title between two rules, the lines, and a rule."""
    return [RULE, title, RULE, *lines, RULE]
