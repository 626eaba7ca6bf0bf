"""Show a running run, from its events alone.

Four screens with one protocol: a live line on a terminal, one updated text in a notebook, plain lines in a pipe, and
silence. The preview of data is here too, because it has colours: besides the command line only this file uses rich.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stillroom.core.errors import StillroomError
from stillroom.telemetry import wording as say
from stillroom.telemetry.show import summary_lines
from stillroom.telemetry.wording import (
    Fields,
    as_number,
    clean,
    format_count,
    format_lr,
    format_percent,
    items,
    section,
    show,
)

__all__ = ["ConsoleMode", "ConsoleView", "clean", "format_lr", "is_notebook", "render_error", "show_preview"]

ConsoleMode = Literal["auto", "plain", "quiet"]

_FIRST_STEPS = 5  # whose components are printed in full
LINE_WIDTH = 100  # prose is wrapped here; lines of numbers are shorter
ERROR_WIDTH = 80
REDRAW_SECONDS = 0.1
NOTEBOOK_SECONDS = 0.5  # each update is a message to the browser


@dataclass(frozen=True)
class Moment:
    """A step for a screen: the record, its place in the run, and how much of it to show."""

    event: Mapping[str, Any]
    num_steps: int  # in the whole run; 0: unknown
    num_skipped: int  # so far
    components: list[str]  # the table of terms, in the first steps only
    is_due: bool  # for a log line

    @property
    def line(self) -> str:
        return say.step_line(self.event, self.num_skipped)


class Screen(Protocol):
    def lines(self, lines: list[str]) -> None:
        """Write lines that stay."""

    def step(self, moment: Moment) -> None:
        """Show the current step."""

    def close(self) -> None:
        """Restore the terminal."""


class SilentScreen:
    def lines(self, lines: list[str]) -> None:
        return

    def step(self, moment: Moment) -> None:
        return

    def close(self) -> None:
        return


class PlainScreen:
    """Lines for a file or a pipe, without control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def lines(self, lines: list[str]) -> None:
        self._write([part for line in lines for part in _wrapped(line, LINE_WIDTH)])

    def step(self, moment: Moment) -> None:
        if moment.is_due or moment.components:
            self._write([moment.line, *moment.components])

    def close(self) -> None:
        return

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(_printable(line, self._stream) + "\n" for line in lines))
        self._stream.flush()


class NotebookScreen(PlainScreen):
    """Lines that stay, and the step's numbers in one text that is updated."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._text = UpdatedText()
        self._drawn_at = -math.inf

    def step(self, moment: Moment) -> None:
        if moment.components:
            self._write([moment.line, *moment.components])
            return
        now, step = time.monotonic(), moment.event.get("step")
        if now - self._drawn_at < NOTEBOOK_SECONDS and step != moment.num_steps:
            return
        self._drawn_at = now
        place = f"\n{as_number(step) or 0:,.0f} of {moment.num_steps:,} steps" if moment.num_steps else ""
        self._text.show(clean(moment.line) + place)


class EnduringConsole(Console):
    """Rich ends the program on a broken pipe; a run must go on without a reader."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads this terminal any more")


class LiveScreen:
    """A bar and the step's numbers at the bottom of a terminal; lines that stay scroll above them."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._console = EnduringConsole(
            file=stream, width=width, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        # No refreshing thread: nothing changes between two steps, and a hung run should look hung.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn_at = -math.inf

    def lines(self, lines: list[str]) -> None:
        for line in lines:
            for part in _wrapped(line, self._console.width):
                self._console.print(Text(_printable(part, self._console.file)))

    def step(self, moment: Moment) -> None:
        if moment.components:
            self.lines([moment.line, *moment.components])
        now = time.monotonic()
        if now - self._drawn_at < REDRAW_SECONDS and moment.event.get("step") != moment.num_steps:
            return
        self._drawn_at = now
        self._live.start()
        self._live.update(self._picture(moment), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _picture(self, moment: Moment) -> RenderableType:
        done, total = as_number(moment.event.get("step")) or 0.0, moment.num_steps
        place = f"{format_count(done)}/{format_count(total)}" if total else f"step {format_count(done)}"
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        pace = "  ".join([place, *say.pace_counters(moment.event)])
        strip = ProgressBar(total=max(total, 1), completed=done, complete_style="cyan", finished_style="cyan")
        bar.add_row(strip, Text(pace))
        counters = _filled(say.step_counters(moment.event, moment.num_skipped), self._console.width)
        return Group(
            bar, *(Text(_printable(line, self._console.file), no_wrap=True, overflow="crop") for line in counters)
        )


class ConsoleView:
    """Show the events of a log: `log.listen(view.handle)`.

    When the reader goes away (`| head`, a closed terminal) the view falls silent and the run continues.
    """

    def __init__(
        self,
        mode: ConsoleMode = "auto",
        stream: TextIO | None = None,
        *,
        width: int | None = None,
        tells_stops: bool = True,
    ) -> None:
        """`tells_stops` is off where the error that stopped the run is printed anyway."""
        self._stream = stream or sys.stdout
        self._tells_stops = tells_stops
        self._screen = _screen_for(mode, self._stream, width)
        self._num_steps = 0
        self._num_skipped = 0
        self._log_steps = 10
        self._temperature: float | None = None

    def handle(self, event: Mapping[str, Any]) -> None:
        """Show one event. Unknown events are ignored."""
        with self._while_someone_reads():
            if event.get("event") == "step":
                self._screen.step(self._moment(event))
            else:
                self._screen.lines(self._lines(event))

    def finish(self, summary: Mapping[str, Any], report: object = None) -> None:
        """The last block: the result of the run and the path of the report."""
        with self._while_someone_reads():
            self._screen.close()
            self._screen.lines(["", *summary_lines(summary, report)])

    def close(self) -> None:
        with self._while_someone_reads():
            self._screen.close()

    @property
    def is_read(self) -> bool:
        """Whether somebody may still read; False after the reader went away."""
        return not isinstance(self._screen, SilentScreen)

    def __enter__(self) -> ConsoleView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _while_someone_reads(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            gone, self._screen = self._screen, SilentScreen()
            with suppress(OSError, ValueError):  # restores sys.stdout
                gone.close()

    def _moment(self, event: Mapping[str, Any]) -> Moment:
        skipped = as_number(event.get("skipped"))  # of the whole run, also before a resume
        self._num_skipped = self._num_skipped + (event.get("verdict") == "skip") if skipped is None else int(skipped)
        step = event.get("step")
        place = step if isinstance(step, int) else 0
        temperature = as_number(event.get("temperature", self._temperature))
        return Moment(
            event,
            num_steps=self._num_steps,
            num_skipped=self._num_skipped,
            components=say.component_lines(event, temperature, self._num_steps) if place <= _FIRST_STEPS else [],
            is_due=place % self._log_steps == 0 or place == self._num_steps,
        )

    def _lines(self, event: Mapping[str, Any]) -> list[str]:
        match event.get("event"):
            case "run_start":
                self._begin(event)
                return say.start_lines(event)
            case "first_forward":
                self._temperature = as_number(event.get("temperature"))
                return say.first_forward_lines(event)
            case "teacher_quantised":
                return [say.quantised_line(event)]
            case "note":
                return [say.note_line(event)]
            case "advice":
                return [say.advice_line(event)]
            case "eval":
                return [say.eval_line(event)]
            case "gradients":
                return [say.gradients_line(event)]
            case "phase":
                return [say.phase_line(event)]
            case "rollouts":
                return [say.rollouts_line(event)]
            case "router":
                return [say.router_line(event)]
            case "checkpoint":
                return [say.checkpoint_line(event)]
            case "guard":
                return [say.guard_line(event)]
            case "sample":
                return say.sample_lines(event)
            case "resume":
                return [say.resume_line(event)]
            case "changed_inputs":
                return say.changed_inputs_lines(event)
            case "run_end":
                self._screen.close()
                return [say.end_line(event)] if self._tells_stops or event.get("status") != "stopped" else []
        return []

    def _begin(self, event: Mapping[str, Any]) -> None:
        telemetry = section(section(event, "config"), "telemetry")
        self._num_steps = int(as_number(section(event, "schedule").get("optimizer_steps")) or 0)
        self._log_steps = max(1, int(as_number(telemetry.get("log_steps", self._log_steps)) or 1))


def _screen_for(mode: ConsoleMode, stream: TextIO, width: int | None) -> Screen:
    if mode == "quiet":
        return SilentScreen()
    if mode == "auto" and stream is sys.stdout and is_notebook():
        return NotebookScreen(stream)
    # Ask the stream: with FORCE_COLOR set rich treats a pipe as a terminal.
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return LiveScreen(stream, width) if mode == "auto" and is_terminal else PlainScreen(stream)


# -- a notebook ------------------------------------------------------------------------------------------

# A notebook's output does not obey escape codes: changing text needs an updatable display. IPython is used only if it
# is already running; it is not a dependency.


def is_notebook() -> bool:
    """Whether this process is a Jupyter kernel. False for IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    if ipython is None or "ipykernel" not in sys.modules:
        return False
    shell = ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class UpdatedText:
    """One text in a notebook's output, replaced by each `show`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        picture = {"text/plain": text}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)


# -- errors and lines of text ----------------------------------------------------------------------------


def render_error(error: StillroomError, stream: TextIO | None = None) -> None:
    """Show an error: what happened, where, what to try, and the exit code."""
    out = stream or sys.stderr
    parts = [error.title, "", *_labelled("what", error.what)]
    if error.where:
        parts += _labelled("where", error.where)
    for index, advice in enumerate(error.advice):
        parts += _labelled("try" if index == 0 else "or", advice.removeprefix("or "))
    parts += ["", f"exit code {error.exit_code}"]
    out.write("\n".join(_printable(part, out) for part in parts) + "\n")
    out.flush()


def _labelled(label: str, text: str) -> list[str]:
    paragraphs = clean(text, keep_lines=True).splitlines() or [""]
    lines = [line for paragraph in paragraphs for line in textwrap.wrap(paragraph, ERROR_WIDTH - 9) or [""]]
    return [f"  {label if index == 0 else '':<5}  {line}" for index, line in enumerate(lines)]


def _wrapped(line: str, width: int) -> list[str]:
    """Wrap prose at spaces with a hanging indent. Words longer than a line (paths) stay whole."""
    if len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def _filled(counters: list[str], width: int) -> list[str]:
    """Counters in as few lines as the width allows; none is split."""
    lines: list[str] = []
    for counter in counters:
        if lines and len(lines[-1]) + 2 + len(counter) <= width:
            lines[-1] += "  " + counter
        else:
            lines.append(counter)
    return lines


def _printable(line: str, stream: Any) -> str:
    """One line as it is printed. Every line of every screen passes here, because a log may be a stranger's.

    It has no control characters and no known keys; what the stream's encoding lacks is escaped, so that no name can
    stop a run.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return clean(line).encode(encoding, "backslashreplace").decode(encoding)


# -- a preview of data -----------------------------------------------------------------------------------

_SHOWN_CHARACTERS = 4000  # of one document
_SCORED, _UNSCORED = "bold green", "dim"


def show_preview(result: Fields, stream: TextIO | None = None) -> None:
    console = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    has_colour = console.is_terminal and not console.no_color
    for line in _preview_lines(result):
        console.print(line)
    documents = items(result, "rows")
    if documents:
        console.print(f"\n{len(documents):,} of {show(result, 'documents', format_count)} documents, ", end="")
        console.print(Text("scored in this colour", style=_SCORED) if has_colour else "scored between [[ and ]]")
    for document in documents:
        tokens, scored = document["tokens"], document["scored_tokens"]
        source = f"  of {clean(document['source'])}" if "source" in document else ""
        console.print(f"\n-- {clean(document['id'])}{source}  {tokens:,} tokens, {scored:,} scored")
        pieces = list(_shown(document["pieces"]))
        if has_colour:
            styled = [(text, _SCORED if is_scored else _UNSCORED) for text, is_scored in pieces]
            console.print(Text.assemble(*styled))
        else:
            console.print("".join(f"[[{text}]]" if is_scored else text for text, is_scored in pieces))


def _preview_lines(result: Fields) -> list[str]:
    """Name, shapes and lengths of the data, how much is scored, and what is left out and why."""
    shapes = ", ".join(f"{clean(name)} ({count:,})" for name, count in section(result, "shapes").items())
    lines = [
        f"data      {clean(result.get('data'))}",
        f"model     {clean(result.get('model'))}",
        f"shape     {shapes or '-'}",
        f"length    {show(result, 'tokens', format_count)} tokens in {show(result, 'documents', format_count)} "
        f"documents{_spread(result)}",
        f"rows      {show(result, 'training_rows', format_count)} for training, of up to "
        f"{show(result, 'max_length', format_count)} tokens",
        f"scored    {show(result, 'scored_tokens', format_count)} tokens, "
        f"{show(result, 'scored_share', format_percent)} of all",
    ]
    lines += [line for source in items(result, "sources") for line in _source_lines(source)]
    duplicates = section(result, "duplicates")
    lines += (
        [f"copies    {show(duplicates, 'inside', format_count)} records repeat an earlier one"] if duplicates else []
    )
    if duplicates.get("between"):
        lines.append(f"          {show(duplicates, 'between', format_count)} evaluation records are also trained on")
    left_out = section(result, "left_out")
    lines += [f"left out  {count:,} {clean(name.replace('_', ' '))}" for name, count in left_out.items()]
    lines += [f"          {clean(bad['where'])}: {clean(bad['why'])}" for bad in items(result, "bad_records")]
    return [*lines, *(f"note      {clean(note)}" for note in items(result, "notes"))]


def _spread(result: Fields) -> str:
    lengths = section(result, "lengths")
    named = (f"{name.replace('_', ' ')} {show(lengths, name, format_count)}" for name in lengths)
    return ": " + ", ".join(named) if lengths else ""


def _source_lines(source: Fields) -> list[str]:
    """One of several sources: how often it is seen, what of it is learned, and its size."""
    learned = "from the text alone" if source.get("objectives") == "labels" else "from text and teacher"
    return [
        f"source    {clean(source.get('path'))}, weight {show(source, 'weight', '{:g}'.format)}, learned {learned}",
        f"          {show(source, 'tokens', format_count)} tokens in {show(source, 'documents', format_count)} "
        f"documents{_spread(source)}, {show(source, 'scored_share', format_percent)} scored",
    ]


def _shown(pieces: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """The pieces of a document without control characters, cut after _SHOWN_CHARACTERS."""
    num_left = _SHOWN_CHARACTERS
    for text, is_scored in pieces:
        if num_left <= 0:
            break
        yield clean(text[:num_left], keep_lines=True), is_scored
        num_left -= len(text)
    total = sum(len(text) for text, _ in pieces)
    if total > _SHOWN_CHARACTERS:
        yield f"\n... {total - _SHOWN_CHARACTERS:,} more characters", False
