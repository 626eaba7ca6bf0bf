"""Show a running run, from its events alone.

Four screens with one protocol: live progress on a terminal, a table that is updated in a notebook, plain lines in a
pipe, and silence. Without `verbose` a screen shows what a person acts on; the log has the rest. The preview of data is
here too, because it has colours: apart from the command line only this file uses rich.
"""

from __future__ import annotations

import html
import importlib
import math
import os
import shutil
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
from stillroom.telemetry.results import next_lines, summary_lines
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

_FIRST_STEPS = 5  # whose components are printed in full, with `verbose`
LONG_SECONDS = 3.0  # a stage that takes longer is announced in a pipe too
LINE_SECONDS = 60.0  # between two lines of progress in a pipe
ERROR_WIDTH = 80  # on a terminal
REDRAW_SECONDS = 0.1
NOTEBOOK_SECONDS = 0.5  # each update is a message to the browser
CURVE_POINTS = 400  # of a notebook's curve: more than pixels show


@dataclass(frozen=True)
class Moment:
    """A step for a screen: the record, its place in the run, and how much of it to show."""

    event: Mapping[str, Any]
    num_steps: int  # in the whole run; 0: unknown
    num_skipped: int  # so far
    components: list[str]  # the table of terms, in the first steps and with `verbose` only
    is_due: bool  # for a line in a pipe, whatever the time

    @property
    def line(self) -> str:
        return say.step_line(self.event, self.num_skipped)


class Screen(Protocol):
    def lines(self, lines: list[str], *, wraps: bool = True) -> None:
        """Write lines that stay. Commands to copy are not wrapped."""

    def step(self, moment: Moment) -> None:
        """Show the current step."""

    def stage(self, event: Fields) -> None:
        """Show what is done between steps, and how far it is."""

    def evaluated(self, event: Fields) -> None:
        """Show the scores of an evaluation."""

    def close(self) -> None:
        """Restore the terminal."""


class SilentScreen:
    def lines(self, lines: list[str], *, wraps: bool = True) -> None:
        return

    def step(self, moment: Moment) -> None:
        return

    def stage(self, event: Fields) -> None:
        return

    def evaluated(self, event: Fields) -> None:
        return

    def close(self) -> None:
        return


class PlainScreen:
    """Lines for a file or a pipe, without control characters: one a minute while steps are taken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._step_at = self._stage_at = -math.inf  # of the last line of each kind
        self._stage = ""  # that a line was written for

    def lines(self, lines: list[str], *, wraps: bool = True) -> None:
        width = _columns(self._stream) if wraps else None
        self._write([part for line in lines for part in ([line] if width is None else _wrapped(line, width))])

    def step(self, moment: Moment) -> None:
        if moment.is_due or moment.components or time.monotonic() - self._step_at >= LINE_SECONDS:
            self._step_at = time.monotonic()
            self._write([moment.line, *moment.components])

    def stage(self, event: Fields) -> None:
        name, state = str(event.get("name")), event.get("state")
        if state == "end":
            self._stage = ""
            return
        left = as_number(event.get("eta_seconds"))
        is_long = left is None or (as_number(event.get("seconds")) or 0.0) + left >= LONG_SECONDS
        is_counted = state != "begin" or not event.get("total") or left is not None  # else the first batches tell
        is_due = name != self._stage or time.monotonic() - self._stage_at >= LINE_SECONDS
        if is_long and is_counted and is_due:
            self._stage, self._stage_at = name, time.monotonic()
            self._write([say.stage_line(event)])

    def evaluated(self, event: Fields) -> None:
        self.lines([say.eval_line(event)])

    def close(self) -> None:
        return

    def _write(self, lines: list[str]) -> None:
        self._stream.write("".join(_printable(line, self._stream) + "\n" for line in lines))
        self._stream.flush()


class NotebookScreen(PlainScreen):
    """Lines that stay, and one table that is updated: the step, the loss so far, and a row for each evaluation."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._display = UpdatedDisplay()
        self._drawn_at = -math.inf
        self._progress = ""
        self._counters: list[str] = []
        self._stage_line = ""
        self._rows: list[tuple[str, ...]] = []
        self._losses: list[float] = []
        self._every = 1  # steps of one point of the curve
        self._num_losses = 0

    def step(self, moment: Moment) -> None:
        if moment.components:
            self._write([moment.line, *moment.components])
        place = say.step_place(moment.event, moment.num_steps)
        self._progress = "  ".join([place, *say.pace_counters(moment.event)])
        self._counters = say.step_counters(moment.event, moment.num_skipped)
        self._keep(as_number(moment.event.get("train_loss")))
        self._draw(is_last=moment.event.get("step") == moment.num_steps)

    def stage(self, event: Fields) -> None:
        is_end = event.get("state") == "end"
        self._stage_line = "" if is_end else say.stage_line(event)
        self._draw()

    def evaluated(self, event: Fields) -> None:
        self._rows.append(say.eval_cells(event))
        self._draw(is_last=True)

    def _keep(self, loss: float | None) -> None:
        """Keep a loss for the curve, of long runs every second, fourth ... one."""
        self._num_losses += 1
        if loss is not None and self._num_losses % self._every == 0:
            self._losses.append(loss)
        if len(self._losses) > CURVE_POINTS:
            self._losses, self._every = self._losses[1::2], 2 * self._every

    def close(self) -> None:
        if self._stage_line or self._progress:
            self._stage_line = ""
            self._draw(is_last=True)

    def _draw(self, *, is_last: bool = False) -> None:
        now = time.monotonic()
        if now - self._drawn_at < NOTEBOOK_SECONDS and not is_last:
            return
        self._drawn_at = now
        head = [self._progress, "  ".join(self._counters), self._stage_line]
        text = [clean(line) for line in head if line]
        table = [say.EVAL_HEADS, *self._rows] if self._rows else []
        body = "".join(f"<div>{html.escape(line)}</div>" for line in text) + _curve(self._losses)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(clean(cell))}</td>' for cell in row)}</tr>" for row in self._rows
        )
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in say.EVAL_HEADS)
        body += f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
        plain = "\n".join([*text, *("  ".join(f"{clean(cell):>12}" for cell in row) for row in table)])
        self._display.show(plain, body)


def _curve(losses: Sequence[float]) -> str:
    """The training loss as a small SVG with its first and last value; empty before there are two."""
    if len(losses) < 2:
        return ""
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0
    width, height = 480, 96
    points = " ".join(
        f"{width * place / (len(losses) - 1):.1f},{4 + (height - 8) * (high - loss) / span:.1f}"
        for place, loss in enumerate(losses)
    )
    return (
        f'<div><svg width="{width}" height="{height}" role="img" aria-label="training loss">'
        f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/></svg>'
        f"<div>training loss {losses[0]:.4g} to {losses[-1]:.4g}</div></div>"
    )


class EnduringConsole(Console):
    """Rich ends the program on a broken pipe; a run must continue without a reader."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads this terminal any more")


class LiveScreen:
    """A bar and the step's numbers at the bottom of a terminal; lines that stay scroll above them."""

    def __init__(self, stream: TextIO, width: int | None = None) -> None:
        self._console = EnduringConsole(
            file=stream, width=width, force_terminal=True, highlight=False, markup=False, emoji=False
        )
        self._live = self._new_live()
        self._drawn_at = -math.inf
        self._bar: list[RenderableType] = []
        self._stage_line = ""

    def lines(self, lines: list[str], *, wraps: bool = True) -> None:
        for line in lines:
            for part in _wrapped(line, self._console.width) if wraps else [line]:
                self._console.print(Text(_printable(part, self._console.file)), soft_wrap=not wraps)

    def step(self, moment: Moment) -> None:
        if moment.components:
            self.lines([moment.line, *moment.components])
        now = time.monotonic()
        if now - self._drawn_at < REDRAW_SECONDS and moment.event.get("step") != moment.num_steps:
            return
        self._drawn_at = now
        self._bar = self._picture(moment)
        self._draw()

    def stage(self, event: Fields) -> None:
        self._stage_line = "" if event.get("state") == "end" else say.stage_line(event)
        self._draw()

    def evaluated(self, event: Fields) -> None:
        self.lines([say.eval_line(event)])

    def close(self) -> None:
        self._bar, self._stage_line = [], ""
        self._live.stop()
        self._live = self._new_live()  # the old one, started again, would erase as many lines above it as it was high

    def _new_live(self) -> Live:
        # No refreshing thread: nothing changes between two steps, and a hung run should look hung.
        return Live(console=self._console, auto_refresh=False, transient=True)

    def _draw(self) -> None:
        stage = Text(_printable(self._stage_line, self._console.file), no_wrap=True, overflow="ellipsis")
        self._live.start()
        self._live.update(Group(*self._bar, *([stage] if self._stage_line else [])), refresh=True)

    def _picture(self, moment: Moment) -> list[RenderableType]:
        done, total = as_number(moment.event.get("step")) or 0.0, moment.num_steps
        place = say.step_place(moment.event, total)
        bar = Table.grid(expand=True, padding=(0, 2, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        pace = "  ".join([place, *say.pace_counters(moment.event)])
        strip = ProgressBar(total=max(total, 1), completed=done, complete_style="cyan", finished_style="cyan")
        bar.add_row(strip, Text(pace))
        counters = _filled(say.step_counters(moment.event, moment.num_skipped), self._console.width)
        return [bar, *(Text(_printable(line, self._console.file), no_wrap=True, overflow="crop") for line in counters)]


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
        verbose: bool = False,
    ) -> None:
        """`tells_stops` is off where the error that stopped the run is printed anyway.

        `verbose` adds what nobody needs to act on: components of the first steps, shapes, details, checkpoints, and a
        line every `telemetry.log_steps` steps in a pipe.
        """
        self._stream = stream or sys.stdout
        self._verbose = verbose
        self.prompt = ""  # of the first sample, for the command that tries the student
        self._tells_stops = tells_stops
        self._screen = _screen_for(mode, self._stream, width)
        self._num_steps = 0
        self._num_skipped = 0
        self._log_steps = 10
        self._temperature: float | None = None

    def handle(self, event: Mapping[str, Any]) -> None:
        """Show one event. Unknown events are ignored."""
        with self._while_someone_reads():
            match event.get("event"):
                case "step":
                    self._screen.step(self._moment(event))
                case "stage":
                    self._screen.stage(event)
                case "eval":
                    self._screen.evaluated(event)
                case _:
                    self._screen.lines(self._lines(event))

    def finish(self, summary: Mapping[str, Any], report: object = None, folder: object = None) -> None:
        """The last block: the result of the run, the path of the report, and the command to type next."""
        with self._while_someone_reads():
            self._screen.close()
            self._screen.lines(["", *summary_lines(summary, report, verbose=self._verbose)])
            if folder is not None and summary.get("status") == "done":
                self._screen.lines(next_lines(folder, self.prompt), wraps=False)

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
            components=(
                say.component_lines(event, temperature, self._num_steps)
                if self._verbose and place <= _FIRST_STEPS
                else []
            ),
            is_due=place == self._num_steps or (self._verbose and place % self._log_steps == 0),
        )

    def _lines(self, event: Mapping[str, Any]) -> list[str]:
        match event.get("event"):
            case "run_start":
                self._begin(event)
                return say.start_lines(event, verbose=self._verbose)
            case "first_forward":
                self._temperature = as_number(event.get("temperature"))
                return say.first_forward_lines(event) if self._verbose else []
            case "teacher_quantised":
                return [say.quantised_line(event)]
            case "note":
                return [say.note_line(event)] if self._verbose or not event.get("detail") else []
            case "advice":
                return [say.advice_line(event)]
            case "gradients":
                return [say.gradients_line(event)]
            case "phase":
                return [say.phase_line(event)]
            case "rollouts":
                return [say.rollouts_line(event)]
            case "router":
                return [say.router_line(event)]
            case "checkpoint":
                return [say.checkpoint_line(event)] if self._verbose else []
            case "guard":
                return [say.guard_line(event)]
            case "sample":
                self.prompt = self.prompt or clean(event.get("prompt"))
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


class UpdatedDisplay:
    """One part of a notebook's output, replaced by each `show`."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str, page: str) -> None:
        picture = {"text/plain": text, "text/html": page}
        if self._handle is None:
            display = importlib.import_module("IPython.display").display
            self._handle = display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)


# -- errors and lines of text ----------------------------------------------------------------------------


def render_error(error: StillroomError, stream: TextIO | None = None) -> None:
    """Show an error: what happened, where, what to try, and the exit code."""
    out = stream or sys.stderr
    rows = [("what", error.what), *([("where", error.where)] if error.where else [])]
    rows += [("try" if index == 0 else "or", text.removeprefix("or ")) for index, text in enumerate(error.advice)]
    columns = _columns(out)
    parts = [error.title, "", *(line for row in rows for line in _labelled(*row, columns))]
    parts += ["", f"exit code {error.exit_code}"]
    out.write("\n".join(_printable(part, out) for part in parts) + "\n")
    out.flush()


def _columns(stream: TextIO) -> int | None:
    """The width of a terminal. None for a file or a pipe: there a sentence stays one line, which grep finds whole."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _labelled(label: str, text: str, columns: int | None) -> list[str]:
    lines = clean(text, keep_lines=True).splitlines() or [""]
    if columns is not None:
        width = max(min(columns, ERROR_WIDTH) - 9, 20)
        lines = [part for line in lines for part in textwrap.wrap(line, width) or [""]]
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
        if "teacher_context" in document:
            context = "".join(text for text, _ in _shown([(document["teacher_context"], False)]))
            console.print(f"-- before the first scored text the teacher reads:\n{context}\n-- and the student:")
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
