"""Commands that show: data, presets, what a run left behind, and what models write."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stillroom.cli.main import AllowAddress, AsJson, Bos, Device, TrustCode, app, echo, print_json, wanted_bos
from stillroom.config import load, parse_assignments, preset_names, preset_text
from stillroom.core.errors import ConfigError
from stillroom.telemetry.wording import clean

if TYPE_CHECKING:
    from stillroom.models.generate import Continuation, Conversation, Writer
    from stillroom.telemetry.console import ConsoleView
    from stillroom.telemetry.record import Event, Follower


@app.command(short_help="Show what would be trained on.")
def data(
    spec: Annotated[str, typer.Argument(help="file, glob, folder, hf:NAME, builtin:stdlib, or a run's .toml")],
    model: Annotated[
        str | None,
        typer.Option(help="whose tokenizer and chat template: folder, hub id, builtin:teacher; else the .toml's"),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=0, help="documents to show, 0: all; else 10, as JSON 100")] = None,
    max_length: Annotated[int | None, typer.Option(min=8, help="tokens in a row: show what fits")] = None,
    eval_data: Annotated[str | None, typer.Option(help="held-out data: count what stands in both")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. data.packing=rows")] = None,
    as_json: AsJson = False,
) -> None:
    """What would be trained on: shape, lengths, which characters are scored, copies, what is left out and why."""
    from stillroom.models.load import model_name

    is_config = spec.lower().endswith(".toml")
    if model is None and not is_config:
        raise ConfigError("whose tokenizer is not said", advice=["name a model: --model builtin:teacher"])
    named = {
        "data.train": None if is_config else spec,
        "student.model": model_name(model) if model is not None else None,
        "data.max_length": max_length,
        "data.eval": eval_data,
    }
    overrides = {key: value for key, value in named.items() if value is not None} | parse_assignments(set_ or [])
    config = load(spec if is_config else None, overrides=overrides).config
    from stillroom.data.preview import preview
    from stillroom.models.load import has_tokenizer, load_tokenizer

    model = config.student.model
    if not has_tokenizer(config.student, model):
        raise ConfigError(f"{model} brings no tokenizer", advice=["name the model whose tokenizer a run would use"])
    tokenizer = load_tokenizer(config.student, model)
    num_rows = rows if rows is not None else 100 if as_json else 10
    result = preview(config.data, tokenizer, num_rows=num_rows, cuts="data.max_length" in overrides)
    name = ", ".join(source.path for source in config.data.sources)
    result = {"data": name, "model": model, **result}
    if as_json:
        print_json(result)
        return
    from stillroom.telemetry.console import show_preview

    show_preview(result)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int, typer.Argument(help="step of a quarantined batch")],
    attempt: Annotated[int | None, typer.Option(help="which, where the step has several")] = None,
    device: Device = "auto",
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    as_json: AsJson = False,
) -> None:
    """Run a quarantined batch again and say where it goes wrong."""
    from stillroom.core.remote import here
    from stillroom.training.replay import replay as again
    from stillroom.training.run_folder import Trust

    trust = Trust(trust_remote_code, tuple(allow_address or ()))
    result = again(here(run, needs="all"), step, attempt_number=attempt, device=device, trust=trust)
    if as_json:
        print_json(result)
        return
    from stillroom.telemetry.show import replay_lines

    for line in replay_lines(result):
        echo(line)


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="print this one with its reasons")] = None) -> None:
    """List the presets, or print one with its reasons."""
    if name is not None:
        echo(preset_text(name).rstrip(), keep_lines=True)
        return
    width = max(len(preset) for preset in preset_names())
    for preset in preset_names():
        first = preset_text(preset).splitlines()[0].lstrip("# ")
        echo(f"{preset:<{width}}  {first}")


@app.command(short_help="Write report.html of a run, or of several.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="folder or address of a run; several share one page")
    ],
    out: Annotated[Path | None, typer.Option(help="the page; else RUN/report.html, or compared.html here")] = None,
) -> None:
    """Write (or rewrite) report.html of a run, or one page that compares several."""
    from stillroom.core.files import is_in_store
    from stillroom.core.remote import add, as_url, here
    from stillroom.report import write_report, write_reports

    folders = [here(run, needs="record") for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if not (folder / "events.jsonl").exists():
            raise ConfigError(f"{run} holds no run: there is no events.jsonl", advice=["give the folder of a run"])
    if len(runs) == 1 and out is None:
        page = write_report(folders[0])
        add(runs[0], page)
        echo(f"{as_url(runs[0])}/{page.name}" if is_in_store(runs[0]) else str(page))
        return
    echo(str(write_reports(folders, out or Path("compared.html"))))


# -- texts of several models side by side, while they are written ------------------------------------------


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


# -- watch: follow a run from another terminal -------------------------------------------------------------


_WATCH_SECONDS = 0.5
_LATE_EVENTS = 200  # of what a run wrote before it was watched


@app.command(short_help="Follow a run from another terminal.")
def watch(
    run: Annotated[Path, typer.Argument(help="folder of a run; one that has not begun yet is waited for")],
    wait: Annotated[bool, typer.Option(help="wait for a run that has not begun, and follow a running one")] = True,
    progress: Annotated[bool, typer.Option(help="live progress on a terminal")] = True,
) -> None:
    """Follow a run: what it has done so far, then each event as it is written, until it ends.

    Reads the run's log and changes nothing. Ctrl-C ends the watching, not the run.
    """
    from stillroom.core.files import is_in_store
    from stillroom.telemetry.console import ConsoleView
    from stillroom.telemetry.record import Follower

    if is_in_store(run):
        raise ConfigError(
            "a run in a store sends its log at evaluations and checkpoints: there is nothing to follow",
            advice=[f"look at what is there: stillroom report {run}", "or watch it on the machine that trains"],
        )
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file", advice=["give the folder of a run"])
    follower = Follower(run / "events.jsonl")
    if not wait and not follower.path.exists():
        raise ConfigError(f"{run} holds no run: there is no events.jsonl", advice=["give the folder of a run"])
    with ConsoleView("auto" if progress else "plain") as view:
        try:
            _follow(follower, view, run, waits=wait)
        except KeyboardInterrupt:
            view.close()
            echo("stopped watching; the run continues", err=True)


def _follow(follower: Follower, view: ConsoleView, run: Path, *, waits: bool) -> None:
    """Show events until the run ends or nobody reads; without `waits`, those that are there."""
    num_restarts, is_first = 0, True
    while True:
        last = _show_new(follower, view, only_late=is_first or follower.num_restarts > num_restarts)
        num_restarts = follower.num_restarts
        if last == "run_end":
            _finish(view, run)
            return
        if not waits or not view.is_read:
            return
        if is_first and not follower.path.exists():
            echo(f"waiting for {run} to begin", err=True)
        is_first = False
        time.sleep(_WATCH_SECONDS)


def _show_new(follower: Follower, view: ConsoleView, *, only_late: bool) -> str:
    """Show the new events and return the kind of the last. `only_late`: of many, the start and the latest."""
    shown: Iterable[Event] = follower.new_events()
    if only_late:
        late: deque[Event] = deque(maxlen=_LATE_EVENTS)
        start, num_events = None, 0
        for event in shown:
            start = event if event.get("event") == "run_start" else start
            late.append(event)
            num_events += 1
        if num_events > len(late):
            view.handle(start or {})
            view.handle({"event": "note", "text": f"{num_events - len(late):,} earlier events are not shown"})
        shown = late
    kind = ""
    for event in shown:
        view.handle(event)
        kind = str(event.get("event"))
    return kind


def _finish(view: ConsoleView, run: Path) -> None:
    """The result, where the run wrote one."""
    from stillroom.telemetry.record import read_object

    summary, report = read_object(run / "summary.json", []), run / "report.html"
    if summary:
        view.finish(summary, report if report.exists() else None)


# -- generate and chat -------------------------------------------------------------------------------------


Temperature = Annotated[float, typer.Option(help="0: the most probable token each time")]
TopP = Annotated[float, typer.Option(help="draw from the most probable tokens that hold this share; 1: from all")]
Seed = Annotated[int, typer.Option(help="of the sampling")]
Against = Annotated[str | None, typer.Option(help="a second model that is asked the same, such as the teacher")]


@app.command(short_help="Continue prompts, or answer them.")
def generate(
    model: Annotated[str, typer.Argument(help="folder of a model or a run, hub id, or builtin:teacher")],
    prompt: Annotated[
        list[str], typer.Option(help="text to continue, or a question where the model has a chat template; repeatable")
    ],
    against: Against = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it stands, without a chat template")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="length of the continuation")] = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stream: Annotated[bool, typer.Option("--stream", help="print while it is written, one prompt at a time")] = False,
    bos: Bos = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue prompts, all at once; a model with a chat template answers them.

    With --against a second model continues them too: beside the first on a wide terminal, else below it.
    """
    if stream and as_json:
        raise ConfigError("--stream prints text and --json one object", advice=["leave one of them out"])
    from stillroom.models.generate import Sampling, open_writer
    from stillroom.precision.device import find_device

    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    Sampling(temperature, top_p, seed)  # refuse before anything is loaded
    names = {"student": model} if against is None else {"student": model, "teacher": against}
    where = find_device(device)
    writers = {role: open_writer(name, where, bos=wanted_bos(bos)) for role, name in names.items()}
    if stream:
        for number, text in enumerate(prompt):
            _show(number, {role: _streamed(writer, text, raw, options) for role, writer in writers.items()})
        return
    made = {role: writer.continuations(prompt, is_raw=raw, note=_note, **options) for role, writer in writers.items()}
    if as_json:
        found = {role: _object(names[role], rows) for role, rows in made.items()}
        print_json({**found["student"], **({"against": found["teacher"]} if against is not None else {})})
        return
    for number in range(len(prompt)):
        _show(number, {role: [_whole(rows[number])] for role, rows in made.items()})


_NOTHING = "the model wrote nothing: its first token ends the text"


def _show(number: int, voices: dict[str, Iterable[str]]) -> None:
    """Show one prompt's texts, below those of the prompts before it."""
    if number:
        echo("")
    show(voices)


def _object(name: str, made: Sequence[Continuation]) -> dict[str, Any]:
    rows = [{"prompt": one.prompt, "text": one.text, "ended": one.ended} for one in made]
    return {"model": name, "is_chat": made[0].is_chat, "continuations": rows}


def _whole(made: Continuation) -> str:
    """An answer alone, or a prompt with its continuation."""
    if not made.text.strip():
        _note(_NOTHING)
    return (made.text.strip() if made.is_chat else made.prompt + made.text) + made.stopped


def _note(text: str) -> None:
    echo(f"note  {text}" if text != _NOTHING else text, err=True)


def _streamed(writer: Writer, prompt: str, raw: bool, options: dict[str, Any]) -> Iterator[str]:
    """An answer, or a prompt and its continuation, in pieces."""
    ids, is_chat = writer.prompts([prompt], raw)
    is_empty = True
    if not is_chat:
        yield prompt
    for piece in writer.stream(ids, ends_turn=is_chat, note=_note, **options):
        text = piece.text.lstrip() if is_chat and is_empty else piece.text
        is_empty = is_empty and not text.strip()
        yield text + piece.stopped
    if is_empty:
        _note(_NOTHING)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="folder of a model or a run, hub id, or builtin:teacher")],
    against: Against = None,
    system: Annotated[str, typer.Option(help="a system message before the conversation")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line for each answer")] = False,
) -> None:
    """Talk to a model, and to its teacher beside it. /reset begins anew, /quit or Ctrl-D ends.

    On a terminal of 80 columns or more both answers are written beside each other. In a pipe each line is a question,
    and each answer is printed below the one before.
    """
    from stillroom.models.generate import Conversation, Sampling, open_writer
    from stillroom.precision.device import find_device

    Sampling(temperature, top_p, seed)  # refuse before anything is loaded
    names = {"student": model} if against is None else {"student": model, "teacher": against}
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    where = find_device(device)
    talks = {role: Conversation(open_writer(name, where, bos=wanted_bos(bos)), system) for role, name in names.items()}
    for role, talk in talks.items():
        if not talk.is_templated:
            _note(f'the {role} has no chat template: turns are written as "user: ..." lines')
    try:
        for question in _questions():
            if question == "/reset":
                for talk in talks.values():
                    talk.reset()
            else:
                _answer(talks, question, options, as_json)
    except KeyboardInterrupt:
        echo("")  # a conversation is ended by Ctrl-C as by /quit: nothing was to be saved


def _questions() -> Iterator[str]:
    """Lines of the input until it ends or /quit. For a person there is a prompt, and empty lines are skipped."""
    is_person = sys.stdin.isatty()
    while True:
        if is_person:
            echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(
                "a question is not UTF-8", where="input", advice=["convert it: iconv -t utf-8"]
            ) from error
        if not line or line.strip() == "/quit":
            if is_person and not line:
                echo("", err=True)
            return
        if line.strip() or not is_person:
            yield line.strip()


def _answer(talks: dict[str, Conversation], question: str, options: dict[str, Any], as_json: bool) -> None:
    # An empty line is answered by an empty line, so that answers in a pipe stay beside their questions.
    voices = {role: talk.ask(question, note=_note, **options) if question else () for role, talk in talks.items()}
    texts = {role: "".join(pieces) for role, pieces in voices.items()} if as_json else show(voices)
    for role, talk in talks.items():
        if question and "positions are full" in talk.ended:
            _note(f"{role}: {talk.ended}; /reset begins anew")
    if as_json:
        ends = {role: talk.ended if question else "" for role, talk in talks.items()}
        answers = {role: {"answer": text.strip(), "ended": ends[role]} for role, text in texts.items()}
        print_json({"question": question, **answers}, indent=None)
        sys.stdout.flush()
