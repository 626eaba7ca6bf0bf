"""A teacher on a server for a run or for a cache: opened, tried on rows of the data, and its cache filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from stillroom import __version__
from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.curriculum import Curriculum
from stillroom.data import Rows, fixed_batches
from stillroom.errors import ConfigError
from stillroom.models import vocabulary_hash
from stillroom.models.load.files import read_json
from stillroom.models.load.source import fetch
from stillroom.teachers.cache.manifest import Manifest, check_same, is_there, read_manifest
from stillroom.teachers.cache.plan import NeededRow
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import Progress, missing_rows, open_store, write_missing
from stillroom.teachers.served.server import Server, open_server
from stillroom.teachers.served.teacher import ServedTeacher, Window
from stillroom.teachers.spec import check_use, served_spec

_LEAST_ROW = 8  # tokens that data.max_length has at least
_TRIAL_ROWS = 64  # spread over the data; they are asked until there are enough positions
SHARD_TOKENS = 8_192  # a served teacher is large: what a kill costs is kept small
PROBE = "probe"  # in the manifest of a cache: how the probe was answered when it was begun


def asks_server(config: Config) -> bool:
    return bool(config.teacher.server) and Curriculum.of(config).uses_teacher


def served_rows(section: TeacherConfig, student_rows: int) -> int:
    """Rows of the served model's head, where its configuration lies beside its tokenizer; else the student's."""
    source = fetch(section, section.model, weights=False)
    if source.is_gguf or not (source.folder / "config.json").is_file():
        return student_rows
    told = read_json(source, "config.json")
    found = told.get("vocab_size", told.get("text_config", {}).get("vocab_size"))
    return found if isinstance(found, int) else student_rows


def served_teacher(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    rows: Rows,
    device: torch.device,
    *,
    window: Window | None = None,
) -> ServedTeacher:
    """The server as a teacher, after its probe and a trial on rows of the data."""
    spec, section = served_spec(config), config.teacher
    server = open_server(section, tokenizer, num_wanted=spec.exact, vocab_size=vocab_size)
    _check_length(server, rows)
    teacher = ServedTeacher(
        server,
        spec,
        vocab_size=vocab_size,
        device=device,
        concurrency=section.requests.concurrency,
        window=window,
        notes=check_use(config, spec),
    )
    if section.requests.check_temperature:
        teacher.notes += (teacher.try_rows(list(fixed_batches(rows, 1, _TRIAL_ROWS))),)
    return teacher


def _check_length(server: Server, rows: Rows) -> None:
    """A row is sent with its last target, and the server generates one token, which nobody reads."""
    limit = server.facts.max_tokens
    longest = int(rows.longest.max()) + 2 if len(rows) else 0
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a row and the tokens after it are {longest:,} tokens, and the server takes {limit:,}",
            where="data.max_length",
            advice=[
                *([f"--set data.max_length={limit - 2}"] if limit >= _LEAST_ROW + 2 else []),
                "start the server with a longer context",
            ],
        )


# -- its cache -------------------------------------------------------------------------------------------


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
    here = Manifest(teacher.spec, vocab_size, vocabulary_hash(tokenizer), identity, about, SHARD_TOKENS)
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


def whose_answers(manifest: Manifest) -> list[str]:
    """For the log, where a cache was written from a server's answers: they cannot be held against weights."""
    if "served_model" not in manifest.teacher:
        return []
    return [f"the answers are those of {manifest.about.get('teacher', manifest.teacher['served_model'])}"]
