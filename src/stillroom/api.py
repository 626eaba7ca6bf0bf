"""Distil, resume, evaluate, generate and push, with names or objects.

Nothing heavy is imported before a function is called. See docs/guides/python.md.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stillroom.config import Config
from stillroom.config.load import build, flat_leaves, put, read_preset, refuse_gaps
from stillroom.core.errors import CannotSave, ConfigError, FinishedBadly
from stillroom.core.files import new_run_folder, reason_of

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset as TorchDataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stillroom.metrics.evaluate import Assessment
    from stillroom.models.load import LoadedModel
    from stillroom.telemetry.console import ConsoleMode, ConsoleView
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
    listeners: Sequence[Listener] = (),
    progress: bool | None = None,
) -> Result:
    """Distil a teacher into a student and write the report.

    `out` is a folder or the address of a store (s3://...). Give a configuration, or the parts of one; parts win over
    the configuration and the preset, and `settings` are its dotted keys (`{"train.max_steps": 100}`). Models are names,
    transformers models, or pairs (model, tokenizer); data are names or iterables of records. Objects are left as they
    are: they are written to `inputs/` of the run's folder, and a copy of the student is trained. Without `out`, a new
    folder below `runs` is made; one that holds an unfinished run of the same configuration and the same objects is
    resumed.

    `listeners` are called with each event of the run. `progress` shows it on standard output; by default in a terminal
    and in a notebook only.
    """
    given = {"teacher": teacher, "student": student, "data": data, "eval_data": eval_data}
    given = {role: value for role, value in given.items() if value is not None}
    chosen = configured(config, preset, check_settings(settings, given), given)
    place = new_folder(out)
    handlers, where = check_listeners(listeners), check_device(device)
    check_text(inject, "inject")
    check_flag(progress, "progress")

    names, inputs = _split_inputs(given)

    from stillroom.training.distill import distill as run
    from stillroom.training.run_folder import folder_of

    chosen = with_settings(chosen, {**names, **inputs.settings(folder_of(place))})

    def job(folder: Path, views: Listeners) -> Result:
        return run(chosen, folder, device=where, inject=inject, listeners=(*views, *handlers), inputs=inputs)

    return reported(job, place, _mode(progress))[0]


def resume(
    folder: str | Path,
    *,
    device: str | torch.device = "auto",
    max_minutes: float | None = None,
    trust_remote_code: bool = False,
    allow_addresses: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    progress: bool | None = None,
    accept_changed_inputs: bool = False,
) -> Result:
    """Continue the run in a folder, bit for bit, and write its report; a finished run is simply returned.

    A run whose data, teacher or starting student is not what it was is refused (`InputsChanged`), unless
    `accept_changed_inputs`.

    The folder may be somebody else's: code of models and plug-ins that its configuration names is run only with
    `trust_remote_code`, and servers and stores that it names are asked only if they lie below one of `allow_addresses`.
    """
    path, handlers, where = check_path(folder, "folder"), check_listeners(listeners), check_device(device)
    check_flag(progress, "progress")
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
            max_minutes=max_minutes,
            trusts=(trust_remote_code, addresses),
            accept_changed_inputs=accept_changed_inputs,
        )

    return reported(job, path, _mode(progress))[0]


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


def resume_job(
    folder: Path,
    listeners: Listeners,
    *,
    trusts: tuple[bool, tuple[str, ...]],
    strategy: str | None = None,
    shard_size: int | None = None,
    **options: Any,
) -> Result:
    """Continue a run, or the demo, which is three runs. `trusts` is (whether to run its code, allowed addresses)."""
    from stillroom.demo import is_demo_run, resume_demo
    from stillroom.training.distill import resume as resume_run
    from stillroom.training.run_folder import Trust

    if is_demo_run(folder):
        return resume_demo(folder, listeners=listeners, **options)
    given: dict[str, Any] = {"strategy": strategy, "shard_size": shard_size, "trust": Trust(*trusts)}
    return resume_run(folder, listeners=listeners, **given, **options)


def reported(
    job: Callable[[Path, Listeners], Result], out: Path, mode: ConsoleMode, *, verbose: bool = False
) -> tuple[Result, str]:
    """Run a job, show its events and write the report. Return the result, and the folder or address it is in.

    Only the first of several processes shows and writes.
    """
    from stillroom.telemetry.console import ConsoleView

    is_first = is_first_process()
    with ConsoleView(mode if is_first else "quiet", tells_stops=False, verbose=verbose) as view:
        view.handle({"event": "stage", "name": "loading libraries", "state": "begin"})
        return _shown(job, out, view)


def _shown(job: Callable[[Path, Listeners], Result], out: Path, view: ConsoleView) -> tuple[Result, str]:
    import torch

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
            with torch.random.fork_rng(range(torch.cuda.device_count())):  # a run seeds; restore the caller's state
                result = job(place.folder, (view.handle, follow) if is_first else (view.handle,))
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


def _mode(progress: bool | None) -> ConsoleMode:
    """Show progress where asked for; else in a notebook and on a terminal."""
    from stillroom.telemetry.console import is_notebook

    if progress is None:
        progress = is_notebook() or (sys.stdout is not None and sys.stdout.isatty())
    return "auto" if progress else "quiet"


# -- models and data given as objects ----------------------------------------------------------------------


def _split_inputs(given: Mapping[str, Any]) -> tuple[dict[str, str], Inputs]:
    """Split models and data into (settings for those given by name, those given as objects)."""
    from stillroom.data.objects import is_name
    from stillroom.models.objects import GivenModel
    from stillroom.training.run_folder import Inputs

    names: dict[str, str] = {}
    models: dict[str, GivenModel] = {}
    data: dict[str, Any] = {}
    notes: list[str] = []
    for role, value in given.items():
        model = GivenModel.of(value, role) if role in ("teacher", "student") else None
        if model is not None:
            models[role] = model
            notes += model.check_kept()
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


def check_listeners(value: object) -> tuple[Callable[[dict[str, Any]], None], ...]:
    if not isinstance(value, Sequence) or not all(callable(listener) for listener in value):
        raise _wrong("listeners", value, "a list of functions, each called with an event")
    return tuple(value)


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
    if config is not None and not isinstance(config, Config):
        advice = ["read a file with stillroom.load_config(path)"] if isinstance(config, str | Path) else []
        raise ConfigError(
            f"config is a {type(config).__name__}, not a stillroom.Config",
            where="config",
            advice=[*advice, "or give teacher, student and data as keywords"],
        )
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
