"""Small trained models that ship with the package, and a corpus read from the running Python."""

from __future__ import annotations

from pathlib import Path

MODELS = ("teacher", "moe-teacher", "student")


def model_path(name: str) -> Path:
    """The folder of a builtin model, e.g. `teacher`."""
    return Path(__file__).resolve().parent / "models" / name
