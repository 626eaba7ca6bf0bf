"""Commands that check: this machine and its arithmetic, a configuration, and the resumption of a run."""

from __future__ import annotations

import os
import sys
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
from stillroom.config import Config, Loaded, load, parse_assignments
from stillroom.config.given import refuse_gaps

if TYPE_CHECKING:
    from stillroom.doctor.selftest import Outcome, Trial


@app.command(short_help="Say what is wrong before a run is begun.")
def doctor(
    config: ConfigFile = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    student: StudentModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="leave out the real step")] = False,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Look at machine, installation, configuration, models, data and tokenizers before a run is begun.

    Ends with one real step in the chosen precision beside the same step in FP32. Each finding is green (sound), amber
    (works, could be better) or red (will fail, or give a wrong student), and ends in a command or a setting to try.
    Nothing is trained and nothing is left behind. Exit code 0, or 2 where something is red.
    """
    from stillroom.doctor.examine import examine

    named = {"teacher.model": teacher, "student.model": student, "data.train": data, "data.eval": eval_data}
    given = {key: value for key, value in named.items() if value is not None}

    def read() -> Loaded:
        overrides = given | parse_assignments(set_ or [])
        is_demo = config is None and preset is None and not given
        loaded = load(config, preset="demo" if is_demo else preset, overrides=overrides)
        refuse_gaps(loaded.config)
        return loaded

    def say(subject: str) -> None:
        if not as_json:
            echo(f"looking at {subject} ...", err=True)

    report = examine(read, device=device, is_quick=quick, on_subject=say)
    if as_json:
        print_json(report.to_dict())
    else:
        from stillroom.telemetry.checks import doctor_lines

        for level, line in doctor_lines(report.to_dict()):
            echo(line, fg=_COLOURS.get(level) if "NO_COLOR" not in os.environ else None)
    if report.of("red"):
        raise typer.Exit(2)


_COLOURS = {"red": typer.colors.RED, "amber": typer.colors.YELLOW, "green": typer.colors.GREEN}


@app.command(short_help="Check numerics on this machine.")
def selftest(
    device: Device = "auto",
    only: Annotated[list[str] | None, typer.Option(help="a group of trials, repeatable; see the table")] = None,
    as_json: AsJson = False,
) -> None:
    """Check numerics on this machine; under a minute on two cores.

    Every divergence and the loss of the head against float64 and finite differences; every row kernel against the plain
    one; every precision policy against float64; the guard against injected faults; a run that is killed and resumed.
    Exit code 0, or 20 where something is wrong: it is named.
    """
    from stillroom.doctor.selftest import GROUPS, selftest
    from stillroom.engine.building.device import find_device
    from stillroom.errors import ConfigError, SelftestFailed
    from stillroom.telemetry.checks import selftest_lines

    if strange := sorted(set(only or ()) - set(GROUPS)):
        advice = [f"one of {', '.join(GROUPS)}"]
        raise ConfigError(f"there is no group of trials {', '.join(strange)}", where="--only", advice=advice)
    show = _Progress(is_quiet=as_json)
    report = selftest(find_device(device), only=tuple(only or ()), on_trial=show.trial)
    show.end()
    if as_json:
        print_json(report.to_dict())
        if report.failed:
            raise typer.Exit(SelftestFailed.exit_code)
        return
    for line in selftest_lines(report.to_dict()):
        echo(line)
    if report.failed:
        names = [f"{one.group}: {one.name}" for one in report.failed]
        raise SelftestFailed(
            f"{len(names)} of {len(report.outcomes)} trials failed, the first: {names[0]}: {report.failed[0].why}",
            where=f"on {report.device}",
            advice=_advice(report.failed),
        )


def _advice(failed: tuple[Outcome, ...]) -> list[str]:
    advice = []
    if all(one.group == "kernels" and one.name.startswith("compiled") for one in failed):
        from stillroom.objectives.head.kernel_build import build

        advice += [
            "use the plain kernel: --set objectives.kernel=plain, or STILLROOM_KERNEL=plain",
            f"have it built again: rm {build().path}, then stillroom selftest",
        ]
    else:
        advice.append("install the versions of constraints.txt, and run the self-test again")
    return [*advice, "tell us: stillroom selftest --json > selftest.json"]


@app.command("verify-resume", short_help="Prove that a killed and resumed run is the uncut one.")
def verify_resume(
    config: ConfigFile = None,
    preset: Preset = None,
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps N of each run")] = 8,
    kill_at: Annotated[int, typer.Option(min=0, help="the step k that is never reached; 0: the middle")] = 0,
    device: Device = "auto",
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. precision.mode=fp16-split")] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a run which is killed and resumed ends as one that was not, to the last bit.

    Trains N steps of the configuration, then N steps that a SIGKILL ends before step k and `resume` continues, each in
    a process of its own, and compares the record of every step, the state and every tensor. Then changes the data, the
    teacher and the student in turn: resuming must be refused. Works in a temporary folder: runs of yours are not
    touched. Exit code 0, or 25 with the first tensor that differs or the input that was not looked at.
    """
    chosen = _loaded(config, preset, set_)
    from stillroom.doctor.resume import verify_resume
    from stillroom.errors import ResumeDiffers
    from stillroom.telemetry.checks import resume_lines

    def tell(text: str) -> None:
        if not as_json:
            echo(text, err=True)

    proof = verify_resume(chosen, num_steps=steps, kill_at=kill_at or None, device=device, tell=tell)
    if as_json:
        print_json(proof.to_dict())
        if not proof.holds:
            raise typer.Exit(ResumeDiffers.exit_code)
        return
    for line in resume_lines(proof.to_dict()):
        echo(line)
    if not proof.holds:
        first = proof.first_tensor or proof.differences[0]
        if first.kind == "input":
            raise ResumeDiffers(
                f"a resumed run does not look at its {first.name}", where=first.what, advice=["see what it says"]
            )
        raise ResumeDiffers(
            f"the resumed run is not the run without a break: the first {first.kind} that differs is {first.name}",
            where=first.what,
            advice=[
                "take out what draws or adds in no fixed order: --set train.compile=off, --device cpu",
                "see whether the machine computes alike twice: stillroom selftest",
            ],
        )


# What makes the embedded demo small enough to be trained three times in a minute.
_SMALL_DEMO = {"data.train_share": 0.01, "data.max_length": 64, "train.batch_size": 4, "train.compile": "off"}


def _loaded(path: Path | None, preset: str | None, assignments: list[str] | None) -> Config:
    overrides = parse_assignments(assignments or [])
    if path is None and preset is None:
        return load(None, preset="demo", overrides={**_SMALL_DEMO, **overrides}).config
    chosen = load(path, preset=preset, overrides=overrides).config
    refuse_gaps(chosen)
    return chosen


class _Progress:
    """One line that is rewritten on a terminal, a line for each group elsewhere. On stderr: stdout has the result."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._is_live = sys.stderr.isatty()
        self._group = ""

    def trial(self, trial: Trial, number: int, num_trials: int) -> None:
        if self._is_quiet:
            return
        if self._is_live:
            self._rewind()
            echo(f"{number} of {num_trials}  {trial.group}: {trial.name}"[:78], err=True, nl=False)
        elif trial.group != self._group:
            echo(f"{number} of {num_trials}  {trial.group}", err=True)
        self._group = trial.group

    def end(self) -> None:
        if self._is_live and not self._is_quiet:
            self._rewind()

    def _rewind(self) -> None:
        sys.stderr.write("\r\x1b[2K")  # our own escape: go to the line's begin and clear it
