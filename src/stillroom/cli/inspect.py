"""Commands that show what is there: data, presets, a quarantined batch, the report, a running run."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli.main import (
    AllowAddress,
    AsJson,
    Assignments,
    Device,
    Progress,
    TrustCode,
    Verbose,
    app,
    echo,
    print_json,
)
from stillroom.config import load, parse_assignments, preset_names, preset_text
from stillroom.core.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.telemetry.console import ConsoleView
    from stillroom.telemetry.record import Event, Follower


@app.command(short_help="Show what a run would train on.")
def data(
    spec: Annotated[
        str, typer.Argument(metavar="DATA", help="file, glob, folder, hf:NAME, builtin:stdlib or a .toml of a run")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="model whose tokenizer and chat template to use; else that of the .toml"),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="documents to show; 0: all; by default 10, with --json 100"),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=8, metavar="N", help="tokens of a row; also shows what does not fit")
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(metavar="DATA", help="held-out text: count the records that are in both")
    ] = None,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would train on.

    The shape and lengths of the records, which characters are scored, copies, and what is left out and why.
    """
    from stillroom.models.load import model_name

    is_config = spec.lower().endswith(".toml")
    if model is None and not is_config:
        raise ConfigError("a model is missing, for its tokenizer", advice=["--model builtin:teacher"])
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
        raise ConfigError(f"{model} has no tokenizer", advice=["name the model whose tokenizer a run would use"])
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
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    step: Annotated[int, typer.Argument(metavar="STEP", help="step of a quarantined batch")],
    attempt: Annotated[int | None, typer.Option(metavar="N", help="attempt to replay, if the step had several")] = None,
    device: Device = "auto",
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    as_json: AsJson = False,
) -> None:
    """Run a quarantined batch again and find where it fails."""
    from stillroom.core.remote import here
    from stillroom.training.replay import replay as again
    from stillroom.training.run_folder import Trust

    trust = Trust(trust_remote_code, tuple(allow_address or ()))
    result = again(here(run, needs="all"), step, attempt_number=attempt, device=device, trust=trust)
    if as_json:
        print_json(result)
        return
    from stillroom.telemetry.results import replay_lines

    for line in replay_lines(result):
        echo(line)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="preset to print, with its reasons")] = None,
) -> None:
    """List the presets, or print one with its reasons."""
    if name is not None:
        echo(preset_text(name).rstrip(), keep_lines=True)
        return
    width = max(len(preset) for preset in preset_names())
    for title, names in (("presets", _own_presets()), ("numbers of earlier training scripts", _EARLIER)):
        echo(f"{title}:")
        for preset in names:
            first = preset_text(preset).splitlines()[0].lstrip("# ")
            for number, line in enumerate(textwrap.wrap(first, 78 - width - 4)):
                echo(f"  {preset if not number else '':<{width}}  {line}")
    echo("print one: stillroom presets NAME; use it: stillroom distill --preset NAME")


# Presets that hold the numbers of scripts and guides from before Stillroom; they come after its own.
_EARLIER = ("stable", "ultra-stable", "conservative", "balanced", "fp16-safe", "student-aware", "quantumbench")
_FIRST = ("base", "instruct", "cross-tokenizer", "sar", "demo")


def _own_presets() -> list[str]:
    others = [name for name in preset_names() if name not in (*_FIRST, *_EARLIER)]
    return [*_FIRST, *others]


@app.command(short_help="Write the HTML report of one or several runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="folder or address of a run; several share one page")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="page to write; by default RUN/report.html, or compared.html for several"),
    ] = None,
) -> None:
    """Write report.html of a run, or one page that compares several runs."""
    from stillroom.core.files import is_in_store
    from stillroom.core.remote import add, as_url, here
    from stillroom.report import write_report, write_reports

    folders = [here(run, needs="record") for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if not (folder / "events.jsonl").exists():
            raise _not_a_run(run)
    if len(runs) == 1 and out is None:
        page = write_report(folders[0])
        add(runs[0], page)
        echo(f"{as_url(runs[0])}/{page.name}" if is_in_store(runs[0]) else str(page))
        return
    echo(str(write_reports(folders, out or Path("compared.html"))))


def _not_a_run(folder: Path) -> ConfigError:
    lacks = "it has no events.jsonl" if folder.is_dir() else "there is no such folder"
    return ConfigError(f"{folder} is not a Stillroom run folder: {lacks}", advice=["give the folder of a run"])


# -- watch: follow a run from another terminal -------------------------------------------------------------


_WATCH_SECONDS = 0.5
_LATE_EVENTS = 200  # of what a run wrote before it was watched


@app.command(short_help="Follow a run from another terminal.")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, which may not have begun yet")],
    wait: Annotated[bool, typer.Option(help="wait for new events; --no-wait prints what is there and ends")] = True,
    progress: Progress = True,
    verbose: Verbose = False,
) -> None:
    """Follow a run from another terminal until it ends.

    Shows what the run has done so far, then each new event. Reads the log and changes nothing: Ctrl-C ends the
    watching, not the run.
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
        raise _not_a_run(run)
    with ConsoleView("auto" if progress else "plain", verbose=verbose) as view:
        try:
            _follow(follower, view, run, waits=wait)
        except KeyboardInterrupt:
            view.close()
            echo("stopped watching; the run continues", err=True)


def _follow(follower: Follower, view: ConsoleView, run: Path, *, waits: bool) -> None:
    """Show events until the run ends or nobody reads; without `waits`, those that are there."""
    is_first = True
    while True:
        last = _show_new(follower, view, is_first=is_first)
        if last == "run_end":
            _finish(view, run)
            return
        if not waits or not view.is_read:
            return
        if is_first and not follower.path.exists():
            echo(f"waiting for {run} to begin", err=True)
        is_first = False
        time.sleep(_WATCH_SECONDS)


def _show_new(follower: Follower, view: ConsoleView, *, is_first: bool) -> str:
    """Show the new events and return the kind of the last. Of many, the latest; of several starts, the last.

    A resumed run replaces its log: what stands before its last start was shown already, unless this `is_first`.
    """
    late: deque[Event] = deque(maxlen=_LATE_EVENTS)
    num_restarts, num_events, start = follower.num_restarts, 0, None
    for event in follower.new_events():
        if event.get("event") == "run_start":
            start = event
            if not is_first and follower.num_restarts > num_restarts:
                late.clear()
                num_events = 0
        late.append(event)
        num_events += 1
    if start is not None and not any(event is start for event in late):
        view.handle(start)
    if num_events > len(late):
        view.handle({"event": "note", "text": f"{num_events - len(late):,} earlier events are not shown"})
    kind = ""
    for event in late:
        kind = str(event.get("event"))
        if kind != "run_start" or event is start:
            view.handle(event)
    return kind


def _finish(view: ConsoleView, run: Path) -> None:
    """The result, where the run wrote one."""
    from stillroom.telemetry.record import read_object

    summary, report = read_object(run / "summary.json", []), run / "report.html"
    if summary:
        view.finish(summary, report if report.exists() else None, run)
