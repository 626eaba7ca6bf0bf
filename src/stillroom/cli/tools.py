"""Commands other than training: check, plan, cache, eval and export."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

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
    load_or_demo,
    print_json,
    settings_of,
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


@app.command(short_help="Check machine, models, data and settings before a run.")
def doctor(
    config: ConfigFile = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    student: StudentModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="do not load the models or take a step")] = False,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Check machine, installation, models, tokenizers, data and settings before a run.

    The last check takes one step in the chosen precision and compares it with the same step in FP32. A finding is green
    (fine), amber (works, could be better) or red (will fail, or give a wrong student), and names a command or a setting
    to try. Nothing is kept. Exit code 0, or 2 if something is red.
    """
    from stillroom.doctor.examine import examine

    named = {"teacher": teacher, "student": student, "data": data, "eval_data": eval_data}
    report = examine(
        lambda: load_or_demo(config, preset, set_, **named),
        device=device,
        is_quick=quick,
        on_subject=partial(_say_subject, is_quiet=as_json),
    )
    if as_json:
        print_json(report.to_dict())
    else:
        from stillroom.doctor.printed import doctor_lines

        for level, line in doctor_lines(report.to_dict()):
            echo(line, fg=_COLOURS.get(level) if "NO_COLOR" not in os.environ else None)
    if report.of("red"):
        raise typer.Exit(2)


def _say_subject(subject: str, *, is_quiet: bool) -> None:
    if not is_quiet:
        echo(f"checking {subject} ...", err=True)


_COLOURS = {"red": typer.colors.RED, "amber": typer.colors.YELLOW, "green": typer.colors.GREEN}


@app.command(short_help="Check numerics on this machine.")
def selftest(
    device: Device = "auto",
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="divergences, kernels, precision, guard or survival; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check numerics on this machine; takes under a minute on two cores.

    Compares every divergence and the loss of the head with float64 and finite differences, every kernel with the plain
    one, and every precision mode with float64; injects faults; kills and resumes a run. Exit code 0, or 20 if a trial
    failed.
    """
    from stillroom.core.errors import SelftestFailed
    from stillroom.doctor.printed import selftest_lines
    from stillroom.doctor.selftest import GROUPS, selftest
    from stillroom.precision.device import find_device

    if strange := sorted(set(only or ()) - set(GROUPS)):
        advice = [f"one of {', '.join(GROUPS)}"]
        raise ConfigError(f"unknown group of trials: {', '.join(strange)}", where="--only", advice=advice)
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


@app.command("verify-resume", short_help="Prove that resuming a killed run is bit-exact.")
def verify_resume(
    config: ConfigFile = None,
    preset: Preset = None,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="optimizer steps of each run")] = 8,
    kill_at: Annotated[int, typer.Option(min=0, metavar="K", help="kill before step K; 0: in the middle")] = 0,
    device: Device = "auto",
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a run that is killed and resumed equals an uninterrupted one, to the last bit.

    Trains N steps without a break, then N steps that SIGKILL interrupts before step K and `resume` continues, and
    compares the record of every step, the state and every tensor. Then changes the data, the teacher and the student in
    turn: resume must refuse. Works in a temporary folder. Exit code 0, or 25 with the first tensor that differs or the
    change that was not noticed.
    """
    chosen = _loaded(config, preset, set_)
    from stillroom.core.errors import ResumeDiffers
    from stillroom.doctor.printed import resume_lines
    from stillroom.doctor.resume import verify_resume

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


@app.command(short_help="Measure this machine, and compare it with what was predicted.")
def bench(
    device: Device = "auto",
    part: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="facts, constants, kernels, step or distillation; repeatable; else all"),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, metavar="N", help="limit on all parts together")] = 10.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file for the result, written after every part")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: its rates, the head by every kernel, a step by phase, and a minute of distillation.

    Each part runs in its own process. The figures are compared with predictions that were written before any
    measurement, by the rates of the GPU's data sheet and by those measured here. Ends with a block of text to paste
    into an issue; nothing is sent. Exit code 0, or 20 where a part failed or the self-test found something wrong.
    """
    from stillroom.bench.run import bench as measure
    from stillroom.bench.run import block, lines_of

    result = measure(device, parts=part or (), minutes=minutes, out=out, tell=partial(_say_part, is_quiet=as_json))
    if as_json:
        print_json({**result, "block": block(result)})
    else:
        for line in lines_of(result):
            echo(line)
        echo(f"\npaste this:\n{block(result)}", keep_lines=True)
    errors = [name for name, found in result.items() if isinstance(found, dict) and "error" in found]
    if errors or result.get("facts", {}).get("selftest_failed"):
        raise typer.Exit(20)


def _say_part(text: str, *, is_quiet: bool) -> None:
    if not is_quiet:
        echo(text, err=True)


# -- plan: what a run takes and costs, before anything is loaded -------------------------------------------


@app.command(short_help="Estimate memory and time of a run, and make it fit.")
def plan(
    config: ConfigFile = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="memory to plan for, e.g. 16GB; without it what is free on this machine"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", "--card", metavar="GPU", help="GPU to plan for: T4, V100, P100, L4, A100 or H100"),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, metavar="N", help="processes that share the run; memory is that of one")
    ] = 1,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, ddp or fsdp; without it train.strategy")
    ] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    student: StudentModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="do not read the data")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="load the models and time one step on this machine")] = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the configuration that fits, as TOML")
    ] = None,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory and time of a run before any weight is loaded, and propose settings that fit.

    Builds the models without weights and traces one micro-batch. If the run does not fit, proposes changes, the least
    harmful first, each with what it saves and costs; --write stores the configuration that fits. Exit code 0 if the run
    fits or can be made to fit, else 2.
    """
    from stillroom.doctor.plan.plan import find_target, make_plan, parse_bytes, with_processes
    from stillroom.precision.gpus import find_gpu

    bound = parse_bytes(device_memory) if device_memory is not None else None
    loaded = load_or_demo(config, preset, set_, teacher=teacher, student=student, data=data, eval_data=eval_data)
    train = loaded.config.train
    known = find_gpu(gpu) if gpu is not None else None
    target = with_processes(find_target(device, bound, known), processes, strategy or train.strategy, train.shard_size)
    tell = partial(_say_subject, is_quiet=as_json)
    made = make_plan(loaded.config, target, gpu=known, is_quick=quick, probes=probe, tell=tell)
    if as_json:
        print_json(made.to_dict())
    else:
        _print(made, (*loaded.notes, *unread_notes(loaded.config)))
    if write is not None:
        _write(made, write, is_quiet=as_json)
    if not made.is_possible:
        raise typer.Exit(2)


def _print(made: Plan, notes: tuple[str, ...]) -> None:
    from stillroom.doctor.printed import plan_lines, wrapped

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


class _WriteByDefault(TyperGroup):
    """`cache CONFIG --out DIR` means `cache write CONFIG --out DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [word for word in args if word != "--json"]  # may come before the subcommand
        if words and words[0] in self.commands:
            options = [word for word in args if word == "--json"]
            return super().parse_args(ctx, [*words, *options])
        return super().parse_args(ctx, args if words[:1] in (["-h"], ["--help"]) else ["write", *args])


cache = typer.Typer(
    cls=_WriteByDefault,
    rich_markup_mode=None,
    help="Store a teacher's answers on disk, to train from them without the teacher.\n\n`stillroom cache CONFIG --out "
    "DIR` means `stillroom cache write CONFIG --out DIR`.",
    short_help="Store a teacher's answers on disk, to train from them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache, name="cache")

CacheFolder = Annotated[Path, typer.Argument(metavar="DIR", help="folder or address of a cache")]


@cache.command("write")
def write_cache(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="TOML or JSON file that names teacher and data")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="folder or address of the cache; an unfinished one is continued")
    ] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    data: TrainData = None,
    eval_data: EvalData = None,
    import_: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="read log-probs that another program wrote")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", metavar="NAME", help="format of --import: vllm, openai, distillkit or axolotl")
    ] = "vllm",
    temperature: Annotated[
        list[float] | None,
        typer.Option(metavar="T", help="store answers at this temperature in a folder inside DIR; repeatable"),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="PATH", help="only this source of data.train, answered by its own teacher")
    ] = None,
    device: Device = "auto",
    max_minutes: Annotated[
        float, typer.Option(metavar="N", help="stop after N minutes with exit code 75; 0: no limit")
    ] = 0.0,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Store a teacher's answers. A run trains from them with --set teacher.cache=DIR."""
    if out is None:
        raise ConfigError(
            "the folder of the cache is missing",
            where="command line",
            advice=["stillroom cache CONFIG --out DIR", "stillroom cache info DIR", "stillroom cache verify DIR"],
        )
    overrides = settings_of(set_, teacher=teacher, data=data, eval_data=eval_data)
    overrides["teacher.cache"] = None
    loaded = load(config, preset=preset, overrides=overrides)
    refuse_gaps(loaded.config, roles=("teacher", "data"))
    if import_ is not None:
        from stillroom.training.write_cache import import_cache

        _cache_print(import_cache(loaded.config, out, import_, format_), as_json=as_json)
        return
    limits = {"device": device, "max_minutes": max_minutes, "temperatures": temperature or (), "source": source}
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
        self._last, self._is_over = time.monotonic(), False  # the first figures are far off

    def note(self, text: str) -> None:
        if not self._is_quiet:
            echo(text)

    def _is_due(self, *, is_end: bool) -> bool:
        """Whether to write a line: now and then, and once at the end."""
        is_early = time.monotonic() - self._last < _EVERY_SECONDS and not is_end
        if self._is_quiet or is_early or (is_end and self._is_over):
            return False
        self._last, self._is_over = time.monotonic(), is_end
        return True

    def progress(self, progress: Progress) -> None:
        if not self._is_due(is_end=progress.done_tokens >= progress.all_tokens):
            return
        echo(
            f"{progress.done_tokens:,} of {progress.all_tokens:,} tokens  {progress.tokens_per_second:,.0f} tokens/s  "
            f"{progress.num_bytes / 1e6:,.1f} MB  {progress.eta_seconds / 60:,.1f} minutes left"
        )

    def written(self, known: Mapping[str, Any]) -> None:
        """Progress of `write`."""
        if not self._is_due(is_end=known["prompts"] >= known["of"]):
            return
        echo(
            f"{known['prompts']:,} of {known['of']:,} prompts  {known['rows']:,} rows  {known['tokens']:,} tokens  "
            f"{known['tokens_per_second']:,.1f} tokens/s"
        )


# -- write: let a model or a server answer prompts ---------------------------------------------------------


@app.command(short_help="Let a model or a server write training data.")
def write(
    config: ConfigFile = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write, .jsonl; an unfinished one is continued")
    ] = None,
    preset: Preset = None,
    teacher: TeacherModel = None,
    data: TrainData = None,
    device: Device = "auto",
    max_minutes: Annotated[
        float, typer.Option(metavar="N", help="stop after N minutes with exit code 75; 0: no limit")
    ] = 0.0,
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Let the teacher, a model or a server, answer prompts; CONFIG says how often and what is kept ([write]).

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

    words = ["stillroom", "distill", *([str(config)] if config else []), *(["--teacher", teacher] if teacher else [])]
    if loaded.config.student.init != "shrink" and "student.model" not in loaded.config.given:
        words += ["--student", "STUDENT"]  # without it the command would be refused
    words += ["--data", str(result["file"])]
    share = "" if result["kept_share"] is None else f", {result['kept_share']:.1%} of the answers"
    lines = [
        f"written  {clean(result['file'])}",
        f"rows  {result['rows']:,}{share}",
        f"cost  {result['tokens']:,} tokens in {result['seconds']:,.1f} s, {result['tokens_per_second']:,.1f} tokens/s",
        *(f"{clean(name).replace('_', ' ')}  {count:,}" for name, count in result["counters"].items()),
        *(f"refused  {clean(text)}" for text in result["refusals"]),
        f"train on it  {clean(' '.join(map(shlex.quote, words)))}",
    ]
    for line in lines:
        echo(line)


@cache.command()
def info(folder: CacheFolder, as_json: AsJson = False) -> None:
    """Show what a cache holds."""
    from stillroom.training.write_cache import cache_info

    _cache_print(cache_info(folder), as_json=as_json)


@cache.command()
def verify(folder: CacheFolder, as_json: AsJson = False) -> None:
    """Check every checksum of a cache."""
    from stillroom.training.write_cache import verify_cache

    _cache_print(verify_cache(folder), as_json=as_json)


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


@app.command("eval", short_help="Evaluate a model, alone or against its teacher.")
def eval_(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="folder of a run: its student against its teacher, on its held-out text"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="instead of RUN: folder of a model or a run, or hub id")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="text to score: file, glob, hf:NAME or builtin:stdlib; for RUN its own"),
    ] = None,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL", help="model to compare with")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=8, metavar="N", help="tokens of a row; by default the run's, or 256")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="rows of a batch")] = 8,
    max_batches: Annotated[int, typer.Option(min=0, metavar="N", help="most batches to score; 0: all")] = 0,
    blocks: Annotated[bool, typer.Option("--blocks", help="score texts joined in blocks, not each by itself")] = False,
    questions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of questions with answers or choices")
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="lm-eval benchmarks by name or YAML file, separated by commas")
    ] = "",
    bos: Bos = "auto",
    device: Device = "auto",
    trust_remote_code: TrustCode = False,
    allow_address: AllowAddress = None,
    keep: Annotated[bool, typer.Option(help="write eval.json into the run's folder, for report and model card")] = True,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model: perplexity, bits per byte, speed and memory; against a teacher also KL and agreement."""
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
    from stillroom.telemetry.results import assessment_lines
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
        what = "the model to evaluate is missing" if run is None else "RUN and --model are both given"
        raise ConfigError(what, where="--model", advice=["stillroom eval RUN", "stillroom eval --model M --data D"])
    if run is None:
        if data is None:
            raise ConfigError(
                "the text to score is missing", where="--data", advice=["--data FILE, or --data builtin:stdlib"]
            )
        return _Asked(str(model), data, teacher, max_length or _MAX_LENGTH, bos)
    from stillroom.core.remote import here
    from stillroom.training.run_folder import Trust, stored_config

    folder, trust = here(run, needs="record"), Trust(*trusted)
    config = stored_config(folder, trust=trust)
    own_text = "" if data else config.data.eval or ""
    # Of a student that taught itself the base is there to be compared with, an average is not.
    own = {"self": config.student.model, "ema": None}.get(config.teacher.model, config.teacher.model)
    named = {"teacher.model": "" if teacher else own or "", "data.eval": own_text}
    trust.check_addresses(named, str(run))
    length = max_length or config.data.max_length
    own_bos = config.data.bos if bos == "auto" else bos
    is_as_there = (length, own_bos) == (config.data.max_length, config.data.bos)
    text = data or _held_out(folder, config, is_as_there=is_as_there)
    return _Asked(str(run), text, teacher or own, length, own_bos)


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
_GGUF_TYPES = {"f32": "float32", "f16": "float16"}


@app.command(short_help="Export a student as a Hugging Face folder, GGUF or ONNX.")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="folder of a run or a model, hub id or builtin:student")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder to write")],
    format: Annotated[str, typer.Option(metavar="NAME", help="hf (Hugging Face folder), gguf or onnx")] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="float32, float16 or bfloat16; by default float32, for GGUF float16"),
    ] = None,
    gguf_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="for GGUF instead of --dtype: f32, f16 or q8_0")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="text to compare logits on; by default the run's own")
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="for GGUF: q4_0, q4_1, q5_0, q5_1, q8_0, q4_k_m, q5_k_m or q6_k"),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TYPE", help="with --quantise: other types for single layers; repeatable"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
    as_json: AsJson = False,
) -> None:
    """Export a student with a model card, then read it back and compare its logits."""
    if format not in _FORMATS:
        raise ConfigError(f"unknown format {format}", where="--format", advice=[", ".join(_FORMATS)])
    form = _form(format, dtype, gguf_type or quantise)
    if not as_json:
        echo(f"exporting {run}, to be read back and compared ...", err=True)
    from stillroom.export.folder import export as write

    exceptions = _formats(layers)
    done = write(run, out, format=format, form=form, data=data, force=force, layers=exceptions)  # type: ignore[arg-type]
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder), "notes": list(done.notes)})
        return
    for line in export_lines(done):
        echo(line)


def _form(format: str, dtype: str | None, gguf_type: str | None) -> str | None:
    if gguf_type is None:
        return dtype
    if format != "gguf" or dtype is not None:
        raise ConfigError("--quantise and --gguf-type go with --format gguf and without --dtype", where="--quantise")
    return _GGUF_TYPES.get(gguf_type, gguf_type)


def _formats(layers: list[str] | None) -> dict[str, str] | None:
    """`--layers NAME=FORMAT` as a table; None where none is given."""
    pairs = [layer.partition("=") for layer in layers or ()]
    if any(not name or not form for name, _is, form in pairs):
        raise ConfigError("--layers takes NAME=FORMAT", where="--layers", advice=["--layers down_proj=q8_0"])
    return {name: form for name, _is, form in pairs} or None


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
    if done.quality is not None:
        lost = done.quality
        lines.append(
            f"perplexity {lost.perplexity:.2f} against {lost.full_perplexity:.2f} unquantised, "
            f"mean KL {lost.kl:.3g}, on {lost.tokens:,} tokens"
        )
        total = sum(done.weights.values())
        lines.append(
            "weights " + "  ".join(f"{kind} {100 * count / total:.1f} %" for kind, count in done.weights.items())
        )
    if done.tokens_per_second is not None:
        lines.append(f"llama.cpp writes {done.tokens_per_second:.0f} tokens a second with it on one thread")
    return [*lines, *(f"note    {clean(note)}" for note in done.notes)]


# -- push --------------------------------------------------------------------------------------------------


@app.command(short_help="Publish a student on the Hugging Face Hub.")
def push(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="folder or address of a run, an export or a model")],
    to: Annotated[str, typer.Option(metavar="ORG/NAME", help="repository of the Hub; created if it is missing")],
    private: Annotated[bool, typer.Option("--private", help="create it private; refuse one that is public")] = False,
    gguf: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="GGUF file to publish too; repeatable")
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="send the best student of an unfinished run")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would be sent, and send nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Publish a student on the Hugging Face Hub: its files and a model card with its figures, in one commit.

    The token is read from HF_TOKEN or from `hf auth login`. Exit code 2 if it is missing or something must not be sent,
    20 if there is no student yet, 24 if the Hub refuses the commit or cannot be reached.
    """
    from stillroom.export.push import pack

    parcel = pack(run, to, private=private, gguf=gguf or (), anyway=anyway)
    address, files = parcel.repository.address, {name: one.bytes for name, (_, one) in parcel.files.items()}
    if not as_json:
        for line in _parcel_lines(parcel, files):
            echo(line)
    commit = None if dry_run else parcel.send()
    if as_json:
        told = {"address": address, "commit": commit, "files": files, "bytes": parcel.bytes}
        print_json({**told, "removes": list(parcel.removes), "notes": list(parcel.notes)})
    else:
        echo("nothing was sent" if dry_run else f"sent    {address}")


def _parcel_lines(parcel: Any, files: dict[str, int]) -> list[str]:
    """What will be sent, for a person."""
    from stillroom.telemetry.wording import clean, format_bytes

    seen = {True: "private", False: "public", None: "as your account has it: private or public"}[parcel.is_private]
    return [
        f"to      {clean(parcel.repository.address)}  {'new' if parcel.is_new else 'there already'}, {seen}",
        *(f"file    {clean(name)}  {format_bytes(size)}" for name, size in sorted(files.items())),
        *(f"remove  {clean(name)}  of an earlier model there" for name in parcel.removes),
        *(f"note    {clean(note)}" for note in parcel.notes),
        f"total   {len(files)} files, {format_bytes(parcel.bytes)}, in one commit",
    ]
