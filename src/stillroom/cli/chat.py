"""Commands that try a model: generate and chat, alone or next to a second model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stillroom.cli.main import AsJson, Bos, Device, app, echo, print_json, wanted_bos
from stillroom.core.errors import ConfigError
from stillroom.telemetry.wording import clean

if TYPE_CHECKING:
    from stillroom.models.generate import Continuation, Conversation, Writer

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


# -- generate and chat -------------------------------------------------------------------------------------


Temperature = Annotated[
    float, typer.Option(metavar="T", help="sampling temperature; 0: always the most probable token")
]
TopP = Annotated[
    float, typer.Option(metavar="P", help="sample from the most probable tokens that hold this share; 1: all tokens")
]
Seed = Annotated[int, typer.Option(metavar="N", help="random seed of the sampling")]
Against = Annotated[
    str | None, typer.Option(metavar="MODEL", help="second model that gets the same prompts, e.g. the teacher")
]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="folder of a model or a run, hub id or builtin:teacher")
]


@app.command(short_help="Let a model continue or answer prompts.")
def generate(
    model: ModelName,
    prompt: Annotated[
        list[str], typer.Option(metavar="TEXT", help="text to continue, or question for a chat model; repeatable")
    ],
    against: Against = None,
    raw: Annotated[bool, typer.Option("--raw", help="do not use the chat template")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="most tokens to write")] = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stream: Annotated[bool, typer.Option("--stream", help="print tokens as they come, prompt by prompt")] = False,
    bos: Bos = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Let a model continue prompts; a model with a chat template answers them.

    With --against a second model does the same, in a second column on a wide terminal, else below.
    """
    if stream and as_json:
        raise ConfigError("--stream prints text and --json one object", advice=["leave one of them out"])
    names = {"student": model} if against is None else {"student": model, "teacher": against}
    _say_to_person(f"loading {' and '.join(names.values())} ...")
    from stillroom.models.generate import Sampling, open_writer
    from stillroom.precision.device import find_device

    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    Sampling(temperature, top_p, seed)  # refuse before anything is loaded
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


_NOTHING = "the model wrote no word: its text is empty or white space alone"


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
    model: ModelName,
    against: Against = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="system message before the conversation")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="most tokens of an answer")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object a line for each answer")] = False,
) -> None:
    """Chat with a model, or with two at once (--against).

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the chat. With --against the answers are in two
    columns on a terminal of 80 columns or more, else one below the other. In a pipe each line is a question.
    """
    names = {"student": model} if against is None else {"student": model, "teacher": against}
    _say_to_person(f"loading {' and '.join(names.values())} ...")
    from stillroom.models.generate import Conversation, Sampling, open_writer
    from stillroom.precision.device import find_device

    Sampling(temperature, top_p, seed)  # refuse before anything is loaded
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    where = find_device(device)
    talks = {role: Conversation(open_writer(name, where, bos=wanted_bos(bos)), system) for role, name in names.items()}
    for role, talk in talks.items():
        if not talk.is_templated:
            whose = role if against is not None else "model"
            _note(f'the {whose} has no chat template: turns are written as "user: ..." lines')
    _say_to_person(f"chat with {' and '.join(names.values())}\n{_HELP}")
    for question in _questions():
        if question in ("/clear", "/reset"):
            for talk in talks.values():
                talk.reset()
            _say_to_person("the conversation was cleared")
        elif question == "/help":
            echo(_HELP, err=True, keep_lines=True)
        elif question.startswith("/") and question[1:].isalpha() and sys.stdin.isatty():
            _say_to_person(f"{question} is not a command\n{_HELP}")
        else:
            try:
                _answer(talks, question, options, as_json)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                echo("")
                _say_to_person("the answer was stopped; ask again, or end with Ctrl-D")


_HELP = "/help shows this, /clear forgets the conversation\nCtrl-C stops an answer, /quit or Ctrl-D ends the chat"


def _say_to_person(text: str) -> None:
    if sys.stdin.isatty():
        echo(text, err=True, keep_lines=True)


def _questions() -> Iterator[str]:
    """Lines of the input until it ends or /quit. For a person there is a prompt, and empty lines are skipped."""
    is_person = sys.stdin.isatty()
    while True:
        if is_person:
            echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            if not is_person:
                raise
            echo("", err=True)  # drops the line that was being typed, as a shell does
            continue
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
    # An empty line is answered by an empty line, so that the answers in a pipe match the questions line by line.
    voices = {role: talk.ask(question, note=_note, **options) if question else () for role, talk in talks.items()}
    texts = {role: "".join(pieces) for role, pieces in voices.items()} if as_json else show(voices)
    for role, talk in talks.items():
        if question and "positions are full" in talk.ended:
            _note(f"{role}: {talk.ended}; /clear begins again")
        elif question and not as_json and not texts[role].strip():
            _note(_NOTHING if len(talks) == 1 else f"{role}: {_NOTHING}")
    if as_json:
        ends = {role: talk.ended if question else "" for role, talk in talks.items()}
        answers = {role: {"answer": text.strip(), "ended": ends[role]} for role, text in texts.items()}
        print_json({"question": question, **answers}, indent=None)
        sys.stdout.flush()
