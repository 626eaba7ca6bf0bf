"""The typer application, and options and output shared by several commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from stillroom.api import SETTING
from stillroom.config import Loaded, load, parse_assignments, preset_names
from stillroom.config.load import refuse_gaps
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

Bos = Annotated[
    str, typer.Option(metavar="WHEN", help="add a begin-of-text token: auto (as the tokenizer does), true or false")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda or cuda:1; auto uses a GPU if there is one")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
Progress = Annotated[
    bool, typer.Option("--progress/--no-progress", show_default=False, help="show live progress on a terminal")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="also print shapes, loss terms of the first steps, details and checkpoints"),
]
MaxMinutes = Annotated[
    float | None, typer.Option(metavar="N", help="save and stop after N minutes with exit code 75; then resume")
]

# Of the commands that read a configuration.
Preset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="settings to start from; `stillroom presets` lists them", autocompletion=_presets_beginning
    ),
]
TeacherModel = Annotated[
    str | None, typer.Option(metavar="MODEL", help="large model: folder, hub id or builtin:teacher")
]
StudentModel = Annotated[
    str | None, typer.Option(metavar="MODEL", help="small model: folder, hub id or builtin:student")
]
TrainData = Annotated[
    str | None, typer.Option(metavar="DATA", help="training text: file, glob, hf:NAME or builtin:stdlib")
]
EvalData = Annotated[
    str | None, typer.Option(metavar="DATA", help="held-out text; without it a share of --data is held out")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="any setting, e.g. train.learning_rate=1e-4; repeatable"),
]
ConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="TOML or JSON file; without it the embedded demo")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="folder or address of a run")]


# Of the commands that read a run's folder, which may be somebody else's.
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run code of models and plug-ins that the run's folder names")
]
AllowAddress = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-address",
        "--allow-base",
        metavar="URL",
        help="server or store that the run's folder may name; repeatable",
    ),
]


def settings_of(assignments: list[str] | None, **options: Any) -> dict[str, Any]:
    """Settings given by options, each under its key in `SETTING`, and by --set. Options not given are left out."""
    given = {SETTING[name]: value for name, value in options.items() if value is not None}
    return given | parse_assignments(assignments or [])


def load_or_demo(path: Path | None, preset: str | None, assignments: list[str] | None, **options: Any) -> Loaded:
    """Load a configuration with the options that were given; if nothing is named, the embedded demo."""
    is_demo = path is None and preset is None and all(value is None for value in options.values())
    overrides = settings_of(assignments, **options)
    loaded = load(path, preset="demo" if is_demo else preset, overrides=overrides)
    refuse_gaps(loaded.config)
    return loaded


def wanted_bos(word: str) -> Any:
    if word not in _BOS:
        raise ConfigError(f"unknown value: --bos {word}", where="--bos", advice=["auto, true or false"])
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
