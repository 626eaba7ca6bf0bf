"""Laws of the help: every command has one line, every page fits 80 columns, and every option is explained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from commands import output, run

from stillroom.cli import app
from stillroom.config import preset_names

WIDTH = 80


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_help_fits_eighty_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("TERMINAL_WIDTH", str(WIDTH))
    text = output(capsys, *words, "--help")
    assert max(map(len, text.splitlines())) <= WIDTH
    command = COMMANDS[words]
    short = command.get_short_help_str(limit=WIDTH - 19)  # the room that a list of commands has for it
    assert not words or (short.endswith(".") and not short.endswith("...")), f"{words}: {short}"
    unexplained = [one.name for one in command.params if not (getattr(one, "help", "") or one.name == "help")]
    assert not unexplained


def test_subcommands_of_cache_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMMANDS) >= {("cache", "write"), ("cache", "info"), ("cache", "verify")}
    for words in (("cache", "info", "nowhere", "--json"), ("cache", "--json", "info", "nowhere")):
        code, out, _err = run(capsys, *words)
        assert code == 2 and '"where": "teacher.cache"' in out
    code, _out, err = run(capsys, "cache", "missing.toml", "--out", "nowhere")
    assert code == 2 and "missing.toml" in err, "without a subcommand it writes a cache"
    assert "verify" in output(capsys, "cache", "--help") and "--import" in output(capsys, "cache", "write", "--help")


def test_presets_of_earlier_scripts_are_listed_last(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "presets").splitlines()
    named = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(named) == sorted(preset_names()) and named[0] == "base"
    assert named.index("ultra-stable") > named.index("demo") and max(map(len, lines)) <= WIDTH
