"""The command that stores a teacher's answers, and looks at what was stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stillroom.cli.app import AsJson, Device, EvalData, Preset, TeacherModel, TrainData, app, echo, print_json
from stillroom.config import load, parse_assignments
from stillroom.config.given import refuse_gaps
from stillroom.errors import ConfigError

if TYPE_CHECKING:
    from stillroom.config.load import Loaded
    from stillroom.teachers.cache.writer import Progress

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
        from stillroom.engine.caching import import_cache

        _print(import_cache(loaded.config, out, import_, format_), as_json=as_json)
        return
    limits = {"device": device, "max_minutes": max_minutes, "temperatures": temperature or ()}
    _store(loaded, out, limits, as_json=as_json)


def _store(loaded: Loaded, out: Path, limits: dict[str, Any], *, as_json: bool) -> None:
    from stillroom.engine.caching import check_config, make_cache

    check_config(loaded.config)
    tell = _Teller(is_quiet=as_json)
    for note in loaded.notes:
        tell.note(note)
    result = make_cache(loaded.config, out, tell=tell.note, on_progress=tell.progress, **limits)
    _print(result, as_json=as_json)
    for other in () if as_json else result["beside"]:
        _print(other, as_json=False)


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


def _look(word: str, folder: Path | None, *, as_json: bool) -> None:
    if folder is None:
        raise ConfigError(
            f"`cache {word}` needs a folder", where="command line", advice=[f"stillroom cache {word} DIR"]
        )
    from stillroom.engine.caching import cache_info, verify_cache

    _print(verify_cache(folder) if word == "verify" else cache_info(folder), as_json=as_json)


def _print(result: dict[str, Any], *, as_json: bool) -> None:
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
        lines.append(f"mass  the likeliest tokens hold {result['mean_mass']:.4f} of the teacher's on average")
    if result["unusable_positions"]:
        lines.append(f"unusable  {result['unusable_positions']:,} positions have no answer")
    for name in ("missing_rows", "unmatched_records", "unanswered_positions", "short_positions"):
        if result.get(name):
            lines.append(f"{name.replace('_', ' ')}  {result[name]:,}")
    if result.get("verified"):
        lines.append("verified  every checksum holds")
    for line in lines:
        echo(line)
