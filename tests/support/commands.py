"""Run commands of the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from stillroom.cli import main

Command = Callable[..., tuple[int, str, str]]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of a command."""
    code = 0
    try:
        main(list(words))
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The output of a command that must succeed."""
    code, out, err = run(capsys, *words)
    assert code == 0, err
    return out


def arguments(world: Path, out: Path, **over: object) -> list[str]:
    """The words of a `distill` command with the settings of a tiny run."""
    words = ["distill", "--out", str(out), "--device", "cpu", "--no-progress"]
    for key, value in tiny.settings(world, **over).items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return words
