"""The cache of a configuration: its folder, the rows it needs, whether it is the right one, and filling it."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stillroom import __version__
from stillroom.config import Config
from stillroom.core.errors import BrokenAtStart, ConfigError, DataError
from stillroom.core.files import ROUNDS
from stillroom.data import Corpus, Rows, fixed_rows
from stillroom.data.corpus import TeacherRows
from stillroom.data.loader import MixedRows
from stillroom.models import LoadedModel, load_tokenizer, vocabulary_hash
from stillroom.models.files import teacher_identity
from stillroom.teachers.base import Teacher, Window
from stillroom.teachers.cache.in_store import folder_of
from stillroom.teachers.cache.manifest import SHARD_TOKENS, Manifest, check_same, is_there, read_manifest
from stillroom.teachers.cache.reader import Cache, CachedTeacher
from stillroom.teachers.cache.writer import NeededRow, Progress, missing_rows, needed_rows, open_store, write_missing
from stillroom.teachers.live import live_teacher, open_live
from stillroom.teachers.paired import TokenSpace
from stillroom.teachers.quantize import plainly_quantised, quantise_teacher
from stillroom.teachers.served.teacher import served_teacher
from stillroom.teachers.signals import AUTO, cache_spec, check_use, served_spec, stored_spec
from stillroom.teachers.sparse import SparseTeacher
from stillroom.telemetry.wording import quantised_line

_NAMED = 3
SERVED_SHARD_TOKENS = 8_192  # a served teacher is large: what a kill costs is kept small
PROBE = "probe"  # in the manifest of a cache: how the probe was answered when it was begun
_LARGE = 300_000_000  # parameters of a teacher that may take minutes for a shard: what a kill costs is kept small

Tell = Callable[[str], object]


def cache_folder(config: Config, folder: Path | None, space: TokenSpace, dtype: torch.dtype) -> Path:
    """Where the cache of a run is. An automatic one lies next to the run's folder, named for its teacher.

    So runs that lie side by side share it, and a run with another teacher or another signal makes another one.
    """
    if config.teacher.cache != AUTO:
        place = folder_of(str(config.teacher.cache))
        read_manifest(place)  # before anything is loaded
        return place
    if folder is None:
        raise ConfigError(
            "teacher.cache = 'auto' lies next to a run's folder, and there is none", where="teacher.cache"
        )
    identity = teacher_identity(config.teacher, dtype)
    spec = cache_spec(config, space.shared)
    told = json.dumps([identity, spec.to_dict(), vocabulary_hash(space.tokenizer)], sort_keys=True)
    name = hashlib.blake2b(told.encode("utf-8"), digest_size=6).hexdigest()
    home = folder.resolve().parent
    home = home.parent.parent if home.name == ROUNDS else home  # rounds share that of their run
    return home / f"teacher-cache-{name}"


def check_tokenizer(place: Path, tokenizer: Any) -> Manifest:
    """Raise unless a cache holds answers to rows in these tokens."""
    manifest = read_manifest(place)
    if manifest.tokenizer != vocabulary_hash(tokenizer):
        raise ConfigError(
            f"{place} was written for another tokenizer: its hash is {manifest.tokenizer}, here "
            f"{vocabulary_hash(tokenizer)}",
            where="teacher.cache",
            advice=["choose a student of the teacher's family", "write a cache for this configuration"],
        )
    return manifest


def stored_vocabulary(place: Path, tokenizer: Any, student_rows: int) -> int:
    """The vocabulary of a cache, which the student must be able to answer."""
    manifest = check_tokenizer(place, tokenizer)
    if manifest.vocab_size > student_rows:
        raise ConfigError(
            f"{place} was written for {manifest.vocab_size:,} tokens, and the student's head has {student_rows:,}",
            where="teacher.cache",
            advice=["write the cache with this student in the configuration: both then agree on a vocabulary"],
        )
    return manifest.vocab_size


def required_rows(config: Config, corpus: Corpus, source: str | None = None) -> list[NeededRow]:
    """All training rows, and the held-out rows that evaluations use; the teacher's own where it has others.

    Of a `source` with its own teacher its training rows alone; those are not asked of the main one.
    """
    trained = [corpus.train]
    if isinstance(corpus.train, MixedRows) and config.data.source_teachers:
        apart = config.data.source_teachers
        parts = [one for one in corpus.train.parts if (one.name not in apart if source is None else one.name == source)]
        trained = [part.rows for part in parts]
    sides: list[tuple[Rows, Sequence[int]]] = [(rows, range(len(rows))) for rows in trained]
    if source is None:
        size = config.eval.batch_size or config.train.rows_per_batch
        sides.append((corpus.evaluation, fixed_rows(corpus.evaluation, size, config.eval.limit)))
    return needed_rows((rows_asked(rows), indices) for rows, indices in sides)


def rows_asked(rows: Rows) -> Rows:
    """The rows as the teacher reads them."""
    return TeacherRows(rows) if len(rows.other_lengths) else rows


# -- using it --------------------------------------------------------------------------------------------


def cached_teacher(
    config: Config,
    place: Path,
    space: TokenSpace,
    corpus: Corpus,
    device: torch.device,
    dtype: torch.dtype,
    *,
    loaded: LoadedModel | None,
    vocab_size: int,
    window: Window,
    tell: Tell,
    source: str | None = None,
) -> CachedTeacher:
    """The teacher that answers from a cache, once it is known to be the right one and to answer every row.

    An automatic cache is written first where rows are missing, with the loaded teacher, which is then let go. The cache
    of a `source` is that of whichever model wrote it.
    """
    needed = required_rows(config, corpus, source)
    if config.teacher.cache == AUTO:
        fill(config, place, needed, space, device, dtype, loaded=loaded, vocab_size=vocab_size, tell=tell)
    cache = Cache(place)
    asked = stored_spec(config, cache.manifest.signal, space.shared)
    asked = space.within(asked, cache.manifest.vocab_size)
    identity, notes = _identity_here(config) if source is None else ({}, list[str]())
    here = Manifest(asked, cache.manifest.vocab_size, vocabulary_hash(space.tokenizer), identity)
    check_same(cache.manifest, here, place)
    _check_coverage(cache, needed, place, config.data.day)
    # There are no weights to compare a server's answers with, and a source names none.
    if (served := cache.manifest.teacher.get("served_model")) or source is not None:
        about = "the answers" if source is None else f"source {source}: the answers"
        notes.append(f"{about} are those of {cache.manifest.about.get('teacher', served or place)}")
    for text in (*notes, *check_use(config, asked)):
        tell(text)

    def load_whole() -> Teacher:
        # As it was measured when its answers were stored.
        return live_teacher(config, plainly_quantised(config, open_live(config.teacher, dtype), device),
                            cache.manifest.vocab_size, device)  # fmt: skip

    is_compared = config.teacher.signal.compare == "whole"
    return CachedTeacher(cache, device=device, window=window, load_whole=load_whole if is_compared else None)


def _identity_here(config: Config) -> tuple[dict[str, Any], list[str]]:
    """Which teacher the configuration names, where its files are here; a dtype only where one is asked for."""
    try:
        dtype = None if config.teacher.dtype == "auto" else config.teacher.dtype
        return teacher_identity(config.teacher, dtype), []
    except BrokenAtStart as error:
        if config.teacher.signal.compare == "whole":
            raise
        return {}, [
            f"whether the cache is of {config.teacher.model} cannot be told, its files are not here: {error.what}"
        ]


def _check_coverage(cache: Cache, needed: Sequence[NeededRow], place: Path, day: str) -> None:
    missing = missing_rows(cache, needed)
    if not missing:
        return
    written = cache.manifest.about.get("day")
    if written and day and written != day:
        raise DataError(
            f"{place} was written on another day, and the chat template prints the day into the text: {written} there, "
            f"{day} here; {len(missing):,} of {len(needed):,} rows are not in it",
            where="teacher.cache, data.day",
            advice=[
                f"begin a run of that day: --set data.day={written}",
                f"or add the rows of this one: stillroom cache CONFIG --out {place} --set data.day={day}",
            ],
        )
    names = ", ".join(row.name for row in missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
    told = f"{len(missing):,} of {len(needed):,} rows of the data are not in {place}: {names}"
    if len(missing) == len(needed):
        told = f"{place} is a cache of other data: it answers none of these {len(needed):,} rows"
    raise DataError(
        told,
        where="teacher.cache",
        advice=[
            f"add them, and keep what is there: stillroom cache CONFIG --out {place}",
            "rows are known by their tokens and targets: data.max_length, data.packing, data.bos and data.chat change "
            "them (--set data.chat=off for records of a prompt and an answer as they stand)",
            "leave teacher.cache out: the teacher then answers live",
        ],
    )


# -- filling it ------------------------------------------------------------------------------------------


def new_manifest(
    config: Config,
    space: TokenSpace,
    vocab_size: int,
    dtype: torch.dtype,
    loaded: LoadedModel | None,
    temperature: float | None = None,
) -> Manifest:
    """What a cache of this configuration is, at its temperature or at another."""
    about: dict[str, Any] = {"teacher": config.teacher.model, "stillroom": __version__, "torch": torch.__version__}
    about |= day_of_rows(config)
    shard_tokens = SHARD_TOKENS
    if loaded is not None:
        about |= {"parameters": loaded.anatomy.num_parameters, **loaded.facts}
        shard_tokens //= 4 if loaded.anatomy.num_parameters > _LARGE else 1
    identity = teacher_identity(config.teacher, dtype)
    spec = space.within(cache_spec(config, space.shared), vocab_size)
    spec = spec if temperature is None else replace(spec, temperature=temperature)
    return Manifest(spec, vocab_size, vocabulary_hash(space.tokenizer), identity, about, shard_tokens)


def fill(
    config: Config,
    place: Path,
    needed: Sequence[NeededRow],
    space: TokenSpace,
    device: torch.device,
    dtype: torch.dtype,
    *,
    loaded: LoadedModel | None,
    vocab_size: int,
    tell: Tell,
    beside: Mapping[Path, float] | None = None,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> bool:
    """Write the rows that are missing. The teacher is loaded for them only, and let go of at the end.

    `beside` are folders of the same answers at other temperatures, filled in the same pass.
    """
    others = dict(beside or {})
    if config.teacher.server:
        return fill_served(
            config, place, needed, space.tokenizer, vocab_size, device, tell=tell, num_others=len(others),
            on_progress=on_progress, is_stopped=is_stopped,
        )  # fmt: skip

    def ready(full: LoadedModel) -> LoadedModel:
        rows, write = needed[0].rows, lambda _event, **fields: tell(quantised_line(fields))
        return quantise_teacher(config, full, rows, vocab_size, device, write=write)

    loaded = None if loaded is None else ready(loaded)
    for folder, temperature in {place: None, **others}.items():
        open_store(folder, new_manifest(config, space, vocab_size, dtype, loaded, temperature))
    missing = max((missing_rows(Cache(folder), needed) for folder in (place, *others)), key=len)
    if missing:
        if loaded is None:
            own = load_tokenizer(config.teacher, config.teacher.model)
            loaded = ready(open_live(config.teacher, dtype, own))
        tell(f"the teacher is asked {len(missing):,} of {len(needed):,} rows, and its answers are kept in {place}")
        live = live_teacher(config, loaded, vocab_size, device)
        spec = read_manifest(place).signal
        teacher = SparseTeacher(live, spec, coarse=space.coarse(spec, vocab_size))
        is_done = write_missing(place, needed, teacher, beside=tuple(others), tell=on_progress, is_stopped=is_stopped)
    else:
        is_done = True
    if loaded is not None:  # free the weights; names and shapes stay for whoever still has the network
        loaded.network.to("meta")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return is_done


# -- from a server ---------------------------------------------------------------------------------------


def day_of_rows(config: Config) -> dict[str, Any]:
    """What a manifest says of the day that a chat template printed into the rows; nothing where none does."""
    return {"day": config.data.day} if config.data.day else {}


def fill_served(
    config: Config,
    place: Path,
    needed: Sequence[NeededRow],
    tokenizer: Any,
    vocab_size: int,
    device: torch.device,
    *,
    tell: Callable[[str], object],
    num_others: int,
    on_progress: Callable[[Progress], None],
    is_stopped: Callable[[], bool],
) -> bool:
    """Write the missing rows from the answers of a server, if it is the one that the cache was begun with."""
    if num_others:
        raise ConfigError(
            "a server gives log-probabilities of temperature 1 alone", where="--temperature", advice=["leave it out"]
        )
    if is_there(place) and not missing_rows(Cache(place), needed):
        spec, named = served_spec(config).within(vocab_size), {"served_model": config.teacher.requests.model}
        check_same(read_manifest(place), Manifest(spec, vocab_size, vocabulary_hash(tokenizer), named), place)
        return True
    teacher = served_teacher(config, tokenizer, vocab_size, needed[0].rows, device)
    facts = teacher.server.facts
    about = {**facts.to_dict(), "teacher": f"{facts.model} on {facts.url}", "stillroom": __version__,
             PROBE: [round(value, 4) for value in teacher.server.probed], **day_of_rows(config)}  # fmt: skip
    identity = {"served_model": facts.model}
    here = Manifest(teacher.spec, vocab_size, vocabulary_hash(tokenizer), identity, about, SERVED_SHARD_TOKENS)
    there = open_store(place, here)
    if PROBE in there.about:
        teacher.check_stored(there.about[PROBE])
    missing = missing_rows(Cache(place), needed)
    for text in teacher.notes:
        tell(text)
    tell(f"the teacher is asked {len(missing):,} of {len(needed):,} rows, and its answers are kept in {place}")
    try:
        is_done = write_missing(place, needed, teacher, tell=on_progress, is_stopped=is_stopped)
    finally:
        teacher.close()
    tell(", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in teacher.facts().items()))
    return is_done
