"""From the words of a command line to an exit code: every end is told once."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import typer

from stillroom import threads
from stillroom.cli.app import app
from stillroom.ends import ending_politely, fault_of
from stillroom.errors import ConfigError, StillroomError


def _with_dashes(arguments: list[str]) -> list[str]:
    """`--max_steps` means `--max-steps`; values and `--set a_b=c` stay as they are."""
    out = []
    for argument in arguments:
        if argument.startswith("--") and "_" in argument:
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        out.append(argument)
    return out


_STOPPED_AT_ONCE = 130  # Ctrl-C outside of training, and a second one within it
_NOBODY_READS = 141  # what a shell reports of a command whose output was closed


def main(arguments: list[str] | None = None) -> None:
    """Run a command; every end has an exit code, and every bad end one screen of explanation."""
    threads.wait_passively()  # no command has loaded torch yet
    words = _with_dashes(list(sys.argv[1:] if arguments is None else arguments))
    try:
        with ending_politely():
            code = app(args=words or ["--help"], standalone_mode=False)
    except StillroomError as error:
        code = _tell(error, words)
    except (BrokenPipeError, SystemExit):  # the latter is what typer makes of the former
        code = _NOBODY_READS
    except KeyboardInterrupt:
        code = _STOPPED_AT_ONCE
    except Exception as error:  # noqa: BLE001 - the one place above everything: nothing else reaches a user
        code = _tell(_usage_error(error) or fault_of(error, None), words)
    if code == _STOPPED_AT_ONCE:
        _say("stopped at once; `stillroom resume RUN` continues a run that had saved a checkpoint")
    _let_go_of_closed_pipes()
    if code:
        raise SystemExit(code)


def _tell(error: StillroomError, words: list[str]) -> int:
    """One screen about an end, and with --json the same as an object. Answers with the exit code."""
    from stillroom.telemetry.console import render_error

    with contextlib.suppress(OSError):  # nobody is there to read it: the exit code still tells
        if "--json" in words:
            shown = {"error": error.what, "where": error.where, "advice": list(error.advice)}
            typer.echo(json.dumps({**shown, "exit_code": error.exit_code}))
        render_error(error)
    return error.exit_code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def _usage_error(error: Exception) -> ConfigError | None:
    """A word of the command line that is not understood, without what a terminal would obey."""
    explain = getattr(error, "format_message", None)
    if explain is None:
        return None
    command = getattr(getattr(error, "ctx", None), "command_path", "stillroom")
    return ConfigError(explain(), where="command line", advice=[f"{command} --help"])


def _let_go_of_closed_pipes() -> None:
    """What is still buffered for a reader that is gone would end the process with a complaint of Python's."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
