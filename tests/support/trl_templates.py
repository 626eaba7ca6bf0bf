"""Chat templates of real models, as trl ships them."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def template(name: str) -> str:
    """The text of a template. Finds trl without importing it."""
    package = importlib.util.find_spec("trl")
    assert package is not None and package.origin is not None
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
