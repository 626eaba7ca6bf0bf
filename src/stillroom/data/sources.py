"""Read the raw objects of a spec: a file, a glob of files, or a dataset of the hub.

Readers yield (where, object) and count in the tally what they refuse. `where` is "file:number": the line in JSONL,
CSV and text, the item in JSON, Parquet and datasets. The files of a glob are read in the order of their names.
"""

from __future__ import annotations

import csv
import difflib
import glob
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stillroom.config.extensions import READERS
from stillroom.data.records import FIELDS, Tally, is_blank
from stillroom.errors import DataError

Item = tuple[str, object]
Reader = Callable[[Path, str, Tally], Iterator[Item]]

MAX_LINE_BYTES = 10 * 2**20
PIECE_CHARACTERS = 8_000
HUB_PREFIX = "hf:"

_UTF8_MARK = b"\xef\xbb\xbf"
_TEXTS = (".csv", ".json", ".jsonl", ".txt")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_DOCUMENT_BREAK = re.compile(r"^[ \t]*(?:\f|<\|endoftext\|>)[ \t\r]*(?:\n|\Z)", re.MULTILINE)


def read_files(spec: str, tally: Tally) -> Iterator[Item]:
    """The objects of a file or glob."""
    paths = locate(spec)
    root = os.path.commonpath([path.parent for path in paths])
    for path in paths:
        name = path.relative_to(root).as_posix()
        is_empty = True
        num_bad = tally.counters["bad_records"]
        try:
            _refuse_utf16(path)
            for item in READERS.find(path.suffix.lower())(path, name, tally):
                is_empty = False
                yield item
        except OSError as error:
            advice = ["check that the file is whole and that you may read it"]
            raise DataError(f"{path} cannot be read: {error.strerror or error}", where=spec, advice=advice) from error
        is_empty = is_empty and tally.counters["bad_records"] == num_bad
        if is_empty and len(paths) == 1:
            raise DataError(f"{path} is empty: no record is in it", advice=["check how it was written or downloaded"])
        if is_empty:
            tally.refuse(name, "the file is empty")


# -- finding ---------------------------------------------------------------------------------------------


def locate(spec: str) -> list[Path]:
    """The files of a spec, sorted. Raise if there are none or if one has a suffix without a reader."""
    path = Path(spec).expanduser()
    try:
        is_there = path.exists()
    except OSError as error:  # not a valid file name
        raise DataError(f"{spec[:80]} is no name of a file: {error.strerror}", advice=["check data.train"]) from error
    if path.is_dir():
        raise DataError(f"{spec} is a folder, not a file", advice=_globs_for(path))
    if is_there:
        paths = [path]
    elif glob.has_magic(spec):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        paths = sorted(match for match in map(Path, names) if match.is_file())
        if not paths:
            raise DataError(f"no file matches {spec}", advice=[f"list what is there: ls {path.parent}"])
    else:
        raise DataError(f"{spec} does not exist", advice=_similar_names(path))
    for file in paths:
        if file.suffix.lower() not in READERS:
            raise DataError(
                f"{file} has the extension {file.suffix or 'of no kind'!r}, which is not read",
                where=spec if len(paths) > 1 else "",
                advice=[f"rename or convert it to one of {', '.join(READERS.names())}"],
            )
    return paths


def _globs_for(folder: Path) -> list[str]:
    suffixes = sorted({path.suffix.lower() for path in folder.iterdir()} & {*READERS.names()})
    if not suffixes:
        return [f"it holds no {', '.join(READERS.names())}; name a file or a glob"]
    return [f"name its files with a glob: '{folder / f'*{suffix}'}'" for suffix in suffixes]


def _similar_names(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return [f"the folder {path.parent} does not exist either; check the path, or name a glob in quotes"]
    names = sorted(entry.name for entry in path.parent.iterdir())
    similar = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if Path(n).suffix in READERS][:3]
    if similar:
        return [f"did you mean {path.parent / name}" for name in similar]
    return [f"{path.parent} holds no data files; for a hub dataset write hf:NAME, for embedded text builtin:stdlib"]


# -- reading ---------------------------------------------------------------------------------------------


def _refuse_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if path.suffix.lower() in _TEXTS and file.read(2) in _UTF16_MARKS:
            raise DataError(f"{path} is encoded as UTF-16", advice=["save it as UTF-8"])


def _decoded(raw: bytes, tally: Tally) -> str:
    """Decode UTF-8. Replace invalid bytes by U+FFFD and count the text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        tally.counters["invalid_utf8"] += 1
        return raw.decode("utf-8", errors="replace")


def _lines(path: Path, name: str, tally: Tally) -> Iterator[tuple[int, str]]:
    """Numbered lines with their line ends. Refuse a line above MAX_LINE_BYTES without holding it in memory."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = file.readline(MAX_LINE_BYTES)
                tally.refuse(f"{name}:{number}", f"the line is longer than {MAX_LINE_BYTES >> 20} MB")
                continue
            yield number, _decoded(raw.removeprefix(_UTF8_MARK) if number == 1 else raw, tally)


def _read_jsonl(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    for number, line in _lines(path, name, tally):
        if is_blank(line) and "\0" not in line:
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            tally.refuse(f"{name}:{number}", f"broken JSON: {error}")
            continue
        yield f"{name}:{number}", value


def _read_json(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    text = _decoded(path.read_bytes().removeprefix(_UTF8_MARK), tally)
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
    lines = (line for _, line in _lines(path, name, tally))
    limit = csv.field_size_limit(MAX_LINE_BYTES)  # the default, 128 KB, is too small for long documents
    try:
        reader = csv.DictReader(lines)
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                tally.refuse(f"{name}:{reader.line_num}", f"broken CSV: {error}")
                continue
            if row is None:
                return
            if None in row:
                tally.refuse(f"{name}:{reader.line_num}", "has more cells than the header")
                continue
            yield f"{name}:{reader.line_num}", row
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: Path, name: str, tally: Tally) -> Iterator[Item]:
    arrow = _needed("pyarrow", path.name)
    parquet = _needed("pyarrow.parquet", path.name)
    number = 0
    try:
        table = parquet.ParquetFile(path)
        columns = [column for column in table.schema_arrow.names if column in FIELDS] or None
        for batch in table.iter_batches(batch_size=256, columns=columns):
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
    text = _decoded(path.read_bytes().removeprefix(_UTF8_MARK), tally)
    start, line = 0, 1
    for end, next_start in [*(match.span() for match in _DOCUMENT_BREAK.finditer(text)), (len(text), len(text))]:
        document = text[start:end]
        if not is_blank(document):
            yield f"{name}:{line}", {"text": document}
        line += text.count("\n", start, next_start)
        start = next_start


def register(suffix: str, reader: Reader) -> None:
    """Register a reader for files with a suffix such as ".md", in this process. A package uses an entry point."""
    READERS.register(suffix, reader)


register(".csv", _read_csv)
register(".json", _read_json)
register(".jsonl", _read_jsonl)
register(".parquet", _read_parquet)
register(".txt", _read_text)


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


# -- the hub ---------------------------------------------------------------------------------------------


def read_hub(spec: str, *, is_evaluation: bool) -> Iterator[Item]:
    """The items of `hf:NAME[:CONFIG]`: of the train split, or for evaluation of the validation or test split."""
    name, _, config = spec.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise DataError(f"{spec!r} names no dataset", advice=["write hf:NAME or hf:NAME:CONFIG"])
    datasets = _needed("datasets", spec)
    try:
        splits = datasets.load_dataset(name, config or None)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such name or config, no room
        advice = [
            "check the name, the config and the network (HF_HUB_OFFLINE forbids downloads)",
            "download it elsewhere, save it as .jsonl or .parquet, and name that file",
            "use the embedded text: builtin:stdlib",
        ]
        raise DataError(f"the dataset cannot be loaded: {error}", where=spec, advice=advice) from error
    wanted = ("validation", "test", "train") if is_evaluation else ("train",)
    split = next((name for name in wanted if name in splits), None)
    if split is None:
        raise DataError(
            f"the dataset has no split train, only {', '.join(sorted(splits))}",
            where=spec,
            advice=["save the split you want as .jsonl or .parquet, and name that file"],
        )
    for number, item in enumerate(splits[split], 1):
        yield f"{name}/{split}:{number}", item


def _needed(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(
            f"{package} is not installed", where=where, advice=[f"pip install {package}", "convert the data to .jsonl"]
        ) from error
