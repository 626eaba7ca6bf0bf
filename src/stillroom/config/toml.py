"""Write a configuration as TOML, which the standard library can only read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def toml_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """A table of sections as TOML. Values that are None are left out: TOML has none, and the schema's default is it."""
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    for key, value in plain.items():
        yield f"{key} = {_literal(value)}"
    yield from _sections(table, "")


def _sections(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            continue
        own = {name: one for name, one in value.items() if one is not None and not isinstance(one, Mapping)}
        name = f"{prefix}{_key(key)}"
        if own:
            yield ""
            yield f"[{name}]"
            for inner, one in own.items():
                yield f"{_key(inner)} = {_literal(one)}"
        yield from _sections(value, f"{name}.")


def _key(text: str) -> str:
    is_bare = text.replace("-", "").replace("_", "").isalnum() and text.isascii()
    return text if is_bare else _literal(text)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_literal(one)}" for key, one in value.items() if one is not None)
        return "{ " + inside + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)
