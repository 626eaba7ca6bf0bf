"""Commands for what is kept of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from stillroom.cli.app import AsJson, app, echo, print_json
from stillroom.errors import ConfigError

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
