"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest


@pytest.fixture
def stillroom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> commands.Command:
    """Run a command in an empty folder: (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: commands.run(capsys, *words)
