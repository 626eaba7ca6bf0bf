"""`stillroom cache`: write the teacher's answers to disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import Ramp
from stillroom.core.errors import ConfigError, DataError, Interrupted
from stillroom.data import open_data
from stillroom.data.chat import day_or_today, prints_day
from stillroom.models import (
    LoadedModel,
    agree_on_vocabulary,
    anatomy_of,
    has_tokenizer,
    load_student,
    load_tokenizer,
    num_ids,
    vocabulary_hash,
)
from stillroom.precision.device import find_device, teacher_dtype
from stillroom.teachers.cache.build import day_of_rows, fill, required_rows
from stillroom.teachers.cache.imports import check_tails, match_rows, num_kept, read_answers
from stillroom.teachers.cache.in_store import Origin, folder_of
from stillroom.teachers.cache.manifest import Manifest, is_there, read_manifest
from stillroom.teachers.cache.reader import Cache, damaged_shards
from stillroom.teachers.cache.writer import Progress, commit_shard, missing_rows, open_store, pack_shard, plan_shards
from stillroom.teachers.live import open_live
from stillroom.teachers.paired import TokenSpace, matched_tokens, reads_its_own_tokens
from stillroom.teachers.quantize import check_quantisation
from stillroom.teachers.served.teacher import served_rows
from stillroom.teachers.several import for_source, is_cache
from stillroom.teachers.signals import SignalSpec, served_spec
from stillroom.teachers.sparse import describe
from stillroom.training.loop import Stop


def make_cache(
    config: Config,
    out: Path,
    *,
    device: str = "auto",
    max_minutes: float = 0.0,
    temperatures: Sequence[float] = (),
    source: str | None = None,
    tell: Callable[[str], object] = lambda _text: None,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> dict[str, Any]:
    """Write the teacher's answers to every row of a configuration's data. What is there already is kept.

    Several processes may be given the same command: they share the work. With `temperatures` the folder holds a cache
    for each of them, and the teacher answers once for all. With a `source` its own teacher is asked about its rows.
    """
    if source is not None:
        config = _of_source(config, source)
    places = _here(temperature_folders(config, out, temperatures))
    first = next(iter(places))
    if config.teacher.server:
        served_spec(_at(config, places[first]))
    stop = Stop(max_minutes)
    stop.heed_clock()
    with stop.on_signals():
        with stop.while_loading():
            where = find_device(device)
            check_quantisation(config.teacher, where)
            is_paired = reads_its_own_tokens(config)
            tokenizer = _tokenizer(config)
            space = _token_space(config, tokenizer, is_paired=is_paired)
            config = _dated(config, first, tokenizer, space.tokenizer)
            corpus = open_data(config.data, tokenizer, teacher_tokenizer=space.tokenizer if is_paired else None)
            needed = required_rows(config, corpus, source)
            dtype = teacher_dtype(config.teacher.dtype, where)
            loaded, vocab_size = None, 0
            if all(is_there(place) and not missing_rows(Cache(place), needed) for place in places):
                vocab_size = read_manifest(first).vocab_size
            elif config.teacher.server:
                vocab_size = _served_vocabulary(config, tokenizer)
            else:
                loaded, vocab_size = _open(config, dtype, tokenizer, is_paired=is_paired)
        config = _at(config, places[first])
        is_done = fill(
            config, first, needed, space, where, dtype, loaded=loaded, vocab_size=vocab_size, tell=tell,
            beside={place: degree for place, degree in places.items() if place != first},
            on_progress=on_progress, is_stopped=stop.is_wanted,
        )  # fmt: skip
    if not is_done:
        left = len(missing_rows(Cache(first), needed))
        raise Interrupted(
            f"stopped with {left:,} of {len(needed):,} rows left to ask: {stop.reason}",
            where=str(out),
            advice=["give the same command again: finished shards are kept"],
        )
    result = {**cache_info(first), "rows_of_the_data": len(needed)}
    return {**result, "beside": [cache_info(place) for place in places if place != first]}


def _of_source(config: Config, source: str) -> Config:
    """The configuration with the teacher of a source as its own."""
    taught = config.data.source_teachers
    if source not in taught:
        raise ConfigError(
            f"no source of data.train with its own teacher is called {source}",
            where="--source",
            advice=[f"sources with a teacher: {', '.join(taught) or 'none'}"],
        )
    if is_cache(taught[source]):
        raise ConfigError(
            f"the teacher of {source} is a cache already: {taught[source]}",
            where="--source",
            advice=["name the model in the configuration to write its cache"],
        )
    return for_source(config, taught[source])


def _dated(config: Config, place: Path, *tokenizers: Any) -> Config:
    """The configuration with the day that its chat templates print: that of a cache which is continued, or today."""
    if config.data.day or not any(prints_day(tokenizer) for tokenizer in tokenizers):
        return config
    begun = read_manifest(place).about.get("day") if is_there(place) else None
    return config.on_day(day_or_today(str(begun or "")))


def _here(places: dict[Path, float]) -> dict[Path, float]:
    """The same places on this machine, where they are addresses of a store."""
    return {folder_of(place): degree for place, degree in places.items()}


def temperature_folders(config: Config, out: Path, temperatures: Sequence[float]) -> dict[Path, float]:
    """Where the answers at each temperature lie: in the folder itself where there is one, else in folders within."""
    if temperatures and config.objectives.span_weights:
        raise ConfigError(
            "likelihoods of spans are those of the models, at temperature 1: objectives.alm has its own temperature, "
            "which works on any stored answer",
            where="--temperature",
            advice=["leave --temperature out"],
        )
    if config.objectives.span_weights:
        return {out: 1.0}
    if not temperatures:
        degree = config.objectives.kd.temperature
        return {out: degree if isinstance(degree, float) else 1.0}
    return {out / f"temperature-{degree:g}": degree for degree in temperatures}


def _at(config: Config, temperature: float) -> Config:
    if config.objectives.kd.temperature == temperature or isinstance(config.objectives.kd.temperature, Ramp):
        return config  # one that moves is refused with advice where the signal is made
    kd = config.objectives.kd.model_copy(update={"temperature": temperature})
    return config.model_copy(update={"objectives": config.objectives.model_copy(update={"kd": kd})})


def _tokenizer(config: Config) -> Any:
    """The student's, as in a run; the teacher's where it brings none."""
    brings_own = not config.student.reads_as_teacher and has_tokenizer(config.student, config.student.model)
    section = config.student if brings_own else config.teacher
    return load_tokenizer(section, section.model)


def _token_space(config: Config, tokenizer: Any, *, is_paired: bool) -> TokenSpace:
    if not is_paired:
        return TokenSpace(tokenizer)
    own = load_tokenizer(config.teacher, config.teacher.model)
    return TokenSpace.of(config, own, matched_tokens(tokenizer, own))


def _open(config: Config, dtype: torch.dtype, tokenizer: Any, *, is_paired: bool) -> tuple[LoadedModel, int]:
    """The teacher, and the vocabulary that it shares with the student of the configuration, or its own."""
    own = load_tokenizer(config.teacher, config.teacher.model)
    teacher = open_live(config.teacher, dtype, own)
    if is_paired:
        return teacher, teacher.anatomy.vocab_rows
    if config.student.init == "shrink":
        return teacher, teacher.anatomy.vocab_rows
    if config.student.vocabulary == "teacher":
        return teacher, agree_on_vocabulary(own, own, teacher.anatomy.vocab_rows, num_ids(own))
    return teacher, agree_on_vocabulary(own, tokenizer, teacher.anatomy.vocab_rows, _student_rows(config))


def _student_rows(config: Config) -> int:
    student, _notes = load_student(config.student, seed=config.train.seed)
    return int(anatomy_of(student).vocab_rows)


def _served_vocabulary(config: Config, tokenizer: Any) -> int:
    """The vocabulary that the student shares with a teacher of which the tokenizer alone is here."""
    own = load_tokenizer(config.teacher, config.teacher.model)
    rows = num_ids(own) if config.student.vocabulary == "teacher" else _student_rows(config)
    return agree_on_vocabulary(own, tokenizer, served_rows(config.teacher, rows), rows)


# -- answers that others stored --------------------------------------------------------------------------


def import_cache(config: Config, out: Path, file: Path, kind: str) -> dict[str, Any]:
    """Make a cache of a file of log-probabilities. Rows that it does not answer are counted, and stay missing."""
    if reads_its_own_tokens(config):
        raise ConfigError(
            "log-probabilities that others wrote are read for the student's own tokens, and the teacher has others",
            where="--import",
            advice=["let the teacher write the cache: leave --import out", "choose a student of the teacher's family"],
        )
    out, tokenizer = folder_of(out), _tokenizer(config)
    given = read_answers(file, kind, tokenizer)
    asked = config.teacher.signal
    spec = SignalSpec("renormalised" if asked.kind == "renormalised" else "top_k", asked.k or num_kept(given), 0)
    if asked.kind not in ("auto", "top_k", "renormalised") or config.objectives.kd.temperature != 1.0:
        raise ConfigError(
            "imported log-probabilities are top-k at temperature 1",
            where="teacher.signal.kind, objectives.kd.temperature",
            advice=["leave both out, or set teacher.signal.kind = 'renormalised' where the file is so"],
        )
    if spec.kind == "top_k":
        check_tails(given, file)
    config = _dated(config, out, tokenizer)
    needed = required_rows(config, open_data(config.data, tokenizer))
    found = match_rows(given, needed, spec)
    if not found.answers:
        raise DataError(
            f"none of the {len(given):,} records of {file} is a row of the data",
            where=str(file),
            advice=[
                "a row is answered by a record that begins with its very tokens: see data.bos and data.max_length",
                "one row for each record: data.packing = 'rows'",
            ],
        )
    size = max(tokenizer.get_vocab().values()) + 1
    about = {"imported": kind, "teacher": file.name, "labels": found.counters["labels"] == found.counters["positions"],
             **day_of_rows(config)}  # fmt: skip
    manifest = open_store(out, Manifest(spec, size, vocabulary_hash(tokenizer), {"imported": kind}, about))
    missing = missing_rows(Cache(out), found.rows)
    for plan in plan_shards(missing, manifest.shard_tokens):
        commit_shard(out, plan, pack_shard({row.key: found.answers[row.key] for row in plan.rows}, manifest))
    left = len(missing_rows(Cache(out), needed))
    return {**cache_info(out), "rows_of_the_data": len(needed), "missing_rows": left, **found.counters}


# -- looking at one --------------------------------------------------------------------------------------


def cache_info(folder: Path) -> dict[str, Any]:
    """What a cache holds, from its manifest and the heads of its shards."""
    cache = Cache(folder_of(folder))
    origin = Origin.of(cache.folder)
    manifest, positions = cache.manifest, cache.num_positions
    counters = cache.counters
    return {
        "cache": origin.store.url if origin is not None else str(folder),
        "signal": {**manifest.signal.to_dict(), "text": describe(manifest.signal)},
        "teacher": {**dict(manifest.about), **dict(manifest.teacher)},
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "shards": len(cache.shards),
        "rows": cache.num_rows,
        "positions": positions,
        "bytes": cache.num_bytes,
        "bytes_per_position": cache.num_bytes / positions if positions else None,
        "mean_mass": cache.mean_mass,
        "unusable_positions": int(counters.get("unusable", 0)),
        "floored_log_probs": int(counters.get("floored", 0)),
    }


def verify_cache(folder: Path) -> dict[str, Any]:
    """Check every checksum and unpack every row. Raises at the end, naming what is wrong."""
    folder = folder_of(folder)
    faults = list(damaged_shards(folder))
    if not faults:
        with contextlib.closing(Cache(folder)) as cache:
            faults = list(cache.faults())
    if faults:
        first = faults[0]
        more = f", and {len(faults) - 1:,} more" if len(faults) > 1 else ""
        raise type(first)(f"{first.what}{more}", where=first.where, advice=first.advice)
    return {**cache_info(folder), "verified": True}


def check_config(config: Config) -> None:
    """A configuration that already reads from a cache is asked for its live teacher."""
    if config.teacher.is_student:
        raise ConfigError(
            f"teacher.model = {config.teacher.model!r} is the student's own network: there are no answers to store",
            where="teacher.model",
            advice=[f"name the base instead: --teacher {config.student.model}"],
        )
    if config.teacher.signal.kind == "dense":
        raise ConfigError(
            "a cache holds no dense answers",
            where="teacher.signal.kind",
            advice=["leave it out, or name a sparse kind"],
        )
