"""Fixtures of the tests of data."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages for the standard library: `builtin:qa` reads the docstrings of all of it for seconds."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("json", "email"):
        shutil.copytree(library / name, tmp_path / "library" / name)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path / "library"))
