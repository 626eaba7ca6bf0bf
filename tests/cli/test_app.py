"""The program itself: its list of commands, and its version."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stillroom.cli import app


def test_the_list_of_commands_is_read_to_the_end_in_80_columns() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0 and "verify-resume" in shown.output
    assert "..." not in shown.output.partition("Commands:")[2]


def test_the_version_is_that_of_the_package() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert shown.exit_code == 0 and shown.output == f"stillroom {importlib.metadata.version('stillroom')}\n"


NAMED = {
    "plan": ("--device-memory", "--write"),
    "doctor": ("green", "amber", "red", "--quick"),
    "selftest": ("float64", "--only"),
    "verify-resume": ("SIGKILL", "--steps", "--kill-at"),
}


def test_the_help_of_every_command_loads_no_torch() -> None:
    code = f"""
import contextlib, sys
from stillroom.cli import main
for command in {sorted(command.name for command in app.registered_commands if command.name)} + {sorted(NAMED)}:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", NAMED)
def test_the_help_of_a_command_names_its_options_and_codes_in_80_columns(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0 and "Exit code" in " ".join(shown.output.split())
    assert max(map(len, shown.output.splitlines())) <= 80
    for word in NAMED[command]:
        assert word in shown.output


def test_the_module_ends_with_the_code_of_the_command() -> None:
    words = [sys.executable, "-m", "stillroom", "presets", "no such preset"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr and not done.stdout
