"""The command that plans: what a run takes and costs, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stillroom.cli.app import (
    AsJson,
    Assignments,
    ConfigFile,
    Device,
    EvalData,
    Preset,
    StudentModel,
    TeacherModel,
    TrainData,
    app,
    echo,
    print_json,
)
from stillroom.config import load, parse_assignments
from stillroom.config.given import refuse_gaps, unread_notes

if TYPE_CHECKING:
    from stillroom.planning.plan import Plan


@app.command(short_help="Say what a run takes, and what makes it fit.")
def plan(
    config: ConfigFile = None,
    device_memory: Annotated[
        str | None, typer.Option(help="plan for so much, e.g. 16GB or 15.9GiB; else for what is free here")
    ] = None,
    card: Annotated[str | None, typer.Option(help="plan for a named card: T4, V100, P100, L4, A100 or H100")] = None,
    processes: Annotated[int, typer.Option(min=1, help="processes that share the run; bytes are of one")] = 1,
    strategy: Annotated[str | None, typer.Option(help="auto, ddp or fsdp; else train.strategy")] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    student: StudentModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="do not count the data")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="load the models and time one real step here")] = False,
    write: Annotated[Path | None, typer.Option(help="write the configuration that fits, as TOML")] = None,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run takes, by part, before any weight is loaded, and what makes it fit.

    The models are built from their configurations as shapes without memory, and one micro-batch is run on them: what is
    kept for the backward pass is what autograd keeps. Where the run does not fit, changes are proposed in order of
    harm, each with what it saves and costs, and --write stores the configuration that fits. Exit code 0 if the run fits
    or can be made to, else 2.
    """
    from stillroom.planning.plan import make_plan
    from stillroom.planning.sizes import parse_bytes
    from stillroom.planning.target import find_target, with_processes

    bound = parse_bytes(device_memory) if device_memory is not None else None
    named = {"teacher.model": teacher, "student.model": student, "data.train": data, "data.eval": eval_data}
    given = {key: value for key, value in named.items() if value is not None}
    is_demo = config is None and preset is None and not given
    loaded = load(config, preset="demo" if is_demo else preset, overrides=given | parse_assignments(set_ or []))

    refuse_gaps(loaded.config)

    def say(subject: str) -> None:
        if not as_json:
            echo(f"looking at {subject} ...", err=True)

    train = loaded.config.train
    where = find_target(device, bound, card)
    target = with_processes(where, processes, strategy or train.strategy, train.shard_size)
    made = make_plan(loaded.config, target, is_quick=quick, probes=probe, tell=say)
    if as_json:
        print_json(made.to_dict())
    else:
        _print(made, (*loaded.notes, *unread_notes(loaded.config)))
    if write is not None:
        _write(made, write, is_quiet=as_json)
    if not made.is_possible:
        raise typer.Exit(2)


def _print(made: Plan, notes: tuple[str, ...]) -> None:
    from stillroom.telemetry.checks import wrapped
    from stillroom.telemetry.plan import plan_lines

    lines = [line for note in notes for line in wrapped("note  ", note)]
    for line in [*lines, *plan_lines(made.to_dict())]:
        echo(line)


def _write(made: Plan, path: Path, *, is_quiet: bool) -> None:
    from stillroom.errors import CannotSave
    from stillroom.files import reason_of, write_atomically
    from stillroom.planning.toml import toml_lines

    if not made.is_possible:
        echo(f"{path} is not written: nothing makes the run fit", err=True)
        return
    try:
        text = "\n".join(toml_lines(made.fitted.config.to_dict())) + "\n"
        write_atomically(path, text.encode("utf-8"))
    except OSError as error:
        raise CannotSave(f"cannot write {path}: {reason_of(error)}", where="--write") from error
    if not is_quiet:
        echo(f"written: {path}")
