"""Run a command line; end with an exit code and print any error once."""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from stillroom.cli.main import app, echo, print_json
from stillroom.config.load import nearest_key
from stillroom.core.errors import CommandUnusable, Fault, Interrupted, StillroomError, UnknownCommand, masked
from stillroom.core.files import reason_of
from stillroom.core.shortages import explained

# -- unexpected errors and signals -------------------------------------------------------------------------


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise `Interrupted` on SIGTERM and SIGHUP. Training replaces these handlers by its own."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(
            f"received {signal.Signals(number).name}",
            advice=["give the same command again", "or, where a run had begun: stillroom resume RUN"],
        )

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers: list[signal.Signals] = [getattr(signal, name) for name in names]
    # Only signals with the default handler: nohup ignores SIGHUP, and an embedding program may have handlers.
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, end)
    except ValueError:  # not in the main thread
        numbers = []
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def fault_of(error: BaseException, folder: Path | None) -> StillroomError:
    """Our error for an unexpected one. For a bug, write the traceback to a file."""
    shortage = explained(error, str(folder or ""))
    if shortage is not None:
        return shortage
    return Fault(
        f"{type(error).__name__}: {reason_of(error)}",
        where=_keep_traceback(error, folder),
        advice=[
            "report it with that file: it holds the traceback and the versions, no data",
            *([f"a run that had saved a checkpoint can be continued: stillroom resume {folder}"] if folder else []),
        ],
    )


def _keep_traceback(error: BaseException, folder: Path | None) -> str:
    """Write the traceback into the run's folder, or the folder of temporary files. Return its path."""
    text = masked("".join(traceback.format_exception(error)))
    header = masked(
        f"{datetime.now(UTC).isoformat()}\npython {platform.python_version()}, {platform.platform()}\n{sys.argv!r}\n"
    )
    begin = f"traceback-{datetime.now():%Y%m%d-%H%M%S}-"
    places = [folder] if folder is not None and folder.is_dir() else []
    for place in (*places, Path(tempfile.gettempdir())):
        try:
            handle, name = tempfile.mkstemp(".txt", begin, place)  # a name nobody can guess, for the user alone
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(header + text)
        except OSError:
            continue
        return name
    sys.stderr.write(header + text)
    return "above: no folder takes a file"


def with_dashes(arguments: list[str]) -> list[str]:
    """`--max_steps` means `--max-steps`; values and `--set a_b=c` stay as they are."""
    out = []
    for argument in arguments:
        if argument.startswith("--") and "_" in argument:
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        out.append(argument)
    return out


def set_allocator() -> None:
    """Let blocks of GPU memory grow, before torch is imported: rows of varying length fragment 15 GB otherwise.

    By its older name, which every torch reads: 2.9 ignores this setting under the newer one. What the user set stays.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ and sys.platform == "linux":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


# -- running a command -------------------------------------------------------------------------------------


_STOPPED_AT_ONCE = 130  # Ctrl-C outside of training, and a second one within it
_TRAINING = ("distill", "resume", "quantise")
_NOBODY_READS = 141  # as a shell reports a command whose output was closed
_OTHER_NAMES = {"train": "distill", "run": "distill", "evaluate": "eval", "quantize": "quantise", "convert": "export"}


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Print an explanation of any error, and exit with its code."""
    words = with_dashes(list(sys.argv[1:] if arguments is None else arguments))
    code = run_to_its_end(lambda: app(args=words or ["--help"], prog_name="stillroom", standalone_mode=False), words)
    if code:
        raise SystemExit(code)


def run_to_its_end(command: Callable[[], int | None], words: Sequence[str]) -> int:
    """Run a command. Print an explanation of any error, and return the exit code.

    `words` is its command line: with --json an error is printed as an object too.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings would interleave with our log
    set_allocator()
    try:
        with interrupt_on_signals():
            code = command()
    except StillroomError as error:
        code = _print_error(error, words)
    except BrokenPipeError:
        code = _NOBODY_READS
    except SystemExit as end:  # of 0: a shell's completion; else typer's form of a broken pipe
        code = _NOBODY_READS if end.code else 0
    except KeyboardInterrupt:
        code = _STOPPED_AT_ONCE
    except BaseException as error:  # noqa: BLE001 - the outermost handler, also of panics in Rust: no traceback is shown
        code = _print_error(_usage_error(error, words) or fault_of(error, None), words)
    if code == _STOPPED_AT_ONCE:
        trains = bool(words) and words[0] in _TRAINING
        _say("stopped" + ("; `stillroom resume RUN` continues a run that had saved a checkpoint" if trains else ""))
    _abandon_closed_pipes()
    return code or 0


def _print_error(error: StillroomError, words: Sequence[str]) -> int:
    """Print an error, with --json also as an object. Return the exit code."""
    from stillroom.telemetry.console import render_error

    with contextlib.suppress(OSError):  # the output is closed; the exit code remains
        if "--json" in words:
            shown = {"error": error.what, "where": error.where, "advice": list(error.advice)}
            print_json({**shown, "exit_code": error.exit_code}, indent=None)
        render_error(error)
    return error.exit_code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        echo(text, err=True)


def _usage_error(error: BaseException, words: Sequence[str]) -> CommandUnusable | None:
    """The error of a command line that typer does not understand; None for any other error."""
    explain = getattr(error, "format_message", None)
    if explain is None:
        return None
    context, option = getattr(error, "ctx", None), str(getattr(error, "option_name", "") or "")
    program, command = getattr(context, "command_path", "stillroom"), getattr(context, "command", None)
    known = {} if option else getattr(command, "commands", {})
    if name := next((word for word in words if known and not word.startswith("-") and word not in known), ""):
        near = difflib.get_close_matches(name, [*known, *_OTHER_NAMES], n=1)
        hint = [f"did you mean {program} {_OTHER_NAMES.get(near[0], near[0])}?"] if near else []
        advice = [*hint, f"{program} --help lists all commands"]
        return UnknownCommand(f"there is no command {name!r}", where="command line", advice=advice)
    setting = nearest_key(option.lstrip("-").replace("-", "_"))
    takes_settings = any(parameter.name == "set_" for parameter in getattr(command, "params", ()))
    is_setting = takes_settings and setting and "." in setting
    hint = [f"any setting is given with --set: --set {setting}=VALUE"] if is_setting else []
    return CommandUnusable(explain(), where="command line", advice=[*hint, f"{program} --help"])


def _abandon_closed_pipes() -> None:
    """Send buffered output of a closed pipe to the null device; else Python complains when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
