"""Texts of several models while they are written: in columns on a wide terminal, else one below the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stillroom.cli.app import echo
from stillroom.telemetry.wording import clean

LEAST_WIDTH = 80  # of a terminal for two columns
_EVERY_SECONDS = 0.1

Voices = Mapping[str, Iterable[str]]  # role -> pieces of its text


def show(voices: Voices, console: Console | None = None) -> dict[str, str]:
    """Print what each model writes, as it comes; the whole texts. A model alone has no name before its text."""
    screen = console or Console(highlight=False)
    if len(voices) > 1 and screen.is_terminal and not screen.is_dumb_terminal and screen.width >= LEAST_WIDTH:
        return _columns(voices, screen)
    return {role: _below(role if len(voices) > 1 else "", pieces) for role, pieces in voices.items()}


def _below(role: str, pieces: Iterable[str]) -> str:
    if role:
        echo(f"{role}: ", nl=False)
    text = ""
    for piece in pieces:
        text += piece
        echo(piece, nl=False, keep_lines=True)
        sys.stdout.flush()
    echo("")
    return text


def _columns(voices: Voices, screen: Console) -> dict[str, str]:
    """A token of each in turn. While they write, the end of the texts is shown as far as it fits; then all of them."""
    texts = dict.fromkeys(voices, "")
    with Live(console=screen, auto_refresh=False, transient=True) as live:
        shown = -_EVERY_SECONDS
        for role, piece in in_turn(voices):
            texts[role] += piece
            if time.monotonic() - shown >= _EVERY_SECONDS:
                live.update(_Tail(_table(texts)), refresh=True)
                shown = time.monotonic()
    screen.print(_table(texts))
    return texts


def in_turn(voices: Voices) -> Iterator[tuple[str, str]]:
    """A piece of each text in turn, until all have ended."""
    left = {role: iter(pieces) for role, pieces in voices.items()}
    while left:
        for role, pieces in list(left.items()):
            piece = next(pieces, None)
            if piece is None:
                del left[role]
            else:
                yield role, piece


def _table(texts: Mapping[str, str]) -> Table:
    table = Table(box=None, expand=True, padding=(0, 3, 0, 0), show_edge=False)
    for role in texts:
        table.add_column(Text(role, style="bold"), ratio=1, overflow="fold")
    table.add_row(*(Text(clean(text, keep_lines=True).strip("\n")) for text in texts.values()))
    return table


class _Tail:
    """The last lines of a table that fit on the screen: what is taller could not be drawn again in place."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._table, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
