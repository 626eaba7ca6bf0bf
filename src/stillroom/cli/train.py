"""Commands that train, and commands about finished runs: distill, resume, diagnose, compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.api import Listeners, is_first_process, num_processes, reported, resume_job
from stillroom.cli.exit import fault_of
from stillroom.cli.main import (
    AllowAddress,
    AsJson,
    Assignments,
    ConfigFile,
    Device,
    EvalData,
    MaxMinutes,
    Preset,
    Progress,
    RunFolder,
    StudentModel,
    TeacherModel,
    TrainData,
    TrustCode,
    Verbose,
    app,
    echo,
    print_json,
    settings_of,
)
from stillroom.config import load, shortened
from stillroom.config.load import refuse_gaps, refuse_unread
from stillroom.config.schema import FAULTS
from stillroom.core.errors import ConfigError, StillroomError
from stillroom.core.files import new_run_folder
from stillroom.core.remote import refuse_url

if TYPE_CHECKING:
    from stillroom.training.finish import Result


# Settings that make a run differ from the embedded demo, which trains baselines too.
_NOT_THE_DEMO = ("teacher.", "student.", "data.", "objectives.")

_INJECT_HELP = f"inject faults for a test, e.g. nan_weight@40,teacher_nan@60x5 (xN: N attempts): {', '.join(FAULTS)}"


AcceptChangedInputs = Annotated[
    bool,
    typer.Option("--accept-changed-inputs", help="resume even if the data, the teacher or the first student changed"),
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
        Path | None,
        typer.Option(metavar="DIR", help="folder or address (s3://...) of the run; an unfinished run is resumed"),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(metavar="N", help="number of optimizer steps")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="MODE", help="auto, fp32, bf16-mixed, fp16-mixed, fp16-master, fp16-split ...")
    ] = None,
    device: Device = "auto",
    seed: Annotated[int | None, typer.Option(metavar="N", help="random seed")] = None,
    dry_run: Annotated[
        bool, typer.Option(show_default=False, help="take five steps, evaluate, save and write the report")
    ] = False,
    max_minutes: MaxMinutes = None,
    strict: Annotated[
        bool,
        typer.Option(show_default=False, help="stop at the first non-finite value; refuse settings without effect"),
    ] = False,
    inject: Annotated[str, typer.Option(metavar="FAULT@STEP", help=_INJECT_HELP)] = "",
    accept_changed_inputs: AcceptChangedInputs = False,
    allow_base: Annotated[
        str | None, typer.Option(metavar="URL", help="address that an adapter may name for its base model")
    ] = None,
    set_: Assignments = None,
    progress: Progress = True,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Distil a teacher into a student. Without arguments: run the embedded demo.

    The run's folder (--out, else a new one below runs/) gets checkpoints, the event log, the student as a Hugging Face
    folder and report.html.
    """
    options = {
        "train.max_steps": max_steps,
        "train.seed": seed,
        "train.max_minutes": max_minutes,
        "precision.mode": precision,
        "teacher.allow_base": allow_base,
        "student.allow_base": allow_base,
        "guard.on_nonfinite": "halt" if strict else None,
    }
    overrides = {key: value for key, value in options.items() if value is not None}
    overrides |= settings_of(set_, teacher=teacher, student=student, data=data, eval_data=eval_data)
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
    _run_and_report(job, folder, as_json=as_json, progress=progress, verbose=verbose)


@app.command()
def resume(
    run: RunFolder,
    device: Device = "auto",
    max_minutes: MaxMinutes = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="continue a finished run to N steps")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="with several processes: auto, ddp or fsdp")
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="with fsdp: processes that share one copy of the student; 0: all"),
    ] = None,
    accept_changed_inputs: AcceptChangedInputs = False,
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    progress: Progress = True,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Continue an interrupted run, bit for bit.

    A run whose data, teacher or first student changed since it began ends with exit code 25.
    """

    def job(place: Path, listeners: Listeners) -> Result:
        return resume_job(
            place,
            listeners,
            device=device,
            max_minutes=max_minutes,
            max_steps=max_steps,
            strategy=strategy,
            shard_size=shard_size,
            trusts=(trust_remote_code, tuple(allow_address or ())),
            accept_changed_inputs=accept_changed_inputs,
        )

    _run_and_report(job, run, as_json=as_json, progress=progress, verbose=verbose)


def _run_and_report(
    job: Callable[[Path, Listeners], Result], folder: Path, *, as_json: bool, progress: bool, verbose: bool
) -> None:
    """Run a job, show its events, write the report and print the result. A run in a store is sent there at the end."""
    try:
        result, where = reported(job, folder, "quiet" if as_json else "auto" if progress else "plain", verbose=verbose)
    except (StillroomError, BrokenPipeError):
        raise
    except Exception as error:
        raise fault_of(error, folder) from error
    if as_json and is_first_process():
        with contextlib.suppress(BrokenPipeError):
            print_json({"folder": where, "already_finished": result.already_finished, **result.summary})


# -- after a run: what went wrong in it, and how two runs differ -------------------------------------------


@app.command(short_help="Find what went wrong in a run and what to change.")
def diagnose(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="folder or address of a run, or a configuration (.toml, .json)")
    ],
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="for a configuration: the preset it starts from")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what went wrong in a run, or what could be better, and which setting to change.

    Reads the log and the summary of a run that is finished, stopped or still running. Each finding names its steps, its
    numbers and a setting; the most likely cause comes first. A problem harmed the result, a warning may have, a hint
    costs time. Of a .toml or .json file only the settings are checked.

    Exit code 0, whether or not something is found; 2 if the run or the file cannot be read.
    """
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


@app.command(short_help="Compare two runs: settings and results.")
def compare(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="folder or address of a run")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="folder or address of another run")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, versions, training, and results with their intervals.

    Only what differs is listed. `overlap` after two results means that their 95 % intervals over documents overlap, so
    the difference may be chance. Exit code 0; 2 if a run cannot be read.
    """
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
