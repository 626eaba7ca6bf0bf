"""The command that follows a run from another terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli.app import app, echo
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.telemetry.console import ConsoleView
    from stillroom.telemetry.events import Event
    from stillroom.telemetry.record import Follower

_EVERY_SECONDS = 0.5
_LATE_EVENTS = 200  # of what a run wrote before it was watched


@app.command(short_help="Follow a run from another terminal.")
def watch(
    run: Annotated[Path, typer.Argument(help="folder of a run; one that has not begun yet is waited for")],
    wait: Annotated[bool, typer.Option(help="wait for a run that has not begun, and follow one that goes on")] = True,
    progress: Annotated[bool, typer.Option(help="live progress on a terminal")] = True,
) -> None:
    """Follow a run: what it has done so far, then each event as it is written, until it ends.

    Reads the run's log and changes nothing. Ctrl-C ends the watching, not the run.
    """
    from stillroom.remote import is_in_store
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
            echo("stopped watching; the run goes on", err=True)


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
        time.sleep(_EVERY_SECONDS)


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
