"""Fixtures of the tests of data."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the standard library: `builtin:qa` reads the docstrings of all of it, which takes seconds."""
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library / "json", tmp_path / "library" / "json")
    for path in library.glob("[a-c]*.py"):
        shutil.copy(path, tmp_path / "library")
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "library"))
