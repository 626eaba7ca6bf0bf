"""The functions of the command line for programs, with names or objects, and a run whose steps the caller takes.

Nothing heavy is imported before a function is called. See docs/guides/python.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from stillroom.config import Config
from stillroom.config.load import build, flat_leaves, put, read_preset, refuse_gaps
from stillroom.core.errors import CannotSave, ConfigError, FinishedBadly, Interrupted, StoppedByCaller
from stillroom.core.files import new_run_folder, reason_of

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset as TorchDataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stillroom.doctor.examine import Report
    from stillroom.doctor.plan.plan import Plan
    from stillroom.export.folder import Exported, Format
    from stillroom.metrics.evaluate import Assessment
    from stillroom.models.load import LoadedModel
    from stillroom.telemetry.console import ConsoleMode, ConsoleView
    from stillroom.training.distill import Step
    from stillroom.training.finish import Result
    from stillroom.training.run_folder import Inputs

    Model: TypeAlias = str | Path | PreTrainedModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]
    Records: TypeAlias = str | Path | Iterable[Mapping[str, Any] | str] | TorchDataset[Any]

Listener: TypeAlias = Callable[[dict[str, Any]], None]
Listeners: TypeAlias = tuple[Listener, ...]

# The setting that each argument of `distill` replaces.
SETTING = {
    "teacher": "teacher.model",
    "student": "student.model",
    "data": "data.train",
    "eval_data": "data.eval",
}

# -- the public functions ---------------------------------------------------------------------------------


def distill(
    config: Config | None = None,
    out: str | Path | None = None,
    *,
    teacher: Model | None = None,
    student: Model | None = None,
    data: Records | None = None,
    eval_data: Records | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    inject: str = "",
    on_event: Listener | None = None,
    progress: bool | None = None,
) -> Result:
    """Distil a teacher into a student and write the report.

        result = stillroom.distill(teacher="org/large", student="org/small", data="texts.jsonl", out="runs/mine")
        print(result)
        model, tokenizer = result.load_student()

    - `config`: of `stillroom.load_config`; the arguments below win over it, and over `preset`.
    - `out`: a folder or the address of a store (s3://...); by default a new folder below `runs`. An unfinished run of
      the same configuration and the same objects in it is resumed.
    - `teacher`, `student`: names, transformers models, or pairs (model, tokenizer). `data`, `eval_data`: names or
      iterables of records. Objects are left as they are: they are written to `inputs/` of the run's folder, and a
      copy of the student is trained.
    - `preset`: a name of `stillroom presets`. `settings`: dotted keys, `{"train.max_steps": 100}`.
    - `device`: "cpu", "cuda", "cuda:1"; "auto" uses a GPU if there is one.
    - `on_event`: called with each event of the run, a dictionary with the keys of `events.jsonl`.
    - `progress`: show the run on standard output; by default in a terminal and in a notebook only.
    - `inject`: faults for a test, such as "nan_weight@3".

    A signal or a time limit saves and raises `Interrupted`; in a notebook the result is returned, with the status
    `interrupted`, and `stillroom.resume(result.folder)` continues it.
    """
    with _saved_interrupt(is_shown=progress is not False) as saved:
        run = training(
            config, out, teacher=teacher, student=student, data=data, eval_data=eval_data, preset=preset,
            settings=settings, device=device, inject=inject, on_event=on_event, progress=progress,
        )  # fmt: skip
        saved.folder = run.folder
        return run.finish()
    return saved.result()


def training(
    config: Config | None = None,
    out: str | Path | None = None,
    *,
    teacher: Model | None = None,
    student: Model | None = None,
    data: Records | None = None,
    eval_data: Records | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | torch.device = "auto",
    inject: str = "",
    on_event: Listener | None = None,
    progress: bool | None = None,
) -> Training:
    """Distil step by step: `for step in stillroom.training(config): ...`. The arguments are those of `distill`.

    Yields a `Step` after each attempted step: its number, loss, terms and verdict. `step.set_weight("kd", 0.5)` sets
    the weight of a term from the next step on, `step.stop()` saves and ends the run. What is due after a step, an
    evaluation or a checkpoint, is done when the loop asks for the next one. A loop that is left by `break` saves too.

        run = stillroom.training(config, out="runs/mine")
        for step in run:
            if step.loss < 1.5:
                step.stop()
        run.result
    """
    given = {"teacher": teacher, "student": student, "data": data, "eval_data": eval_data}
    given = {role: value for role, value in given.items() if value is not None}
    chosen = configured(config, preset, check_settings(settings, given), given)
    place = new_folder(out)
    handlers, where = check_listener(on_event), check_device(device)
    check_text(inject, "inject")
    check_flag(progress, "progress")

    names, inputs = _split_inputs(given)

    from stillroom.training.distill import steps
    from stillroom.training.run_folder import folder_of

    chosen = with_settings(chosen, {**names, **inputs.settings(folder_of(place))})

    def job(folder: Path, views: Listeners) -> Generator[Step, None, Result]:
        return steps(chosen, folder, device=where, inject=inject, listeners=(*views, *handlers), inputs=inputs)

    return Training(_reported(job, place, _mode(progress)), folder_of(place))


def resume(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    max_steps: int | None = None,
    max_minutes: float | None = None,
    trust_remote_code: bool = False,
    allow_addresses: Sequence[str] = (),
    on_event: Listener | None = None,
    progress: bool | None = None,
    accept_changed_inputs: bool = False,
) -> Result:
    """Continue the run in a folder, bit for bit, and write its report; a finished run is simply returned.

    With `max_steps` a finished run continues to so many steps, on the schedule of the longer run.

    A run whose data, teacher or starting student is not what it was is refused (`InputsChanged`), unless
    `accept_changed_inputs`.

    The folder may be somebody else's: code of models and plug-ins that its configuration names is run only with
    `trust_remote_code`, and servers and stores that it names are asked only if they lie below one of `allow_addresses`.
    """
    path, handlers, where = check_path(folder, "folder"), check_listener(on_event), check_device(device)
    check_flag(progress, "progress")
    if max_steps is not None:
        check_whole(max_steps, "max_steps", least=1)
    check_flag(accept_changed_inputs, "accept_changed_inputs", may_be_none=False)
    if max_minutes is not None:
        check_number(max_minutes, "max_minutes", least=0)

    check_flag(trust_remote_code, "trust_remote_code", may_be_none=False)
    addresses = tuple(check_text(one, "allow_addresses") for one in allow_addresses)

    def job(folder: Path, views: Listeners) -> Result:
        return resume_job(
            folder,
            (*views, *handlers),
            device=where,
            max_steps=max_steps,
            max_minutes=max_minutes,
            trusts=(trust_remote_code, addresses),
            accept_changed_inputs=accept_changed_inputs,
        )

    with _saved_interrupt(path, is_shown=progress is not False) as saved:
        return reported(job, path, _mode(progress))[0]
    return saved.result()


def evaluate(
    model: Model,
    data: Records,
    *,
    teacher: Model | None = None,
    max_length: int = 256,
    batch_size: int = 8,
    max_batches: int = 0,
    bos: Literal["auto"] | bool = "auto",
    device: str | torch.device = "auto",
) -> Assessment:
    """Perplexity and bits per byte of a model on held-out data; against a teacher also KL, agreement and acceptance.

    Models are scored in FP32; an object is copied, not changed. The folder of a run means its student.
    """
    check_whole(max_length, "max_length", least=8)
    check_whole(batch_size, "batch_size", least=1)
    check_whole(max_batches, "max_batches", least=0)
    check_bos(bos)
    wanted = check_device(device)

    from stillroom.data.objects import is_name, write_records
    from stillroom.metrics.evaluate import Assessment, compare
    from stillroom.precision.device import find_device

    where = find_device(wanted)
    has_name = is_name(data, "data")
    name, student, reference = _open_models(model, teacher)
    with tempfile.TemporaryDirectory(prefix="stillroom-") as scratch:
        spec, shown = str(data), str(data)
        if not has_name:
            spec = str(Path(scratch) / "data.jsonl")
            try:
                shown = f"{write_records(data, Path(spec), 'data').num_records:,} records"
            except OSError as error:
                advice = ["free some space there", "or name another place in TMPDIR", "or give the data by name"]
                raise CannotSave(f"cannot write data: {reason_of(error)}", where=scratch, advice=advice) from error
        scores = compare(
            student,
            reference,
            spec,
            max_length=max_length,
            batch_size=batch_size,
            max_batches=max_batches,
            bos=bos,
            where=where,
        )
    return Assessment.of({"model": name, "data": shown, **scores})


def generate(
    model: Model,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    raw: bool = False,
    bos: Literal["auto"] | bool = "auto",
    device: str | torch.device = "auto",
) -> str:
    """Continue a prompt; return the text without the prompt. A model with a chat template answers it, unless `raw`.

    A pair (model, tokenizer) is used on its device and in its dtype. The folder of a run means its student.
    """
    check_text(prompt, "prompt")
    check_whole(max_new_tokens, "max_new_tokens", least=1)
    check_whole(seed, "seed", least=0)
    check_number(temperature, "temperature", least=0)
    check_number(top_p, "top_p", least=0)
    check_flag(raw, "raw", may_be_none=False)
    check_bos(bos)
    where = check_device(device)

    from stillroom.models.generate import Writer, open_writer
    from stillroom.models.objects import GivenModel
    from stillroom.precision.device import find_device

    given = GivenModel.of(model, "model")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    if given is None:
        (made,) = open_writer(str(model), find_device(where), bos=bos).continuations([prompt], is_raw=raw, **options)
        return made.text + made.stopped
    if where != "auto":
        raise ConfigError("a model object stays on its device", where="device", advice=["leave device out"])
    if given.tokenizer is None:
        raise _without_tokenizer("model")
    (made,) = Writer(given.network, given.tokenizer, bos).continuations([prompt], is_raw=raw, **options)
    return made.text + made.stopped


def plan(
    config: Config,
    *,
    device: str | torch.device = "auto",
    device_memory: str | None = None,
    gpu: str | None = None,
    quick: bool = False,
    probe: bool = False,
) -> Plan:
    """Estimate the memory and time of a run before any weight is loaded, and propose settings that fit.

    For this machine, for a GPU with so much memory (`device_memory="16GB"`), or for a known one (`gpu="T4"`). `quick`
    does not read the data; `probe` loads the models and times one step here. `print(plan)` shows the table.
    """
    check_config(config)
    wanted = check_device(device)

    from stillroom.doctor.plan.plan import find_target, make_plan, parse_bytes, with_processes
    from stillroom.precision.gpus import find_gpu

    bound = parse_bytes(check_text(device_memory, "device_memory")) if device_memory is not None else None
    known = find_gpu(check_text(gpu, "gpu")) if gpu is not None else None
    target = with_processes(find_target(wanted, bound, known), 1, config.train.strategy, config.train.shard_size)
    return make_plan(config, target, gpu=known, is_quick=quick, probes=probe)


def examine(config: Config, *, device: str | torch.device = "auto", quick: bool = False) -> Report:
    """Check machine, models, tokenizers, data and settings before a run, as `stillroom doctor` does.

    `report.of("red")` are the findings with which a run would fail or give a wrong student. `quick` loads no models.
    """
    check_config(config)
    wanted = check_device(device)

    from stillroom.config.load import Loaded
    from stillroom.doctor.examine import examine as look

    return look(lambda: Loaded(config), device=wanted, is_quick=quick)


def preview(config: Config, *, rows: int = 10) -> dict[str, Any]:
    """Show what a run would train on, as `stillroom data --json` does.

    Counts, lengths, what is left out and why, and under `rows` the first documents as lists of [text, is_scored].
    """
    check_config(config)
    check_whole(rows, "rows", least=0)

    from stillroom.data.preview import preview as look
    from stillroom.models.load import load_tokenizer

    return look(config.data, load_tokenizer(config.student, config.student.model), num_rows=rows)


def write_cache(
    config: Config, out: str | Path, *, device: str | torch.device = "auto", max_minutes: float = 0.0
) -> dict[str, Any]:
    """Store the teacher's answers to a configuration's data in a folder. An unfinished cache is continued.

    A run trains from it with the setting `teacher.cache`. Return what the cache holds.
    """
    check_config(config)
    place, wanted = check_path(out, "out"), check_device(device)
    check_number(max_minutes, "max_minutes", least=0)

    from stillroom.training.write_cache import check_config as check_teacher
    from stillroom.training.write_cache import make_cache

    check_teacher(config)
    return make_cache(config, place, device=wanted, max_minutes=max_minutes)


def export_student(
    run: str | Path,
    out: str | Path,
    *,
    format: Format = "hf",
    form: str | None = None,
    data: str | None = None,
    force: bool = False,
) -> Exported:
    """Export the student of a run, or any model, with a model card; read it back and compare its logits.

    `format` is hf, gguf or onnx. `form` is float32, float16 or bfloat16, for GGUF also q4_0 to q8_0 or a K format. The
    logits are compared on `data`, by default on the run's own. `force` replaces an earlier export.
    """
    name, place = check_path(run, "run"), check_path(out, "out")

    from stillroom.export.folder import export

    return export(str(name), place, format=format, form=form, data=data, force=force)


def push(
    model: str | Path,
    to: str,
    *,
    private: bool = False,
    gguf: Sequence[str | Path] = (),
    anyway: bool = False,
) -> str:
    """Publish a run's student, an export or the folder of a model on the Hugging Face Hub; return its address.

    `to` is ORG/NAME, created if it is missing; with `private` one that is public is refused. `gguf` are files to go
    with it. All is one commit, with a model card that holds the figures in the Hub's own metadata. `anyway` sends the
    best student so far of a run that has not finished. The token is read from HF_TOKEN or from `hf auth login`.
    """
    name, files = str(check_path(model, "model")), [check_path(one, "gguf") for one in gguf]
    check_text(to, "to")
    check_flag(private, "private", may_be_none=False)
    check_flag(anyway, "anyway", may_be_none=False)

    from stillroom.export.push import pack

    parcel = pack(name, to, private=private, gguf=files, anyway=anyway)
    parcel.send()
    return parcel.repository.address


# -- running ---------------------------------------------------------------------------------------------


class Training:
    """A run whose steps the caller takes, see `training`. An iterator of `Step`s.

    `folder` is the run's folder. `result` is None until the loop has ended; of a run that was stopped its status is
    `interrupted`, and `stillroom.resume(run.folder)` continues it. As a context manager it saves and ends the run when
    the body is left, also by an error.
    """

    def __init__(self, steps: Generator[Step, None, tuple[Result, str]], folder: Path) -> None:
        self._steps, self.folder = steps, folder
        self.result: Result | None = None
        # Also before the interpreter ends, where a traceback still holds the loop: later torch cannot save any more.
        self._ending = weakref.finalize(self, _end, steps)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        try:
            return next(self._steps)
        except StopIteration as end:
            self.result = end.value[0] if end.value is not None else self.result
            raise StopIteration from None
        except Interrupted as error:
            self.result = _interrupted(error, self.folder)
            if not isinstance(error, StoppedByCaller):
                raise
            raise StopIteration from None

    def finish(self) -> Result:
        """Take the remaining steps and return the result."""
        for _step in self:
            pass
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Save the state and end the run, if it has not ended."""
        if (error := self._ending()) is not None:
            self.result = _interrupted(error, self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _end(steps: Generator[Step, None, tuple[Result, str]]) -> StoppedByCaller | None:
    """Close the steps of a run; return how it ended, if it had not ended before."""
    try:
        steps.close()
    except StoppedByCaller as error:
        return error
    return None


def _interrupted(error: Interrupted, folder: Path) -> Result:
    from stillroom.training.finish import Result

    return Result(folder, {"status": "interrupted", "reason": str(error.what), "advice": list(error.advice)})


class _saved_interrupt:  # noqa: N801, a context manager like those of contextlib
    """In a notebook, turn an interrupt of the body into a result: a traceback there looks as if something was lost."""

    def __init__(self, folder: Path = Path(), *, is_shown: bool) -> None:
        self.folder, self._is_shown = folder, is_shown
        self._error: Interrupted | None = None

    def result(self) -> Result:
        assert self._error is not None
        return _interrupted(self._error, self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        from stillroom.telemetry.console import is_notebook

        self._error = error if isinstance(error, Interrupted) else None
        return self._error is not None and self._is_shown and is_notebook()


def resume_job(
    folder: Path,
    listeners: Listeners,
    *,
    trusts: tuple[bool, tuple[str, ...]],
    strategy: str | None = None,
    shard_size: int | None = None,
    max_steps: int | None = None,
    **options: Any,
) -> Result:
    """Continue a run, or the demo, which is three runs. `trusts` is (whether to run its code, allowed addresses)."""
    from stillroom.demo import is_demo_run, resume_demo
    from stillroom.training.distill import resume as resume_run
    from stillroom.training.run_folder import Trust

    if is_demo_run(folder):
        if max_steps is not None:
            raise ConfigError("the demo is three runs: it is not continued", where="max_steps")
        return resume_demo(folder, listeners=listeners, **options)
    given: dict[str, Any] = {"strategy": strategy, "shard_size": shard_size, "trust": Trust(*trusts)}
    given |= {"max_steps": max_steps}
    return resume_run(folder, listeners=listeners, **given, **options)


Job: TypeAlias = "Callable[[Path, Listeners], Generator[Step, None, Result]]"


def reported(
    job: Callable[[Path, Listeners], Result], out: Path, mode: ConsoleMode, *, verbose: bool = False
) -> tuple[Result, str]:
    """Run a job, show its events and write the report. Return the result, and the folder or address it is in."""

    def at_once(folder: Path, views: Listeners) -> Generator[Step, None, Result]:
        yield from ()
        return job(folder, views)

    try:
        next(_reported(at_once, out, mode, verbose=verbose))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a job takes its steps itself")


def _reported(
    job: Job, out: Path, mode: ConsoleMode, *, verbose: bool = False
) -> Generator[Step, None, tuple[Result, str]]:
    """Take the steps of a job, show its events and write the report.

    Only the first of several processes shows and writes.
    """
    from stillroom.telemetry.console import ConsoleView

    is_first = is_first_process()
    with ConsoleView(mode if is_first else "quiet", tells_stops=False, verbose=verbose) as view:
        view.handle({"event": "stage", "name": "loading libraries", "state": "begin"})
        return (yield from _shown(job, out, view))


def _shown(job: Job, out: Path, view: ConsoleView) -> Generator[Step, None, tuple[Result, str]]:
    from stillroom.report import LiveReport, write_report
    from stillroom.training.run_folder import opened

    is_first = is_first_process()

    def finish(folder: Path, summary: Mapping[str, Any]) -> None:
        if is_first:
            page = write_report(folder, pages[0].foot() if pages else "")
            with contextlib.suppress(BrokenPipeError):  # the run is done, even if nobody reads its output
                view.finish(summary, page, place.url or folder)

    pages: list[LiveReport] = []
    start: dict[str, Any] = {}

    def follow(event: dict[str, Any]) -> None:
        """Write the page during the run, from its first step on: before it there is nothing to show."""
        if not pages and event.get("event") == "step":
            pages.append(LiveReport(place.folder, view.handle))
            pages[0].handle(start)
        if pages:
            pages[0].handle(event)
        elif event.get("event") == "run_start":
            start.update(event)

    with opened(out) as place:
        try:
            result = yield from _own_random(job(place.folder, (view.handle, follow) if is_first else (view.handle,)))
        except FinishedBadly as error:  # the run is complete: write its report
            finish(Path(str(error.folder)), error.summary)
            raise
        except BaseException:
            for page in pages:
                page.close()
            raise
        finish(result.folder, result.summary)
    if place.sender is not None and place.sender.num_failed:
        text = f"{place.url} has all of the run; {place.sender.num_failed} uploads failed on the way"
        view.handle({"event": "note", "text": text})
    return result, place.url or str(result.folder)


def _own_random(steps: Generator[Step, None, Result]) -> Generator[Step, None, Result]:
    """Give a run its own random state: a run seeds, and what a caller's loop draws must not change the run."""
    import torch

    def states() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def put(known: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
        torch.set_rng_state(known[0])
        if known[1]:
            torch.cuda.set_rng_state_all(known[1])

    outside = states()
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            inside = states()
            put(outside)
            try:
                yield step
            finally:
                outside = states()
                put(inside)
    finally:
        try:
            steps.close()
        finally:
            put(outside)


def _mode(progress: bool | None) -> ConsoleMode:
    """Show progress where asked for; else in a notebook and on a terminal."""
    from stillroom.telemetry.console import is_notebook

    if progress is None:
        progress = is_notebook() or (sys.stdout is not None and sys.stdout.isatty())
    return "auto" if progress else "quiet"


# -- models and data given as objects ----------------------------------------------------------------------


def _split_inputs(given: Mapping[str, Any]) -> tuple[dict[str, Any], Inputs]:
    """Split models and data into (settings for those given by name, those given as objects)."""
    from stillroom.data.objects import is_name
    from stillroom.models.objects import GivenModel
    from stillroom.training.run_folder import Inputs

    names: dict[str, Any] = {}
    models: dict[str, GivenModel] = {}
    data: dict[str, Any] = {}
    notes: list[str] = []
    for role, value in given.items():
        model = GivenModel.of(value, role) if role in ("teacher", "student") else None
        if model is not None:
            models[role] = model
            notes += model.check_kept()
            names |= {f"student.adapter.{key}": value for key, value in model.adapter.items()}
            if model.adapter:
                notes.append("student: a PEFT model: its base is frozen, and an adapter with its settings is trained")
        elif role in ("teacher", "student") or is_name(value, role):
            names[SETTING[role]] = str(value)
        else:
            data[role] = value
    teacher, student = models.get("teacher"), models.get("student")
    if teacher is not None and teacher.tokenizer is None:
        if student is None or student.tokenizer is None:
            raise _without_tokenizer("teacher")
        models["teacher"] = GivenModel("teacher", teacher.network, student.tokenizer)
        notes.append("the teacher was given without a tokenizer: it takes the student's")
    return names, Inputs(models, data, tuple(notes))


def _open_models(model: Model, teacher: Model | None) -> tuple[str, LoadedModel, LoadedModel | None]:
    """Open (name of the model, model, teacher) for evaluation. If only one of them has a tokenizer, both use it."""
    from stillroom.metrics.evaluate import open_model
    from stillroom.models.load import model_name
    from stillroom.models.objects import GivenModel

    values = {"model": model} if teacher is None else {"model": model, "teacher": teacher}
    given = {role: GivenModel.of(value, role) for role, value in values.items()}
    loaded = {role: open_model(model_name(str(values[role]))) for role, one in given.items() if one is None}
    models = [one for one in (*given.values(), *loaded.values()) if one is not None]
    tokenizers = [one.tokenizer for one in models if one.tokenizer is not None]
    for role, one in given.items():
        if one is not None and not tokenizers:
            raise _without_tokenizer(role)
        if one is not None:
            loaded[role] = one.copied(one.tokenizer if one.tokenizer is not None else tokenizers[0])
    own = given["model"]
    return own.name if own is not None else model_name(str(model)), loaded["model"], loaded.get("teacher")


def _without_tokenizer(role: str) -> ConfigError:
    return ConfigError(
        f"{role} comes without a tokenizer", where=role, advice=[f"give a pair: {role}=(model, tokenizer)"]
    )


# -- arguments: checked before anything is loaded -----------------------------------------------------------


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"a {type(value).__name__}"
    return ConfigError(f"{name} is {shown}: expected {expected}", where=name)


def check_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def check_path(value: object, name: str) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(name, value, "the path of a folder")
    return Path(value).expanduser()


def check_flag(value: object, name: str, *, may_be_none: bool = True) -> None:
    if not isinstance(value, bool) and not (value is None and may_be_none):
        raise _wrong(name, value, "True, False or None" if may_be_none else "True or False")


def check_whole(value: object, name: str, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _wrong(name, value, f"a whole number of at least {least}")


def check_number(value: object, name: str, *, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (isinstance(value, int | float) and least <= value < math.inf):
        raise _wrong(name, value, f"a number of at least {least:g}")


def check_bos(value: object) -> None:
    if value != "auto" and not isinstance(value, bool):
        raise _wrong("bos", value, "'auto', True or False")


def check_device(value: object) -> str:
    """The name of a device, from a string or a `torch.device`."""
    if isinstance(value, str) and value:
        return value
    if type(value).__name__ == "device" and hasattr(value, "type"):
        return str(value)
    raise _wrong("device", value, "a torch.device, or 'auto', 'cpu', 'cuda', 'cuda:1'")


def check_listener(value: object) -> Listeners:
    if value is not None and not callable(value):
        raise _wrong("on_event", value, "a function that is called with each event")
    return (value,) if value is not None else ()


def check_config(value: object) -> None:
    if not isinstance(value, Config):
        advice = ["read a file with stillroom.load_config(path)"] if isinstance(value, str | Path) else []
        raise ConfigError(
            f"config is a {type(value).__name__}, not a stillroom.Config",
            where="config",
            advice=[*advice, "stillroom.load_config(overrides={'teacher.model': ...}) makes one of settings"],
        )


def check_settings(value: object, given: Collection[str]) -> dict[str, Any]:
    """Dotted keys with their values. Raise if one repeats an argument."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong("settings", value, "a mapping of dotted keys to values, such as {'train.max_steps': 100}")
    twice = [role for role in given if SETTING[role] in value]
    if twice:
        raise ConfigError(f"{twice[0]} is given, and settings name {SETTING[twice[0]]}", where="settings")
    return dict(value)


# -- processes -------------------------------------------------------------------------------------------


def num_processes() -> int:
    """Return how many processes torchrun or accelerate started for one run."""
    return _environment("WORLD_SIZE", 1)


def is_first_process() -> bool:
    """Whether this process writes and prints for all."""
    return num_processes() == 1 or _environment("RANK", 0) == 0


def _environment(name: str, default: int) -> int:
    word = os.environ.get(name, str(default))
    try:
        return int(word)
    except ValueError:
        raise ConfigError(f"{name} is {word!r}, not a number", where="environment", advice=[f"unset {name}"]) from None


# -- configuration ---------------------------------------------------------------------------------------


def configured(
    config: Config | None, preset: str | None, settings: Mapping[str, Any], given: Mapping[str, object]
) -> Config:
    """Build the configuration of a call: a given one or a preset, with the call's settings on top.

    The models and data of the call are added later.
    """
    if config is not None:
        check_config(config)
    if config is not None and preset is not None:
        raise ConfigError(
            "a configuration and a preset are both given",
            where="preset",
            advice=["stillroom.load_config(path, preset=...) reads a file on top of a preset"],
        )
    if config is None:
        table = read_preset(check_text(preset, "preset")) if preset is not None else {}
        chosen = _put(table, settings)
        if preset is None:
            _refuse_gaps(chosen, settings, given)
    else:
        chosen = with_settings(config, settings)
    if chosen.student.init == "shrink" and "student" in given:
        raise ConfigError(
            "student is given, and student.init = 'shrink' cuts the student from the teacher",
            where="student",
            advice=["leave student out", "or leave student.init out"],
        )
    refuse_gaps(chosen, also=frozenset(given))
    return chosen


def _refuse_gaps(config: Config, settings: Mapping[str, Any], given: Mapping[str, object]) -> None:
    """Raise if a model or data is missing: without a configuration, do not silently use the embedded default."""
    is_cut = config.student.init == "shrink"
    needed = {"teacher": is_cut or config.objectives.asks_teacher, "student": not is_cut, "data": True}
    missing = [
        role for role, is_needed in needed.items() if is_needed and role not in given and SETTING[role] not in settings
    ]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not given",
            where="distill",
            advice=["give teacher, student and data", "or a configuration", "or a preset, such as preset='demo'"],
        )


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    if not settings:
        return config
    return _put(config.model_dump(mode="json", exclude_unset=True), settings, config.given)


def _put(table: dict[str, Any], settings: Mapping[str, Any], given: frozenset[str] = frozenset()) -> Config:
    for key, value in settings.items():
        put(table, key, value)
    return build(table, "settings").with_given({*given, *flat_leaves(settings)})


def new_folder(out: str | Path | None) -> Path:
    if out is not None:
        return check_path(out, "out")
    if num_processes() > 1:
        raise ConfigError(
            "several processes train one run in one folder, and none is named",
            where="out",
            advice=["name the folder with out"],
        )
    return new_run_folder("run")
