"""Read the raw objects of a spec: a file, a glob, a folder, or a dataset.

Readers yield (where, object) and count in the tally what they refuse. `where` is "file:number". The files of a glob or
folder are read in the order of their names.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

from stillroom.config.extensions import READERS
from stillroom.data.records import Tally
from stillroom.data.sources.compressed import data_suffix, is_compressed
from stillroom.data.sources.datasets import HUB_PREFIX, is_saved, read_hub, read_saved
from stillroom.data.sources.finding import locate, unread
from stillroom.data.sources.readers import OURS, Item, Reader, read_parquet, refuse_utf16, register
from stillroom.errors import DataError
from stillroom.remote import is_url

__all__ = [
    "HUB_PREFIX",
    "Item",
    "Reader",
    "is_files",
    "locate",
    "named_files",
    "note_unread",
    "pieces_of",
    "read_file",
    "read_files",
    "read_hub",
    "read_spec",
    "register",
]

PIECE_CHARACTERS = 8_000
_NUM_NAMED = 3


def is_files(spec: str) -> bool:
    """Whether a spec that is no embedded corpus names data files, and no dataset."""
    return is_url(spec) or (not spec.startswith(HUB_PREFIX) and not is_saved(Path(spec).expanduser()))


def read_spec(
    spec: str, tally: Tally, *, is_evaluation: bool = False, streams: bool = False, columns: Collection[str] = ()
) -> Iterator[Item]:
    """The objects of any spec but an embedded corpus. `columns` are needed, where a format can leave others unread."""
    if is_url(spec):
        return read_files(spec, tally, columns)
    if spec.startswith(HUB_PREFIX):
        return read_hub(spec, is_evaluation=is_evaluation, streams=streams)
    folder = Path(spec).expanduser()
    if is_saved(folder):
        return read_saved(folder, is_evaluation=is_evaluation)
    return read_files(spec, tally, columns)


def read_files(spec: str, tally: Tally, columns: Collection[str] = ()) -> Iterator[Item]:
    """The objects of a file, glob or folder."""
    files = named_files(spec)
    note_unread(spec, [path for path, _ in files], tally)
    for path, name in files:
        yield from read_file(path, name, tally, spec=spec, is_alone=len(files) == 1, columns=columns)


def note_unread(spec: str, paths: list[Path], tally: Tally) -> None:
    """Note the files of a folder that are not among those that are read."""
    if others := unread(spec, paths):
        named = ", ".join(path.name for path in others[:_NUM_NAMED]) + (", ..." if len(others) > _NUM_NAMED else "")
        tally.note(f"{len(others):,} files of the folder {spec} are of no format that is read: {named}")


def named_files(spec: str) -> list[tuple[Path, str]]:
    """The files of a spec, each with the name that its records begin with."""
    paths = locate(spec)
    root = os.path.commonpath([path.parent for path in paths])
    return [(path, path.relative_to(root).as_posix()) for path in paths]


def read_file(
    path: Path, name: str, tally: Tally, *, spec: str = "", is_alone: bool = True, columns: Collection[str] = ()
) -> Iterator[Item]:
    """The objects of one file. An empty file is refused, or if it is not alone counted as a bad record."""
    is_empty = True
    num_bad = tally.counters["bad_records"]
    try:
        refuse_utf16(path)
        for item in _reader(path, columns)(path, name, tally):
            is_empty = False
            yield item
    except OSError as error:
        advice = ["check that the file is whole and that you may read it"]
        raise DataError(f"{path} cannot be read: {error.strerror or error}", where=spec, advice=advice) from error
    is_empty = is_empty and tally.counters["bad_records"] == num_bad
    if is_empty and is_alone:
        raise DataError(f"{path} is empty: no record is in it", advice=["check how it was written or downloaded"])
    if is_empty:
        tally.refuse(name, "the file is empty")


def _reader(path: Path, columns: Collection[str]) -> Reader:
    reader: Reader = READERS.find(data_suffix(path))
    if reader is read_parquet:
        return partial(read_parquet, wanted=columns)
    if is_compressed(path) and reader not in OURS:
        raise DataError(
            f"{path} is compressed, and the reader of {data_suffix(path)} files reads plain ones",
            advice=["decompress it and name the result"],
        )
    return reader


def pieces_of(text: str) -> list[tuple[int, str]]:
    """Cut a text between paragraphs into (first line, piece). The pieces joined are the text.

    A piece has about PIECE_CHARACTERS; fewer in a short text, so that there are about twenty. A long paragraph is cut
    at the end of a line.
    """
    size = min(PIECE_CHARACTERS, max(200, len(text) // 20))
    pieces: list[tuple[int, str]] = []
    start = position = 0
    first = 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        position += len(line)
        length = position - start
        if length >= 2 * size or (length >= size and not line.strip()):
            pieces.append((first, text[start:position]))
            start, first = position, number + 1
    if start < len(text):
        pieces.append((first, text[start:]))
    return pieces
