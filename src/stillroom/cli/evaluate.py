"""The command that measures a model, alone or beside its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli.app import AllowAddress, AsJson, Bos, Device, TrustCode, app, echo, print_json, wanted_bos
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.assess import HeldOut
    from stillroom.config import Config

_MAX_LENGTH = 256


@dataclass(frozen=True)
class _Asked:
    """What is measured. A run that is named by itself brings its text, teacher, length and begin-of-text."""

    model: str
    data: str | HeldOut
    teacher: str | None
    max_length: int
    bos: Any


@app.command("eval", short_help="Measure a model, alone or beside its teacher.")
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
    from stillroom.assess import assess
    from stillroom.models.load.names import run_of
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
        from stillroom.remote import add

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
        what = "which model to measure is not said" if run is None else "RUN and --model are two names for one thing"
        raise ConfigError(what, where="--model", advice=["stillroom eval RUN", "stillroom eval --model M --data D"])
    if run is None:
        if data is None:
            raise ConfigError(
                "the text to measure on is not said", where="--data", advice=["--data FILE, or --data builtin:stdlib"]
            )
        return _Asked(str(model), data, teacher, max_length or _MAX_LENGTH, bos)
    from stillroom.engine.run_folder.folder import stored_config
    from stillroom.engine.run_folder.trust import Trust
    from stillroom.remote import here

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
    from stillroom.assess import HeldOut
    from stillroom.telemetry.record import LoggedRun, section
    from stillroom.telemetry.wording import as_number

    known = as_number(section(LoggedRun.load(folder).start, "data").get("eval_documents")) if is_as_there else None
    return HeldOut(config.data, None if known is None else int(known))


def _kept(owner: Path | None, measured: str, result: dict[str, Any]) -> Path | None:
    """Write the figures into the run's folder. A folder that cannot be written costs a note, not the figures."""
    if owner is None or not measured:
        return None
    from stillroom.engine.run_folder.folder import machine, versions
    from stillroom.files import reason_of
    from stillroom.telemetry.record import write_evaluation
    from stillroom.telemetry.wording import clean

    try:
        return write_evaluation(owner, measured, {**result, "machine": machine(), "versions": versions()})
    except OSError as error:
        echo(f"note  the figures are not kept in {clean(owner)}: {clean(reason_of(error))}", err=True)
        return None
