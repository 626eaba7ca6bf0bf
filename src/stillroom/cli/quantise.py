"""The command `quantise`: train a model for a small file, write the file, and say what was won back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from stillroom.cli.main import AsJson, Assignments, Device, EvalData, app, echo, print_json
from stillroom.config import load, parse_assignments
from stillroom.config.schema import StudentConfig
from stillroom.core.errors import ConfigError

_TO = [form for form in get_args(StudentConfig.model_fields["quantise"].annotation) if form]
_ROWS = {"teacher": "original", "student_before": "rounded", "student": "trained"}


@app.command(short_help="Distil a model into its own quantised GGUF file.")
def quantise(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="folder of a model or a run, hub id, or GGUF file")],
    data: Annotated[
        str, typer.Option(metavar="DATA", help="text of the kind the model is for: file, glob, hf:NAME, builtin:stdlib")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="folder of the run, with the file in gguf/; an unfinished run is resumed"),
    ],
    to: Annotated[str, typer.Option(metavar="TYPE", help=f"format of the file: {', '.join(_TO)}")] = "q4_0",
    eval_data: EvalData = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="optimizer steps")] = 200,
    device: Device = "auto",
    set_: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Distil a model into its own quantised GGUF file, and compare with plain rounding."""
    if to not in _TO:
        raise ConfigError(
            f"a model is not trained for {to}",
            where="--to",
            advice=[f"choose one of {', '.join(_TO)}"],
        )
    from stillroom.api import reported
    from stillroom.export.folder import export
    from stillroom.models.load import model_name
    from stillroom.training.distill import distill

    name = model_name(model)
    named = {"student.model": name, "student.quantise": to, "data.train": data, "data.eval": eval_data}
    settings: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    settings["train.max_steps"] = steps
    chosen = load(None, preset="quantise", overrides={**settings, **parse_assignments(set_ or [])})
    result, where = reported(
        lambda place, listeners: distill(chosen.config, place, device=device, listeners=listeners, notes=chosen.notes),
        out,
        "quiet" if as_json else "auto",
    )
    written = export(where, out / "gguf", format="gguf", form=to, force=True)
    rows = {_ROWS[key]: result.summary[key] for key in _ROWS}
    won = _share_won_back(rows)
    path = next((out / "gguf").glob("*.gguf"))
    if as_json:
        print_json({"folder": where, "file": str(path), "bytes": written.bytes, "won_back": won, **rows})
        return
    echo("")
    echo(f"{to:12}  perplexity   bits/byte          KL")
    for word, row in rows.items():
        echo(f"{word:12}  {row['perplexity']:10.2f}  {row['bits_per_byte']:10.4f}  {row['kl']:10.4f}")
    if won is not None:
        echo(f"training won back {won:.0%} of what rounding cost in bits per byte")
    echo(f"file    {path}  {written.bytes / 1e6:,.1f} MB")


def _share_won_back(rows: dict[str, Any]) -> float | None:
    """The share of the loss by rounding that training took back; None where rounding cost nothing."""
    original, rounded, trained = (rows[word]["bits_per_byte"] for word in _ROWS.values())
    cost = rounded - original
    return float((rounded - trained) / cost) if cost > 0 else None
