"""Distil, resume, evaluate and generate, with names or objects.

Nothing heavy is imported before a function is called. See docs/api.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stillroom.api import arguments as check
from stillroom.api.configuration import configured, new_folder, with_settings
from stillroom.config import Config
from stillroom.errors import CannotSave, ConfigError, FinishedBadly
from stillroom.files import reason_of

if TYPE_CHECKING:
    import torch

    from stillroom.api.objects import Model, Records
    from stillroom.assess import Assessment
    from stillroom.engine.ending.result import Result

Listener: TypeAlias = Callable[[dict[str, Any]], None]


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
    chosen = configured(config, preset, check.settings(settings, given), given)
    place = new_folder(out)
    handlers, where = check.listeners(listeners), check.device(device)
    check.text(inject, "inject")
    check.flag(progress, "progress")

    from stillroom.api.objects import split_inputs

    names, inputs = split_inputs(given)

    from stillroom.engine.distill import distill as run
    from stillroom.engine.run_folder.place import folder_of

    chosen = with_settings(chosen, {**names, **inputs.settings(folder_of(place))})

    def job(folder: Path, *views: Listener) -> Result:
        return run(chosen, folder, device=where, inject=inject, listeners=(*views, *handlers), inputs=inputs)

    return _reported(job, place, progress)


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
    path, handlers, where = check.path(folder, "folder"), check.listeners(listeners), check.device(device)
    check.flag(progress, "progress")
    check.flag(accept_changed_inputs, "accept_changed_inputs", may_be_none=False)
    if max_minutes is not None:
        check.number(max_minutes, "max_minutes", least=0)

    check.flag(trust_remote_code, "trust_remote_code", may_be_none=False)
    addresses = tuple(check.text(one, "allow_addresses") for one in allow_addresses)

    from stillroom.demo import is_demo_run, resume_demo
    from stillroom.engine.distill import resume as resume_run
    from stillroom.engine.run_folder.trust import Trust

    def job(folder: Path, *views: Listener) -> Result:
        seen = (*views, *handlers)
        if is_demo_run(folder):
            return resume_demo(
                folder,
                device=where,
                max_minutes=max_minutes,
                listeners=seen,
                accept_changed_inputs=accept_changed_inputs,
            )
        return resume_run(
            folder,
            device=where,
            max_minutes=max_minutes,
            trust=Trust(trust_remote_code, addresses),
            listeners=seen,
            accept_changed_inputs=accept_changed_inputs,
        )

    return _reported(job, path, progress)


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
    check.whole(max_length, "max_length", least=8)
    check.whole(batch_size, "batch_size", least=1)
    check.whole(max_batches, "max_batches", least=0)
    check.bos(bos)
    wanted = check.device(device)

    from stillroom.api.objects import opened
    from stillroom.assess import Assessment, compare
    from stillroom.data.given import is_name, write_records
    from stillroom.engine.building.device import find_device

    where = find_device(wanted)
    has_name = is_name(data, "data")
    student, beside = opened(model, teacher)
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
            student[1],
            beside,
            spec,
            max_length=max_length,
            batch_size=batch_size,
            max_batches=max_batches,
            bos=bos,
            where=where,
        )
    return Assessment.of({"model": student[0], "data": shown, **scores})


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
    check.text(prompt, "prompt")
    check.whole(max_new_tokens, "max_new_tokens", least=1)
    check.whole(seed, "seed", least=0)
    check.number(temperature, "temperature", least=0)
    check.number(top_p, "top_p", least=0)
    check.flag(raw, "raw", may_be_none=False)
    check.bos(bos)
    where = check.device(device)

    from stillroom.api.objects import without_tokenizer
    from stillroom.engine.building.device import find_device
    from stillroom.models.generate import Writer, open_writer
    from stillroom.models.load.given import GivenModel

    given = GivenModel.of(model, "model")
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    if given is None:
        (made,) = open_writer(str(model), find_device(where), bos=bos).continuations([prompt], is_raw=raw, **options)
        return made.text + made.stopped
    if where != "auto":
        raise ConfigError("a model object stays on its device", where="device", advice=["leave device out"])
    if given.tokenizer is None:
        raise without_tokenizer("model")
    (made,) = Writer(given.network, given.tokenizer, bos).continuations([prompt], is_raw=raw, **options)
    return made.text + made.stopped


# -- the run ---------------------------------------------------------------------------------------------


def _reported(job: Callable[..., Result], out: Path, progress: bool | None) -> Result:
    """Run a job, show its events and write the report. Only the first of several processes shows and writes."""
    import torch

    from stillroom.engine.run_folder.place import opened
    from stillroom.report import LiveReport, write_report
    from stillroom.telemetry.console import ConsoleMode, ConsoleView, is_notebook

    is_first = check.is_first_process()
    is_shown = progress if progress is not None else is_notebook() or (sys.stdout is not None and sys.stdout.isatty())
    mode: ConsoleMode = "auto" if is_shown and is_first else "quiet"
    with opened(out) as place, ConsoleView(mode, tells_stops=False) as view:
        live = LiveReport(place.folder, view.handle)
        views = (view.handle, live.handle) if is_first else (view.handle,)
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count())):  # a run seeds; restore the caller's state
                result = job(place.folder, *views)
        except FinishedBadly as error:  # the run is complete: write its report
            if is_first:
                view.finish(error.summary, write_report(Path(str(error.folder)), live.foot()))
            raise
        except BaseException:
            live.close()
            raise
        if is_first:
            view.finish(result.summary, write_report(result.folder, live.foot()))
    return result
