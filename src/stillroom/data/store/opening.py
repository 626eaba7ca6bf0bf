"""Decide whether the files of a spec go through the token store, and open them there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stillroom.config.data import DataConfig, SourceConfig
from stillroom.data.chat import day_or_today, prints_day
from stillroom.data.encode import Tokenizer
from stillroom.data.records import Tally
from stillroom.data.sources import Item, is_files, named_files, note_unread, pieces_of, read_file, read_files
from stillroom.data.sources.checked import checked
from stillroom.data.sources.compressed import data_suffix
from stillroom.data.store.keys import tokenizers_digest
from stillroom.data.store.part import Part
from stillroom.data.store.store import Source, TokenStore, default_folder

WORTH_STORING = 32 << 20  # bytes of all files together: less is tokenized faster than it is worth keeping


def stored_parts(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    tally: Tally,
    *,
    teacher: Tokenizer | None = None,
    splits_text: bool = False,
    tell: Callable[[str], object] | None = None,
) -> list[Part] | None:
    """The parts of all files of a source, in the order of the files; None if it is to be read in memory.

    What was counted while reading and tokenizing is added to the tally. `splits_text` cuts a lone text into pieces.
    With a tokenizer of the `teacher` its tokens and the spans of both are kept beside the student's.
    """
    spec = source.path
    if config.cache == "off" or not is_files(spec):
        return None
    files = named_files(spec)
    if config.cache == "auto" and sum(path.stat().st_size for path, _ in files) < WORTH_STORING:
        return None
    is_alone = len(files) == 1
    cuts = splits_text and is_alone and data_suffix(files[0][0]) == ".txt"
    digest = tokenizers_digest(tokenizer, teacher)
    if digest is None:
        tally.note("the token store is not used: the tokenizer cannot be saved, so it cannot be recognised")
        return None
    if why := _why_not(source, config, cuts=cuts):
        tally.note(f"the token store is not used for {spec}: {why}")
        return None
    folder = default_folder() if config.cache == "auto" else Path(config.cache).expanduser()
    hear, cores = tell or tally.note, num_usable_cores()
    store = TokenStore(folder, config.alone(source), tokenizer, digest, hear, cores, teacher)
    _check_layout(source)
    note_unread(spec, [path for path, _ in files], tally)
    prints = any(prints_day(one) for one in (tokenizer, teacher) if one is not None)
    variant = " ".join([*(["cut"] if cuts else []), *([day_or_today(config.day)] if prints else [])])
    parts: list[Part] = []
    for path, name in files:
        read = partial(read_file, path, name, spec=spec, is_alone=is_alone, columns=source.needed_columns)
        items = partial(_cut_items, path, name, read) if cuts else read
        parts += store.parts(Source(path, name, items, variant))
    for part in parts:
        tally.absorb(part.tally)
    del tally.bad[_NUM_BAD_KEPT:]
    return parts


def _why_not(source: SourceConfig, config: DataConfig, *, cuts: bool) -> str:
    """Why a source cannot be kept as whole files of records; empty if it can."""
    if config.max_records:
        return "data.max_records may end inside of a file"
    if cuts and source.has_layout:
        return "a lone text with a layout is cut into pieces after it was laid out"
    return ""


def _check_layout(source: SourceConfig) -> None:
    """Raise if the first objects of the source lack a column of its layout, as `read_records` does."""
    if source.has_layout:
        items = read_files(source.path, Tally(), source.needed_columns)
        next(checked(items, source, source.path), None)


_NUM_BAD_KEPT = 20


def num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cut_items(path: Path, name: str, read: Callable[[Tally], Iterator[Item]], tally: Tally) -> Iterator[Item]:
    """The objects of a text file; if it is one document, its pieces, so that part of it can be held out."""
    items = list(itertools.islice(found := read(tally), 2))
    if len(items) > 1 or not items:
        yield from itertools.chain(items, found)
        return
    value = items[0][1]
    text = str(value["text"]) if isinstance(value, dict) else ""
    pieces = [(line, piece) for line, piece in pieces_of(text) if piece.strip()]
    if len(pieces) > 1:
        tally.note(f"{name} is one document: it is cut between paragraphs into {len(pieces):,} to hold some out")
    for line, piece in pieces:
        yield f"{name}:{line}", {"text": piece}
