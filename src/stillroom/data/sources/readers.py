"""Readers of the file formats. Each yields (where, object) and counts in the tally what it refuses.

`where` is "file:number": the line in JSONL, CSV and text, the item in JSON and Parquet. JSONL, CSV, Parquet and text
are read piece by piece; JSON is read whole.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from stillroom.config.extensions import READERS
from stillroom.data.records import FIELDS, Tally, is_blank
from stillroom.data.sources.compressed import data_suffix, open_bytes, open_seekable
from stillroom.data.sources.needed import needed
from stillroom.errors import DataError

Item = tuple[str, object]
Reader = Callable[[Path, str, Tally], Iterator[Item]]

MAX_LINE_BYTES = 10 * 2**20

_UTF8_MARK = b"\xef\xbb\xbf"
_TEXTS = (".csv", ".json", ".jsonl", ".txt")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_DOCUMENT_BREAK = re.compile(rb"[ \t]*(?:\f|<\|endoftext\|>)[ \t\r]*\n?")


def refuse_utf16(path: Path) -> None:
    if data_suffix(path) in _TEXTS:
        with open_bytes(path) as file:
            if file.read(2) in _UTF16_MARKS:
                raise DataError(f"{path} is encoded as UTF-16", advice=["save it as UTF-8"])


_NOT_UTF8 = "holds bytes that are not UTF-8: save it as UTF-8"


def _decoded(raw: bytes, where: str, tally: Tally) -> str | None:
    """Decode UTF-8. Refuse a text with other bytes: put in their place, U+FFFD would be learned."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        tally.refuse(where, _NOT_UTF8)
        return None


def _lines(path: Path, name: str, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """Numbered lines with their line ends. Refuse a line above MAX_LINE_BYTES without holding it in memory."""
    with open_bytes(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                tally.refuse(f"{name}:{number}", f"the line is longer than {MAX_LINE_BYTES >> 20} MB")
                continue
            yield number, raw.removeprefix(_UTF8_MARK) if number == 1 else raw


def _read_jsonl(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    for number, raw in _lines(path, name, tally):
        line = _decoded(raw, f"{name}:{number}", tally)
        if line is None or (is_blank(line) and "\0" not in line):
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            tally.refuse(f"{name}:{number}", f"broken JSON: {error}")
            continue
        yield f"{name}:{number}", value


def _read_json(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    with open_bytes(path) as file:
        raw = file.read().removeprefix(_UTF8_MARK)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} holds bytes that are not UTF-8", advice=["save it as UTF-8"]) from error
    if is_blank(text):
        return
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        advice = ["if each line is an object of its own, rename the file to .jsonl", "otherwise mend it at that place"]
        raise DataError(f"{path} is broken JSON: {error}", advice=advice) from error
    if not isinstance(values, list):
        raise DataError(f"{path} holds no list of objects", advice=["write [{...}, {...}], or JSONL: an object a line"])
    for number, value in enumerate(values, 1):
        yield f"{name}:{number}", value


def _read_csv(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    broken: list[int] = []  # lines since the last row that are not UTF-8; a row may have several lines

    def decoded() -> Iterator[str]:
        for number, raw in _lines(path, name, tally):
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError:
                broken.append(number)
                yield raw.decode("utf-8", errors="replace")

    limit = csv.field_size_limit(MAX_LINE_BYTES)  # the default, 128 KB, is too small for long documents
    try:
        reader = csv.DictReader(decoded())
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                tally.refuse(f"{name}:{reader.line_num}", f"broken CSV: {error}")
                broken.clear()
                continue
            if row is None:
                return
            if broken:
                tally.refuse(f"{name}:{broken[0]}", _NOT_UTF8)
                broken.clear()
                continue
            if None in row:
                tally.refuse(f"{name}:{reader.line_num}", "has more cells than the header")
                continue
            yield f"{name}:{reader.line_num}", row
    finally:
        csv.field_size_limit(limit)


def read_parquet(path: Path, name: str, tally: Tally, wanted: Collection[str] = ()) -> Iterator[Item]:
    """The rows of a Parquet file. Of its columns only those `wanted`, else those that records are made of.

    Without any of them, all columns are read, so that an error can name them.
    """
    arrow = needed("pyarrow", path.name)
    parquet = needed("pyarrow.parquet", path.name)
    number = 0
    with open_seekable(path) as file:
        try:
            table = parquet.ParquetFile(file)
            there = table.schema_arrow.names
            columns = [column for column in there if column in (wanted or FIELDS)]
            is_whole = bool(columns) and all(column in there for column in wanted)
            for batch in table.iter_batches(batch_size=256, columns=columns if is_whole else None):
                for row in range(batch.num_rows):
                    number += 1
                    try:
                        yield f"{name}:{number}", batch.slice(row, 1).to_pylist()[0]
                    except UnicodeDecodeError:
                        tally.refuse(f"{name}:{number}", "a text column holds bytes that are not UTF-8")
        except arrow.ArrowException as error:
            advice = ["download or write it again"]
            raise DataError(f"{path} is not a readable Parquet file: {error}", advice=advice) from error


def _read_text(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    """The documents of a text file: a line with a form feed or <|endoftext|> alone stands between two."""
    lines: list[bytes] = []
    first = number = 1
    with open_bytes(path) as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(_UTF8_MARK) if number == 1 else raw
            if not _DOCUMENT_BREAK.fullmatch(line):
                lines.append(line)
                continue
            yield from _document(lines, f"{name}:{first}", tally)
            lines, first = [], number + 1
    yield from _document(lines, f"{name}:{first}", tally)


def _document(lines: list[bytes], where: str, tally: Tally) -> Iterator[Item]:
    text = _decoded(b"".join(lines), where, tally)
    if text is not None and not is_blank(text):
        yield where, {"text": text}


def register(suffix: str, reader: Reader) -> None:
    """Register a reader for files with a suffix such as ".md", in this process. A package uses an entry point."""
    READERS.register(suffix, reader)


register(".csv", _read_csv)
register(".json", _read_json)
register(".jsonl", _read_jsonl)
register(".parquet", read_parquet)
register(".txt", _read_text)

OURS = (_read_csv, _read_json, _read_jsonl, read_parquet, _read_text)  # they decompress
