"""Commands other than training: check, plan, cache, eval and export."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli.main import (
    AllowAddress,
    AsJson,
    Assignments,
    Bos,
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
    wanted_bos,
)
from stillroom.config import Config, Loaded, load, parse_assignments
from stillroom.config.load import refuse_gaps, unread_notes
from stillroom.core.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.doctor.plan.plan import Plan
    from stillroom.doctor.selftest import Outcome, Trial
    from stillroom.metrics.evaluate import HeldOut
    from stillroom.teachers.cache.writer import Progress


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

    Ends with one real step in the chosen precision, compared with the same step in FP32. Each finding is green (sound),
    amber (works, could be better) or red (will fail, or give a wrong student), and ends in a command or a setting to
    try. Nothing is trained and nothing is left behind. Exit code 0, or 2 where something is red.
    """
    from stillroom.doctor.examine import examine

    named = {"teacher.model": teacher, "student.model": student, "data.train": data, "data.eval": eval_data}
    report = examine(
        lambda: _load_or_demo(config, preset, named, set_),
        device=device,
        is_quick=quick,
        on_subject=partial(_say_subject, is_quiet=as_json),
    )
    if as_json:
        print_json(report.to_dict())
    else:
        from stillroom.doctor.show import doctor_lines

        for level, line in doctor_lines(report.to_dict()):
            echo(line, fg=_COLOURS.get(level) if "NO_COLOR" not in os.environ else None)
    if report.of("red"):
        raise typer.Exit(2)


def _load_or_demo(
    path: Path | None, preset: str | None, named: Mapping[str, str | None], assignments: list[str] | None
) -> Loaded:
    """Load a configuration with the settings that have an option; if nothing is named, the embedded demo."""
    given = {key: value for key, value in named.items() if value is not None}
    is_demo = path is None and preset is None and not given
    overrides = given | parse_assignments(assignments or [])
    loaded = load(path, preset="demo" if is_demo else preset, overrides=overrides)
    refuse_gaps(loaded.config)
    return loaded


def _say_subject(subject: str, *, is_quiet: bool) -> None:
    if not is_quiet:
        echo(f"looking at {subject} ...", err=True)


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
    from stillroom.core.errors import SelftestFailed
    from stillroom.doctor.selftest import GROUPS, selftest
    from stillroom.doctor.show import selftest_lines
    from stillroom.precision.device import find_device

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
        from stillroom.losses.head.kernel import build

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
    from stillroom.core.errors import ResumeDiffers
    from stillroom.doctor.resume import verify_resume
    from stillroom.doctor.show import resume_lines

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


# -- plan: what a run takes and costs, before anything is loaded -------------------------------------------


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
    from stillroom.doctor.plan.cost import find_gpu
    from stillroom.doctor.plan.plan import find_target, make_plan, parse_bytes, with_processes

    bound = parse_bytes(device_memory) if device_memory is not None else None
    named = {"teacher.model": teacher, "student.model": student, "data.train": data, "data.eval": eval_data}
    loaded = _load_or_demo(config, preset, named, set_)
    train = loaded.config.train
    gpu = find_gpu(card) if card is not None else None
    target = with_processes(find_target(device, bound, gpu), processes, strategy or train.strategy, train.shard_size)
    tell = partial(_say_subject, is_quiet=as_json)
    made = make_plan(loaded.config, target, gpu=gpu, is_quick=quick, probes=probe, tell=tell)
    if as_json:
        print_json(made.to_dict())
    else:
        _print(made, (*loaded.notes, *unread_notes(loaded.config)))
    if write is not None:
        _write(made, write, is_quiet=as_json)
    if not made.is_possible:
        raise typer.Exit(2)


def _print(made: Plan, notes: tuple[str, ...]) -> None:
    from stillroom.doctor.show import plan_lines, wrapped

    lines = [line for note in notes for line in wrapped("note  ", note)]
    for line in [*lines, *plan_lines(made.to_dict())]:
        echo(line)


def _write(made: Plan, path: Path, *, is_quiet: bool) -> None:
    from stillroom.config.load import toml_lines
    from stillroom.core.errors import CannotSave
    from stillroom.core.files import reason_of, write_atomically

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


# -- cache: store a teacher's answers, and look at what was stored -----------------------------------------


_EVERY_SECONDS = 5.0


@app.command(short_help="Store a teacher's answers, to train from them later.")
def cache(
    what: Annotated[
        str | None, typer.Argument(metavar="CONFIG|info|verify", help="TOML or JSON file, or a word")
    ] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="a cache, after info or verify")] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder or address of the cache; one that is begun is continued")
    ] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    import_: Annotated[
        Path | None, typer.Option("--import", help="a file of log-probs that another program wrote")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="of that file: vllm, openai or distillkit")] = "vllm",
    temperature: Annotated[
        list[float] | None, typer.Option(help="repeatable: answers at several, each in a folder within DIR")
    ] = None,
    device: Device = "auto",
    max_minutes: Annotated[float, typer.Option(help="stop after so long, exit code 75; 0: no limit")] = 0.0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. teacher.signal.kind=top_k")] = None,
    as_json: AsJson = False,
) -> None:
    """Store a teacher's answers; `cache info DIR` says what is stored, `cache verify DIR` checks every checksum.

    A run then trains from them with --set teacher.cache=DIR, and the teacher is not loaded.
    """
    if what in ("info", "verify"):
        _look(what, folder, as_json=as_json)
        return
    if folder is not None or out is None:
        raise ConfigError(
            "the folder of a cache is named with --out",
            where="command line",
            advice=["stillroom cache CONFIG --out DIR", "stillroom cache info DIR", "stillroom cache verify DIR"],
        )
    named = {"teacher.model": teacher, "data.train": data, "data.eval": eval_data}
    overrides: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    overrides |= parse_assignments(set_ or [])
    overrides["teacher.cache"] = None
    loaded = load(Path(what) if what else None, preset=preset, overrides=overrides)
    refuse_gaps(loaded.config, roles=("teacher", "data"))
    if import_ is not None:
        from stillroom.training.write_cache import import_cache

        _cache_print(import_cache(loaded.config, out, import_, format_), as_json=as_json)
        return
    limits = {"device": device, "max_minutes": max_minutes, "temperatures": temperature or ()}
    _store(loaded, out, limits, as_json=as_json)


def _store(loaded: Loaded, out: Path, limits: dict[str, Any], *, as_json: bool) -> None:
    from stillroom.training.write_cache import check_config, make_cache

    check_config(loaded.config)
    tell = _Teller(is_quiet=as_json)
    for note in loaded.notes:
        tell.note(note)
    result = make_cache(loaded.config, out, tell=tell.note, on_progress=tell.progress, **limits)
    _cache_print(result, as_json=as_json)
    for other in () if as_json else result["beside"]:
        _cache_print(other, as_json=False)


class _Teller:
    """Lines on the way: notes at once, progress every few seconds and at the end."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._last = 0.0

    def note(self, text: str) -> None:
        if not self._is_quiet:
            echo(text)

    def progress(self, progress: Progress) -> None:
        is_end = progress.done_tokens >= progress.all_tokens
        if self._is_quiet or (time.monotonic() - self._last < _EVERY_SECONDS and not is_end):
            return
        self._last = time.monotonic()
        echo(
            f"{progress.done_tokens:,} of {progress.all_tokens:,} tokens  {progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.num_bytes / 1e6:,.1f} MB  {progress.eta_seconds / 60:,.1f} minutes left"
        )

    def written(self, known: Mapping[str, Any]) -> None:
        """Progress of `write`."""
        is_end = known["prompts"] >= known["of"]
        if self._is_quiet or (time.monotonic() - self._last < _EVERY_SECONDS and not is_end):
            return
        self._last = time.monotonic()
        echo(
            f"{known['prompts']:,} of {known['of']:,} prompts  {known['rows']:,} rows  {known['tokens']:,} tokens  "
            f"{known['tokens_per_second']:,.1f} tokens/s"
        )


# -- write: let a model or a server answer prompts ---------------------------------------------------------


@app.command(short_help="Let a model or a server write training data.")
def write(
    config: ConfigFile = None,
    out: Annotated[Path | None, typer.Option(help="FILE.jsonl; one that is begun is continued")] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    data: TrainData = None,
    device: Device = "auto",
    max_minutes: Annotated[float, typer.Option(help="stop after so long, exit code 75; 0: no limit")] = 0.0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting, e.g. write.samples=4")] = None,
    as_json: AsJson = False,
) -> None:
    """Let the teacher, a model or a server, answer prompts; [write] says which, how often and what is kept.

    The file is data as any other: stillroom distill --data FILE. Next to it FILE.origin says who wrote it. A command
    that was stopped or killed is continued when it is given again, and ends with the same file.
    """
    if out is None:
        raise ConfigError("the file is named with --out", where="--out", advice=["stillroom write CONFIG --out FILE"])
    named = {"teacher.model": teacher, "data.train": data}
    overrides: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    overrides |= parse_assignments(set_ or [])
    loaded = load(config, preset=preset, overrides=overrides)
    reads_data = loaded.config.write.start != "template" and not loaded.config.write.prompts
    served = frozenset({"teacher"}) if loaded.config.teacher.server else frozenset[str]()
    refuse_gaps(loaded.config, roles=("teacher", "data") if reads_data else ("teacher",), also=served)
    from stillroom.training.write import write_text

    tell = _Teller(is_quiet=as_json)
    for note in loaded.notes:
        tell.note(note)
    limits: dict[str, Any] = {"device": device, "max_minutes": max_minutes}
    result = write_text(loaded.config, out, tell=tell.note, on_progress=tell.written, **limits)
    if as_json:
        print_json(result)
        return
    from stillroom.telemetry.wording import clean

    share = "" if result["kept_share"] is None else f", {result['kept_share']:.1%} of the answers"
    lines = [
        f"written  {clean(result['file'])}",
        f"rows  {result['rows']:,}{share}",
        f"cost  {result['tokens']:,} tokens in {result['seconds']:,.1f} s, {result['tokens_per_second']:,.1f} tokens/s",
        *(f"{clean(name).replace('_', ' ')}  {count:,}" for name, count in result["counters"].items()),
        *(f"refused  {clean(text)}" for text in result["refusals"]),
        f"train on it  stillroom distill --data {clean(result['file'])}",
    ]
    for line in lines:
        echo(line)


def _look(word: str, folder: Path | None, *, as_json: bool) -> None:
    if folder is None:
        raise ConfigError(
            f"`cache {word}` needs a folder", where="command line", advice=[f"stillroom cache {word} DIR"]
        )
    from stillroom.training.write_cache import cache_info, verify_cache

    _cache_print(verify_cache(folder) if word == "verify" else cache_info(folder), as_json=as_json)


def _cache_print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    from stillroom.telemetry.wording import clean

    size, positions = result["bytes"], result["positions"]
    per = f", {result['bytes_per_position']:.1f} bytes a position" if positions else ""
    lines = [
        f"cache  {clean(result['cache'])}",
        f"holds  {clean(result['signal']['text'])}",
        f"of  {clean(result['teacher'].get('teacher', 'a teacher that is not named'))}",
        f"rows  {result['rows']:,} with {positions:,} positions in {result['shards']:,} shards",
        f"size  {size / 1e6:,.1f} MB{per}",
    ]
    if result["mean_mass"] is not None:
        lines.append(f"mass  the top tokens hold {result['mean_mass']:.4f} of the teacher's on average")
    if result["unusable_positions"]:
        lines.append(f"unusable  {result['unusable_positions']:,} positions have no answer")
    for name in ("missing_rows", "unmatched_records", "unanswered_positions", "short_positions"):
        if result.get(name):
            lines.append(f"{name.replace('_', ' ')}  {result[name]:,}")
    if result.get("verified"):
        lines.append("verified  every checksum holds")
    for line in lines:
        echo(line)


# -- eval: measure a model, alone or compared with its teacher ---------------------------------------------


_MAX_LENGTH = 256


@dataclass(frozen=True)
class _Asked:
    """What is measured. A run that is named by itself brings its text, teacher, length and begin-of-text."""

    model: str
    data: str | HeldOut
    teacher: str | None
    max_length: int
    bos: Any


@app.command("eval", short_help="Measure a model, alone or compared with its teacher.")
def eval_(
    run: Annotated[
        Path | None, typer.Argument(help="folder of a run: its student beside its teacher, on its held-out data")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="instead of RUN: folder of a model or a run, hub id, or builtin:teacher")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="file, glob, hf:NAME, or builtin:stdlib; of RUN else what it held out")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="compare with this model")] = None,
    max_length: Annotated[int | None, typer.Option(min=8, help="tokens in a row; else the run's, or 256")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="rows at once")] = 8,
    max_batches: Annotated[int, typer.Option(min=0, help="0: all")] = 0,
    blocks: Annotated[bool, typer.Option("--blocks", help="texts end to end in blocks, not each record alone")] = False,
    questions: Annotated[Path | None, typer.Option(help="JSONL of questions with answers or choices")] = None,
    tasks: Annotated[str, typer.Option(help="benchmarks of lm-eval, by name or YAML file, with commas between")] = "",
    bos: Bos = "auto",
    device: Device = "auto",
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    keep: Annotated[bool, typer.Option(help="of a run's student: write eval.json, for its report and card")] = True,
    as_json: AsJson = False,
) -> None:
    """Perplexity and bits per byte of a model, what it costs, and against a teacher KL, agreement and retention."""
    said = trust_remote_code, tuple(allow_address or ())
    asked = _asked(run, model, data, teacher, max_length, wanted_bos(bos), said)
    from stillroom.metrics.evaluate import assess
    from stillroom.models.load import run_of
    from stillroom.telemetry.record import student_sum

    names = [task.strip() for task in tasks.split(",") if task.strip()]
    owner = run_of(asked.model) if keep else None
    measured = student_sum(owner) if owner is not None else ""
    result = assess(
        asked.model,
        asked.data,
        teacher=asked.teacher,
        max_length=asked.max_length,
        batch_size=batch_size,
        max_batches=max_batches,
        bos=asked.bos,
        device=device,
        blocks=blocks,
        questions=questions,
        tasks=names,
    )
    is_share = not isinstance(asked.data, str) and asked.data.settings.eval is None
    settings = {
        "text": "the run's held-out share" if is_share else None,
        "max_length": asked.max_length, "max_batches": max_batches, "blocks": blocks, "bos": asked.bos,
        "questions": questions.name if questions is not None else None, "tasks": ", ".join(names),
    }  # fmt: skip
    kept = _kept(owner, measured, {**result, "teacher_model": asked.teacher, "settings": settings})
    if kept is not None:
        from stillroom.core.remote import add

        add(asked.model, kept)
    if as_json:
        print_json({**result, **({"kept": str(kept)} if kept else {})})
        return
    from stillroom.telemetry.show import assessment_lines
    from stillroom.telemetry.wording import clean

    for line in assessment_lines(result):
        echo(line)
    if kept:
        echo(f"kept  {clean(kept)}: `stillroom report` and `stillroom export` show it")


def _asked(
    run: Path | None,
    model: str | None,
    data: str | None,
    teacher: str | None,
    max_length: int | None,
    bos: Any,
    trusted: tuple[bool, tuple[str, ...]],
) -> _Asked:
    """Refuse what does not say which model and which text; fill in what a run knows."""
    if (run is None) == (model is None):
        what = "which model to measure is not said" if run is None else "RUN and --model are two names for one thing"
        raise ConfigError(what, where="--model", advice=["stillroom eval RUN", "stillroom eval --model M --data D"])
    if run is None:
        if data is None:
            raise ConfigError(
                "the text to measure on is not said", where="--data", advice=["--data FILE, or --data builtin:stdlib"]
            )
        return _Asked(str(model), data, teacher, max_length or _MAX_LENGTH, bos)
    from stillroom.core.remote import here
    from stillroom.training.run_folder import Trust, stored_config

    folder, trust = here(run, needs="record"), Trust(*trusted)
    config = stored_config(folder, trust=trust)
    own_text = "" if data else config.data.eval or ""
    named = {"teacher.model": "" if teacher else config.teacher.model, "data.eval": own_text}
    trust.check_addresses(named, str(run))
    length = max_length or config.data.max_length
    own_bos = config.data.bos if bos == "auto" else bos
    is_as_there = (length, own_bos) == (config.data.max_length, config.data.bos)
    text = data or _held_out(folder, config, is_as_there=is_as_there)
    return _Asked(str(run), text, teacher or config.teacher.model, length, own_bos)


def _held_out(folder: Path, config: Config, *, is_as_there: bool) -> HeldOut:
    """What the run held out, with the number of documents that its log says, to notice data that was changed."""
    from stillroom.metrics.evaluate import HeldOut
    from stillroom.telemetry.record import LoggedRun
    from stillroom.telemetry.wording import as_number, section

    known = as_number(section(LoggedRun.load(folder).start, "data").get("eval_documents")) if is_as_there else None
    return HeldOut(config.data, None if known is None else int(known))


def _kept(owner: Path | None, measured: str, result: dict[str, Any]) -> Path | None:
    """Write the figures into the run's folder. A folder that cannot be written costs a note, not the figures."""
    if owner is None or not measured:
        return None
    from stillroom.core.files import reason_of
    from stillroom.telemetry.record import write_evaluation
    from stillroom.telemetry.wording import clean
    from stillroom.training.run_folder import machine, versions

    try:
        return write_evaluation(owner, measured, {**result, "machine": machine(), "versions": versions()})
    except OSError as error:
        echo(f"note  the figures are not kept in {clean(owner)}: {clean(reason_of(error))}", err=True)
        return None


# -- export ------------------------------------------------------------------------------------------------


_FORMATS = ("hf", "gguf", "onnx")
_GGUF_TYPES = {"f32": "float32", "f16": "float16", "q8_0": "q8_0"}


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="folder of a run or a model, hub id, or builtin:student")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    format: Annotated[str, typer.Option(help="hf (a Hugging Face folder), gguf or onnx")] = "hf",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; else float32, as GGUF float16")
    ] = None,
    gguf_type: Annotated[str | None, typer.Option(help="of GGUF instead of --dtype: f32, f16 or q8_0")] = None,
    data: Annotated[str | None, typer.Option(help="compare on this text; else the run's own, or Python's")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a student for use elsewhere, with a model card. It is read back and its logits compared."""
    if format not in _FORMATS:
        raise ConfigError(f"--format {format} is none of {', '.join(_FORMATS)}", where="--format")
    form = _form(format, dtype, gguf_type)
    from stillroom.export.folder import export as write

    done = write(run, out, format=format, form=form, data=data, force=force)  # type: ignore[arg-type]
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder), "notes": list(done.notes)})
        return
    for line in export_lines(done):
        echo(line)


def _form(format: str, dtype: str | None, gguf_type: str | None) -> str | None:
    if gguf_type is None:
        return dtype
    if format != "gguf" or dtype is not None:
        raise ConfigError("--gguf-type goes with --format gguf and without --dtype", where="--gguf-type")
    if gguf_type not in _GGUF_TYPES:
        raise ConfigError(f"--gguf-type {gguf_type} is none of {', '.join(_GGUF_TYPES)}", where="--gguf-type")
    return _GGUF_TYPES[gguf_type]


def export_lines(done: Any) -> list[str]:
    """What was written and how far it is off, for a person."""
    from stillroom.telemetry.wording import clean, format_bytes

    lines = [
        f"wrote   {clean(done.folder)}  {done.format}, {done.form}, {format_bytes(done.bytes)}",
        f"read back on {done.rows} rows of {clean(done.compared_on)}: largest difference of a logit {done.largest:.2g}",
    ]
    if done.form != "float32":
        lines.append(
            f"{done.form} against float32: largest difference of a logit {done.rounded_largest:.2g}, "
            f"mean KL {done.rounded_kl:.2g}"
        )
    return [*lines, *(f"note    {clean(note)}" for note in done.notes)]
