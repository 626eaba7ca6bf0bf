"""Commands that train, and commands about finished runs: distill, resume, diagnose, compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.api import Listeners, is_first_process, num_processes, reported
from stillroom.cli.exit import fault_of
from stillroom.cli.main import (
    AllowAddress,
    AsJson,
    Assignments,
    ConfigFile,
    Device,
    EvalData,
    Preset,
    StudentModel,
    TeacherModel,
    TrainData,
    TrustCode,
    app,
    echo,
    print_json,
)
from stillroom.config import load, parse_assignments, shortened
from stillroom.config.load import refuse_gaps, refuse_unread
from stillroom.config.schema import FAULTS
from stillroom.core.errors import ConfigError, StillroomError
from stillroom.core.files import new_run_folder
from stillroom.core.remote import refuse_url

if TYPE_CHECKING:
    from stillroom.training.finish import Result


# Settings that make a run differ from the embedded demo, which trains baselines too.
_NOT_THE_DEMO = ("teacher.", "student.", "data.", "objectives.")

_INJECT_HELP = f"faults on purpose, e.g. nan_weight@40,teacher_nan@60x5 (xN: N attempts). Known: {', '.join(FAULTS)}"


AcceptChangedInputs = Annotated[
    bool,
    typer.Option(
        "--accept-changed-inputs", help="resume although the data, the teacher or the starting student is another"
    ),
]


@app.command()
def distill(
    config: ConfigFile = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    student: StudentModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    out: Annotated[
        Path | None, typer.Option(help="folder or address (s3://...) of the run; an unfinished one is resumed")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="optimizer steps")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, fp16-mixed, fp16-master, fp16-split ...")] = None,
    device: Device = "auto",
    seed: Annotated[int | None, typer.Option(help="random seed")] = None,
    dry_run: Annotated[bool, typer.Option(help="five real steps with evaluation, save and report")] = False,
    max_minutes: Annotated[float | None, typer.Option(help="checkpoint and stop after N minutes, exit code 75")] = None,
    strict: Annotated[
        bool, typer.Option(help="halt at the first value that is not finite; refuse settings that nothing reads")
    ] = False,
    inject: Annotated[str, typer.Option(help=_INJECT_HELP)] = "",
    accept_changed_inputs: AcceptChangedInputs = False,
    allow_base: Annotated[
        str | None, typer.Option(help="an address (s3://...) that an adapter may name for its base model")
    ] = None,
    set_: Assignments = None,
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
        "teacher.allow_base": allow_base,
        "student.allow_base": allow_base,
    }
    overrides: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if strict:
        overrides["guard.on_nonfinite"] = "halt"
    overrides.update(parse_assignments(set_ or []))
    is_demo = config is None and preset is None and not any(key.startswith(_NOT_THE_DEMO) for key in overrides)
    loaded = load(config, preset="demo" if is_demo else preset, overrides=overrides)
    refuse_gaps(loaded.config)
    if strict:
        refuse_unread(loaded.config)
    if dry_run:
        loaded = shortened(loaded)
    if num_processes() > 1 and (is_demo or out is None):
        raise ConfigError(
            "several processes train one run in one folder; the demo is three runs, and without --out there is none",
            advice=["name a configuration or a preset, and the folder with --out"],
        )
    folder = out or new_run_folder(config.stem if config else preset or "demo")
    accepts: dict[str, Any] = {"accept_changed_inputs": accept_changed_inputs}

    def job(place: Path, listeners: Listeners) -> Result:
        if is_demo and not dry_run and not inject:
            from stillroom.demo import run_demo

            return run_demo(loaded.config, place, device=device, listeners=listeners, **accepts)
        from stillroom.training.distill import distill as run

        return run(
            loaded.config, place, device=device, inject=inject, listeners=listeners, notes=loaded.notes, **accepts
        )

    if is_demo:
        refuse_url(folder, "the demo, which is three runs,", "--out")
    _run_and_report(job, folder, as_json=as_json, progress=progress)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="folder or address of a run")],
    device: Device = "auto",
    max_minutes: Annotated[float | None, typer.Option(help="checkpoint and stop after N minutes, exit code 75")] = None,
    strategy: Annotated[str | None, typer.Option(help="auto, ddp or fsdp, where there are several processes")] = None,
    shard_size: Annotated[
        int | None, typer.Option(min=0, help="with fsdp: processes that hold one copy; 0: all; else train.shard_size")
    ] = None,
    accept_changed_inputs: AcceptChangedInputs = False,
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    progress: Annotated[bool, typer.Option(help="live progress on a terminal")] = True,
    as_json: AsJson = False,
) -> None:
    """Continue a run, bit for bit.

    A run whose data, teacher or starting student is not what it was when the run began ends with exit code 25.
    """
    accepts: dict[str, Any] = {"accept_changed_inputs": accept_changed_inputs}

    def job(place: Path, listeners: Listeners) -> Result:
        from stillroom.demo import is_demo_run, resume_demo
        from stillroom.training.distill import resume as resume_run
        from stillroom.training.run_folder import Trust

        if is_demo_run(place):
            return resume_demo(place, device=device, max_minutes=max_minutes, listeners=listeners, **accepts)
        return resume_run(
            place,
            device=device,
            max_minutes=max_minutes,
            strategy=strategy,
            shard_size=shard_size,
            trust=Trust(trust_remote_code, tuple(allow_address or ())),
            listeners=listeners,
            **accepts,
        )

    _run_and_report(job, run, as_json=as_json, progress=progress)


def _run_and_report(job: Callable[[Path, Listeners], Result], folder: Path, *, as_json: bool, progress: bool) -> None:
    """Run a job, show its events, write the report and print the result. One in a store is sent there at the end."""
    try:
        result, where = reported(job, folder, "quiet" if as_json else "auto" if progress else "plain")
    except (StillroomError, BrokenPipeError):
        raise
    except Exception as error:
        raise fault_of(error, folder) from error
    if as_json and is_first_process():
        with contextlib.suppress(BrokenPipeError):
            print_json({"folder": where, "already_finished": result.already_finished, **result.summary})


# -- after a run: what went wrong in it, and how two runs differ -------------------------------------------


_DIAGNOSE = """Say what went wrong in a run, or what could be better, and which setting to change.

Reads events.jsonl, config.json and summary.json of a run that is finished, stopped or still running. Each finding
names the steps, the numbers it rests on, and a setting; the most likely root cause is first. A problem has harmed the
result, a warning may have, a hint costs time. A .toml or .json file is searched for harmful settings alone.

Exit code 0, whether or not something is found; 2 where the run or the file cannot be read.
"""


@app.command(help=_DIAGNOSE, short_help="Say what went wrong in a run, and what to change.")
def diagnose(
    run: Annotated[Path, typer.Argument(help="folder or address of a run, or a configuration (.toml, .json)")],
    preset: Annotated[str | None, typer.Option(help="of a configuration: the preset it is based on")] = None,
    as_json: AsJson = False,
) -> None:
    from stillroom.core.files import is_in_store
    from stillroom.doctor.diagnose import config_lines
    from stillroom.doctor.rules import Settings, judge_settings

    if is_in_store(run) or run.is_dir() or run.suffix not in (".toml", ".json"):
        _diagnose_run(run, as_json)
        return
    from stillroom.config import load

    findings = judge_settings(Settings(load(run, preset=preset).config.to_dict()))
    if as_json:
        print_json({"config": str(run), "findings": [finding.to_dict() for finding in findings]})
        return
    for line in config_lines(str(run), findings):
        echo(line)


def _diagnose_run(run: Path, as_json: bool) -> None:
    from stillroom.core.files import is_in_store
    from stillroom.core.locks import RUN_LOCK, is_held
    from stillroom.core.remote import here, may_be_owned
    from stillroom.doctor.diagnose import as_dict, read_case, run_lines
    from stillroom.doctor.diagnose import diagnose as find_causes

    is_owned = may_be_owned(run) if is_in_store(run) else is_held(run / RUN_LOCK)
    case = read_case(here(run, needs="record"), is_owned=is_owned)
    findings = find_causes(case)
    if as_json:
        print_json(as_dict(case, findings))
        return
    for line in run_lines(case, findings):
        echo(line)


_COMPARE = """Say how two runs differ: settings, versions, course, and results with their intervals.

Only what differs is listed. Results have 95 % intervals over documents where the runs have them: `overlap` means that
the difference may be chance. Exit code 0; 2 where a run cannot be read.
"""


@app.command(help=_COMPARE, short_help="Say how two runs differ, in settings and results.")
def compare(
    first: Annotated[Path, typer.Argument(help="folder or address of a run")],
    second: Annotated[Path, typer.Argument(help="folder or address of another run")],
    as_json: AsJson = False,
) -> None:
    from stillroom.core.remote import here
    from stillroom.doctor.diagnose import compare as find_differences
    from stillroom.doctor.diagnose import compare_lines, read_case

    if first.resolve() == second.resolve():
        raise ConfigError(f"{first} is given twice", advice=["give the folders of two runs"])
    one, other = (read_case(here(run, needs="record")).record for run in (first, second))
    found = find_differences(one, other)
    if as_json:
        print_json(found)
        return
    for line in compare_lines(found):
        echo(line)
