"""The command line. Nothing heavy is imported before a command needs it: `--help` loads no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.config import load, parse_assignments, preset_names, preset_text, shortened
from stillroom.config.faults import FAULTS
from stillroom.ends import ending_politely, fault_of
from stillroom.errors import ConfigError, NoBetterStudent, StillroomError

if TYPE_CHECKING:
    from stillroom.engine.distill import Result

app = typer.Typer(
    name="stillroom",
    help="Distil a large language model into a small one, and do not fall over.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Settings that make a run something else than the embedded demo with its baselines.
_NOT_THE_DEMO = ("teacher.", "student.", "data.", "objectives.")

_INJECT_HELP = f"faults on purpose, e.g. nan_weight@40,teacher_nan@60x5 (xN: N attempts). Known: {', '.join(FAULTS)}"

_BOS = {"auto": "auto", "true": True, "false": False}

Bos = Annotated[str, typer.Option(help="begin-of-text token: auto (where the tokenizer adds it), true or false")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU where there is one")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]


@app.command()
def distill(
    config: Annotated[Path | None, typer.Argument(help="TOML or JSON file; without it the embedded demo runs")] = None,
    preset: Annotated[str | None, typer.Option(help="named settings to start from, see `stillroom presets`")] = None,
    teacher: Annotated[str | None, typer.Option(help="folder, hub id, or builtin:teacher")] = None,
    student: Annotated[str | None, typer.Option(help="folder, hub id, or builtin:student")] = None,
    data: Annotated[str | None, typer.Option(help="file, glob, hf:NAME, or builtin:stdlib")] = None,
    eval_data: Annotated[str | None, typer.Option(help="held-out data; else a share of --data is held out")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run; one with an unfinished run is resumed")] = None,
    max_steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, fp16-mixed, fp16-master, fp16-split ...")] = None,
    device: Device = "auto",
    seed: Annotated[int | None, typer.Option(help="of weights, order and rounding")] = None,
    dry_run: Annotated[bool, typer.Option(help="five real steps with evaluation, save and report")] = False,
    max_minutes: Annotated[float | None, typer.Option(help="save and stop after so long, exit code 75")] = None,
    strict: Annotated[bool, typer.Option(help="halt at the first value that is not finite")] = False,
    inject: Annotated[str, typer.Option(help=_INJECT_HELP)] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. train.learning_rate=1e-4")] = None,
    progress: Annotated[bool, typer.Option(help="live progress on a terminal")] = True,
    as_json: AsJson = False,
) -> None:
    """Distil a teacher into a student. With no argument: the embedded demo."""
    named = {
        "teacher.model": teacher,
        "student.model": student,
        "data.train": data,
        "data.eval": eval_data,
        "train.max_steps": max_steps,
        "train.seed": seed,
        "train.max_minutes": max_minutes,
        "precision.mode": precision,
    }
    overrides: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if strict:
        overrides["guard.on_nonfinite"] = "halt"
    overrides.update(parse_assignments(set_ or []))
    is_demo = config is None and preset is None and not any(key.startswith(_NOT_THE_DEMO) for key in overrides)
    loaded = load(config, preset=preset or ("demo" if is_demo else None), overrides=overrides)
    if dry_run:
        loaded = shortened(loaded)
    if _num_processes() > 1 and (is_demo or out is None):
        raise ConfigError(
            "several processes train one run in one folder; the demo is three runs, and without --out there is none",
            advice=["name a configuration or a preset, and the folder with --out"],
        )
    folder = out or Path("runs") / f"{config.stem if config else preset or 'demo'}-{datetime.now():%Y%m%d-%H%M%S}"

    def job(view: Any) -> Result:
        if is_demo and not dry_run and not inject:
            from stillroom.demo import run_demo

            return run_demo(loaded.config, folder, device=device, listeners=(view.handle,))
        from stillroom.engine.distill import distill as run

        return run(loaded.config, folder, device=device, inject=inject, listeners=(view.handle,), notes=loaded.notes)

    _run_and_report(job, folder, as_json=as_json, progress=progress)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    device: Device = "auto",
    max_minutes: Annotated[float | None, typer.Option(help="save and stop after so long, exit code 75")] = None,
    progress: Annotated[bool, typer.Option(help="live progress on a terminal")] = True,
    as_json: AsJson = False,
) -> None:
    """Continue a run, bit for bit."""

    def job(view: Any) -> Result:
        from stillroom.demo import is_demo_run, resume_demo
        from stillroom.engine.distill import resume as go_on

        listeners = (view.handle,)
        if is_demo_run(run):
            return resume_demo(run, device=device, max_minutes=max_minutes, listeners=listeners)
        return go_on(run, device=device, max_minutes=max_minutes, listeners=listeners)

    _run_and_report(job, run, as_json=as_json, progress=progress)


@app.command("eval")
def eval_(
    model: Annotated[str, typer.Option(help="folder of a model or a run, hub id, or builtin:teacher")],
    data: Annotated[str, typer.Option(help="file, glob, hf:NAME, or builtin:stdlib")],
    teacher: Annotated[str | None, typer.Option(help="compare with this model")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="tokens in a row")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="rows at once")] = 8,
    max_batches: Annotated[int, typer.Option(min=0, help="0: all")] = 0,
    bos: Bos = "auto",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Perplexity and bits per byte of a model; against a teacher also KL, agreement and acceptance rate."""
    from stillroom.assess import assess

    result = assess(
        model,
        data,
        teacher=teacher,
        max_length=max_length,
        batch_size=batch_size,
        max_batches=max_batches,
        bos=_wanted_bos(bos),
        device=device,
    )
    if as_json:
        _print_json(result)
        return
    from stillroom.telemetry.results import assessment_lines

    for line in assessment_lines(result):
        typer.echo(line)


@app.command()
def data(
    spec: Annotated[str, typer.Argument(help="file, glob, hf:NAME, or builtin:stdlib")],
    model: Annotated[str, typer.Option(help="whose tokenizer and chat template: folder, hub id, builtin:teacher")],
    rows: Annotated[int | None, typer.Option(min=0, help="documents to show, 0: all; else 5, as JSON 100")] = None,
    max_length: Annotated[int | None, typer.Option(min=8, help="tokens in a row: show what fits")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. data.packing=rows")] = None,
    as_json: AsJson = False,
) -> None:
    """What would be trained on: shape, lengths, which characters are scored, what is left out and why."""
    from stillroom.models.names import model_name

    model = model_name(model)
    named = {"data.train": spec, "student.model": model, "data.max_length": max_length}
    overrides = {key: value for key, value in named.items() if value is not None} | parse_assignments(set_ or [])
    config = load(overrides=overrides).config
    from stillroom.data.preview import preview
    from stillroom.models.load import has_tokenizer, load_tokenizer

    if not has_tokenizer(config.student, model):
        raise ConfigError(f"{model} brings no tokenizer", advice=["name the model whose tokenizer a run would use"])
    tokenizer = load_tokenizer(config.student, model)
    num_rows = rows if rows is not None else 100 if as_json else 5
    result = preview(config.data, tokenizer, num_rows=num_rows, cuts="data.max_length" in overrides)
    result = {"data": config.data.train, "model": model, **result}
    if as_json:
        _print_json(result)
        return
    from stillroom.telemetry.preview import show_preview

    show_preview(result)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="folder of a model or a run, hub id, or builtin:teacher")],
    prompt: Annotated[str, typer.Option(help="text to continue, or a question where the model has a chat template")],
    raw: Annotated[bool, typer.Option("--raw", help="continue the text as it stands, without a chat template")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="length of the continuation")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token each time")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    bos: Bos = "auto",
    device: Device = "auto",
) -> None:
    """Continue a prompt; a model with a chat template answers it."""
    from stillroom.assess import continue_text
    from stillroom.telemetry.wording import clean

    text, is_chat = continue_text(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        device=device,
        is_raw=raw,
        bos=_wanted_bos(bos),
    )
    typer.echo(clean(text.strip() if is_chat else prompt + text, keep_lines=True))
    if not text.strip():
        typer.echo("the model wrote nothing: its first token ends the text", err=True)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    step: Annotated[int, typer.Argument(help="step of a quarantined batch")],
    attempt: Annotated[int | None, typer.Option(help="which, where the step has several")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Run a quarantined batch again and say where it goes wrong."""
    from stillroom.engine.replay import replay as again

    result = again(run, step, attempt_number=attempt, device=device)
    if as_json:
        _print_json(result)
        return
    from stillroom.telemetry.results import replay_lines

    for line in replay_lines(result):
        typer.echo(line)


@app.command()
def presets(name: Annotated[str | None, typer.Argument(help="print this one with its reasons")] = None) -> None:
    """List the presets, or print one with its reasons."""
    if name is not None:
        typer.echo(preset_text(name).rstrip())
        return
    width = max(len(known) for known in preset_names())
    for known in preset_names():
        first = preset_text(known).splitlines()[0].lstrip("# ")
        typer.echo(f"{known:<{width}}  {first}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="folder of a run")]) -> None:
    """Write (or rewrite) report.html of a run."""
    from stillroom.report import write_report

    if not (run / "events.jsonl").exists():
        raise ConfigError(f"{run} holds no run: there is no events.jsonl", advice=["give the folder of a run"])
    typer.echo(str(write_report(run)))


# -- shared ----------------------------------------------------------------------------------------------


def _run_and_report(job: Callable[[Any], Result], folder: Path, *, as_json: bool, progress: bool) -> None:
    """Run a job with a view on its events, write the report, and end with the result."""
    from stillroom.telemetry.console import ConsoleView

    is_first = _num_processes() == 1 or os.environ.get("RANK", "0") == "0"
    failure: NoBetterStudent | None = None
    try:
        with ConsoleView("quiet" if as_json or not is_first else "auto" if progress else "plain") as view:
            try:
                result = job(view)
                where, summary = result.folder, result.summary
            except NoBetterStudent as error:  # a finished run with a report to write, and no success
                failure, where, summary = error, Path(str(error.folder)), dict(error.summary)
            if is_first:  # the first of several processes speaks for all
                from stillroom.report import write_report

                path = write_report(where)
                with contextlib.suppress(BrokenPipeError):  # the run is done, whoever reads about it
                    if as_json and failure is None:
                        _print_json({"folder": str(where), **summary})
                    else:
                        view.finish(summary, path)
    except (StillroomError, BrokenPipeError):
        raise
    except Exception as error:
        raise fault_of(error, folder) from error
    if failure is not None:
        raise failure


def _wanted_bos(word: str) -> Any:
    if word not in _BOS:
        raise ConfigError(f"--bos {word} is none of auto, true and false", where="--bos", advice=["--bos auto"])
    return _BOS[word]


def _num_processes() -> int:
    try:
        return int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise ConfigError("WORLD_SIZE is not a number", where="environment", advice=["unset WORLD_SIZE"]) from None


def _print_json(value: dict[str, Any]) -> None:
    from stillroom.telemetry.events import strict

    typer.echo(json.dumps(strict(value), indent=1, allow_nan=False))


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
