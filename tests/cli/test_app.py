"""The program itself: its list of commands, and its version."""

from __future__ import annotations

import importlib.metadata

from typer.testing import CliRunner

from stillroom.cli import app


def test_the_list_of_commands_is_read_to_the_end_in_80_columns() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0 and "verify-resume" in shown.output
    assert "..." not in shown.output.partition("Commands:")[2]


def test_the_version_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0 and shown.output == f"stillroom {importlib.metadata.version('stillroom')}\n"
