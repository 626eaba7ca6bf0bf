"""Laws of texts beside each other: two columns where there is room, else one below the other, and nothing is lost."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from stillroom.cli.chat import LEAST_WIDTH, in_turn, show


def terminal(width: int = 100, height: int = 12) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, legacy_windows=False)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def words(count: int, prefix: str) -> Iterator[str]:
    return (f"{prefix}{number} " for number in range(count))


def test_on_a_wide_terminal_both_stand_in_the_same_lines(capsys: Any) -> None:
    screen = terminal()
    texts = show({"student": words(30, "s"), "teacher": words(30, "t")}, screen)
    assert texts == {"student": "".join(words(30, "s")), "teacher": "".join(words(30, "t"))}
    lines = printed(screen).splitlines()
    assert any("student" in line and "teacher" in line for line in lines)
    assert any("s0 s1" in line and "t0 t1" in line for line in lines)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("width", [40, LEAST_WIDTH - 1])
def test_on_a_narrow_terminal_one_stands_below_the_other(width: int, capsys: Any) -> None:
    screen = terminal(width)
    show({"student": ["one"], "teacher": ["two"]}, screen)
    assert capsys.readouterr().out == "student: one\nteacher: two\n" and printed(screen) == ""


def test_in_a_pipe_one_stands_below_the_other(capsys: Any) -> None:
    show({"student": ["one", " more"], "teacher": ["two"]}, Console(file=io.StringIO(), width=200))
    assert capsys.readouterr().out == "student: one more\nteacher: two\n"


def test_a_model_alone_has_no_name(capsys: Any) -> None:
    assert show({"student": ["one"]}, terminal()) == {"student": "one"}
    assert capsys.readouterr().out == "one\n"


def test_a_text_taller_than_the_screen_is_shown_whole_at_the_end() -> None:
    screen = terminal(height=6)
    show({"student": (f"line {number}\n" for number in range(40)), "teacher": ["short"]}, screen)
    for number in range(40):
        assert f"line {number}" in printed(screen)


def test_pieces_come_in_turn_until_the_longer_text_ends() -> None:
    found = list(in_turn({"a": ["1", "2", "3"], "b": ["x"]}))
    assert found == [("a", "1"), ("b", "x"), ("a", "2"), ("a", "3")]


def test_what_a_model_writes_is_no_markup_and_moves_no_cursor() -> None:
    screen = terminal()
    show({"student": ["[bold red]x[/] \x1b[2J\x1b[31m y"], "teacher": ["[/link] :smile:"]}, screen)
    assert "[bold red]x[/]" in printed(screen) and "[/link] :smile:" in printed(screen)
    assert "\x1b[2J" not in printed(screen) and "\x1b[31m" not in printed(screen)
