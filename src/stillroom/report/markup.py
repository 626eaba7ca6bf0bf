"""Build HTML: text is escaped unless it is already markup.

What a run recorded (names, samples, paths, reasons) may contain anything, so never concatenate strings: only `element`
makes markup, and it escapes each child that is not markup.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from stillroom.telemetry.wording import clean

_VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Markup that needs no escaping."""

    __slots__ = ()


def text(value: object, *, keep_lines: bool = False) -> Html:
    """Any value as escaped text without control characters and direction overrides."""
    return Html(html.escape(clean(value, keep_lines=keep_lines), quote=True))


def join(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """`element("td", value, class_="number")`. Attributes that are None are left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    inner = "".join(child if isinstance(child, Html) else text(child) for child in children if child is not None)
    return Html(f"<{name}{written}>{inner}</{name}>")


def json_block(identifier: str, value: Any) -> Html:
    """Data for a script. `<` is escaped, so nothing in it can end the element or open another."""
    packed = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        packed = packed.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{text(identifier)}">{packed}</script>')
