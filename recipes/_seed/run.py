"""Carry out what a guide's command asks: build the configuration, say what is changed, run, and say how it ended."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _seed.blocks import end_lines, stop_lines
from _seed.harm import Harm, settings_and_lines
from _seed.log import SeedLog
from _seed.output import say
from _seed.stand_ins import Chosen
from _seed.views import View
from stillroom.cli.exit import run_to_its_end
from stillroom.config import Loaded, load, parse_assignments, shortened
from stillroom.core.errors import Diverged, LossScaleAtFloor, NoBetterStudent, TooManySkips
from stillroom.core.files import new_run_folder

SET = "STILLROOM_RECIPE_SET"  # settings for every recipe, as words `key=value`


@dataclass(frozen=True)
class Order:
    """What a guide's command asks of the engine. Later settings win: preset, file, flags, harm, environment, --set."""

    name: str
    chosen: Chosen  # models and data
    preset: str | None = None
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    harms: Sequence[Harm] = ()
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Job:
    """A configuration with where it came from."""

    loaded: Loaded
    settings: dict[str, Any]  # on top of preset and file
    lines: list[str]


def main_of(make: Callable[[], tuple[Order, Callable[[str], View]]], options: argparse.Namespace) -> int:
    """Run what `make` orders, and return the exit code. Nothing that loads torch may be imported before this."""
    return run_to_its_end(lambda: carry_out(*make(), options), ())


def prepare(order: Order, options: argparse.Namespace) -> Job:
    """Build the configuration of an order."""
    harmful, lines = settings_and_lines(order.harms, is_letter=options.letter_of_the_seed)
    words = shlex.split(os.environ.get(SET, ""))
    if words:
        lines.append(f"settings of {SET}: {' '.join(words)}")
    asked = parse_assignments([*words, *options.set])
    settings = {**order.settings, **order.chosen.settings, **harmful, **asked}
    loaded = load(order.config, preset=order.preset, overrides=settings)
    return Job(
        shortened(loaded) if options.dry_run else loaded, settings, [*order.chosen.remarks, *order.remarks, *lines]
    )


def carry_out(order: Order, view_of: Callable[[str], View], options: argparse.Namespace) -> int:
    job = prepare(order, options)
    folder = Path(options.output_dir or new_run_folder(order.name))
    say(
        *job.lines,
        *job.loaded.notes,
        f"the same as: {command_of(order, job, options)} --out {shlex.quote(str(folder))}",
        "",
    )

    import stillroom
    from stillroom.precision.device import find_device

    view, log = view_of(str(find_device(options.device))), SeedLog(folder)

    def follow(event: dict[str, Any]) -> None:
        view.handle(event)
        log.handle(event)

    try:
        result = stillroom.distill(
            job.loaded.config,
            folder,
            device=options.device,
            inject=options.inject,
            on_event=follow,
            progress=False,
        )
    except NoBetterStudent as error:  # the run is complete
        say("", *end_lines(error.summary, folder))
        raise
    except (Diverged, TooManySkips, LossScaleAtFloor) as error:
        say("", *stop_lines(error, view.last_fault))
        raise
    say("", *end_lines(result.summary, folder))
    return 0


def command_of(order: Order, job: Job, options: argparse.Namespace) -> str:
    """The `stillroom distill` command that does the same."""
    words = ["stillroom", "distill"]
    if order.config is not None:
        words.append(str(order.config))
    if order.preset is not None:
        words += ["--preset", order.preset]
    for key, value in job.settings.items():
        words += ["--set", f"{key}={_value(value)}"]
    if options.device != "auto":
        words += ["--device", options.device]
    if options.inject:
        words += ["--inject", options.inject]
    if options.dry_run:
        words.append("--dry-run")
    return shlex.join(words)


def _value(value: Any) -> str:
    """A value as --set reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_quoted(one)}" for key, one in value.items()) + "}"
    return "none" if value is None else str(value)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else _value(value)
