"""The typer application, and options and output shared by several commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stillroom.config import preset_names
from stillroom.core.errors import ConfigError

app = typer.Typer(
    name="stillroom",
    help="Distil a large language model into a small one: fault-tolerant knowledge distillation.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        echo(f"stillroom {version('stillroom')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself."""


def _presets_beginning(incomplete: str) -> list[str]:
    """Complete `--preset` in a shell."""
    return [name for name in preset_names() if name.startswith(incomplete)]


_BOS = {"auto": "auto", "true": True, "false": False}

Bos = Annotated[str, typer.Option(help="begin-of-text token: auto (where the tokenizer adds it), true or false")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU where there is one")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]

# Of the commands that read a configuration.
Preset = Annotated[
    str | None,
    typer.Option(help="named settings to start from, see `stillroom presets`", autocompletion=_presets_beginning),
]
TeacherModel = Annotated[str | None, typer.Option(help="folder, hub id, or builtin:teacher")]
StudentModel = Annotated[str | None, typer.Option(help="folder, hub id, or builtin:student")]
TrainData = Annotated[str | None, typer.Option(help="file, glob, hf:NAME, or builtin:stdlib")]
EvalData = Annotated[str | None, typer.Option(help="held-out data; else a share of --data is held out")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. train.learning_rate=1e-4")]
ConfigFile = Annotated[Path | None, typer.Argument(help="TOML or JSON file; without it the embedded demo")]


# Of the commands that read a run's folder, which may be somebody else's.
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code that the run's folder names: of models and plug-ins")
]
AllowAddress = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-address", "--allow-base", help="an address (server, store) that the run's folder may name; repeatable"
    ),
]


def wanted_bos(word: str) -> Any:
    if word not in _BOS:
        raise ConfigError(f"--bos {word} is none of auto, true and false", where="--bos", advice=["--bos auto"])
    return _BOS[word]


def echo(text: object, *, err: bool = False, nl: bool = True, keep_lines: bool = False, fg: str | None = None) -> None:
    """Print one line, or several with `keep_lines`. All that commands print passes here.

    It is printed without control characters and known keys: names, logs and models' texts are from anywhere.
    """
    from stillroom.telemetry.wording import clean

    typer.secho(clean(text, keep_lines=keep_lines), err=err, nl=nl, fg=fg)


def print_json(value: dict[str, Any], indent: int | None = 1) -> None:
    from stillroom.core.files import strict

    echo(json.dumps(strict(value), indent=indent, allow_nan=False), keep_lines=True)
