"""Show a run while it goes on, from its events alone.

Four screens with one protocol: a live line on a terminal, one updated text in a notebook, plain lines in a pipe, and
silence. Besides the command line only this file and `preview` use rich.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stillroom.errors import StillroomError
from stillroom.telemetry import lines as say
from stillroom.telemetry.notebook import UpdatedText, is_notebook
from stillroom.telemetry.record import section
from stillroom.telemetry.results import summary_lines
from stillroom.telemetry.router_lines import router_line
from stillroom.telemetry.wording import as_number, clean, format_count, format_lr

__all__ = ["ConsoleMode", "ConsoleView", "clean", "format_lr", "render_error"]

ConsoleMode = Literal["auto", "plain", "quiet"]

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

    When the reader goes away (`| head`, a closed terminal) the view falls silent and the run goes on.
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
        self._first_steps = 5
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
            components=say.component_lines(event, temperature, self._num_steps) if place <= self._first_steps else [],
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
            case "router":
                return [router_line(event)]
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
        self._first_steps = int(as_number(telemetry.get("first_steps", self._first_steps)) or 0)
        self._log_steps = max(1, int(as_number(telemetry.get("log_steps", self._log_steps)) or 1))


def _screen_for(mode: ConsoleMode, stream: TextIO, width: int | None) -> Screen:
    if mode == "quiet":
        return SilentScreen()
    if mode == "auto" and stream is sys.stdout and is_notebook():
        return NotebookScreen(stream)
    # Ask the stream: with FORCE_COLOR set rich treats a pipe as a terminal.
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return LiveScreen(stream, width) if mode == "auto" and is_terminal else PlainScreen(stream)


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
