"""Read the raw objects of a spec: a file, a glob, a folder, or a dataset.

Readers yield (where, object) and count in the tally what they refuse. `where` is "file:number". The files of a glob or
folder are read in the order of their names.
"""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import importlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from stillroom import builtin as stdlib
from stillroom.config.schema import READERS, Layout
from stillroom.core.errors import DataError, at_setting
from stillroom.core.files import is_url
from stillroom.core.remote import local_copy
from stillroom.data.records import FIELDS, OPTIONAL, Record, Segments, Tally, content_key, is_blank

# -- opening files -----------------------------------------------------------------------------------------
#
# What a compressed file may expand to is bounded by its size: a few kilobytes can otherwise expand without end. zstd
# is read by pyarrow, which `datasets` installs.


def needed(module: str, where: str) -> Any:
    """Import a module that only some sources need. Raise `DataError` with the package to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise DataError(
            f"{package} is not installed", where=where, advice=[f"pip install {package}", "convert the data to .jsonl"]
        ) from error


COMPRESSED = (".gz", ".zst")
MAX_EXPANSION = 250  # times its size; text compresses 3 to 20 times, text of copies some 100 times
FREE_BYTES = 64 << 20  # of every file, however small


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def data_suffix(name: str | Path) -> str:
    """The suffix that names the format: ".jsonl" of both "a.jsonl" and "a.jsonl.gz"."""
    path = Path(name)
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file as bytes, decompressed if it ends in .gz or .zst. Raise `DataError` for damaged or endless data."""
    if not is_compressed(path):
        return path.open("rb")
    source = gzip.open(path, "rb") if path.suffix.lower() == ".gz" else _open_zstd(path)  # noqa: SIM115 - closed by _Expanded
    return io.BufferedReader(_Expanded(path, source.read, source.close), 1 << 16)


def open_seekable(path: Path) -> IO[bytes]:
    """As `open_bytes`, for formats that are read from their end. A compressed file is expanded into a temporary one."""
    if not is_compressed(path):
        return path.open("rb")
    expanded: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it, which deletes it
    with open_bytes(path) as source:
        shutil.copyfileobj(source, expanded)
    expanded.seek(0)
    return expanded


def _open_zstd(path: Path) -> Any:
    arrow = needed("pyarrow", path.name)
    return arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd")


class _Expanded(io.RawIOBase):
    """The decompressed bytes of a file, counted."""

    def __init__(self, path: Path, read: Callable[[int], bytes], close: Callable[[], None]) -> None:
        self._path = path
        self._read = read
        self._close = close
        self._size = path.stat().st_size
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._read(len(buffer))
        except (EOFError, OSError, zlib.error) as error:
            raise self._damaged(error) from error
        self._num_bytes += len(piece)
        bound = max(FREE_BYTES, MAX_EXPANSION * self._size)
        if self._num_bytes > bound:
            raise DataError(
                f"{self._path} has {self._size:,} bytes and expands to more than {bound:,}",
                advice=["look at what it holds", "if that is as it should be, decompress it and name the result"],
            )
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()

    def _damaged(self, error: Exception) -> DataError:
        is_cut_off = isinstance(error, EOFError) or "truncated" in str(error).lower()
        what = "is cut off" if is_cut_off else f"is damaged or no {self._path.suffix} file ({error})"
        return DataError(
            f"{self._path} {what}: {self._num_bytes:,} bytes of its content could be read",
            advice=["download or write it again"],
        )


# -- finding the files of a spec: a file, a glob or a folder, here or behind a URL -------------------------


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-]+")  # org/name, without the suffix of a file


def locate(spec: str) -> list[Path]:
    """The files of a spec, sorted. Raise if there are none or if one has a suffix without a reader."""
    if is_url(spec):
        return _remote(spec)
    path = Path(spec).expanduser()
    try:
        is_there = path.exists()
    except OSError as error:  # not a valid file name
        raise DataError(f"{spec[:80]} is not a file name: {error.strerror}", advice=["name a file"]) from error
    if path.is_dir():
        return _inside(path, spec)
    if is_there:
        paths = [path]
    elif glob.has_magic(spec):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
        paths = sorted(match for match in map(Path, names) if match.is_file())
        if not paths:
            raise DataError(f"no file matches {spec}", advice=[f"list what is there: ls {path.parent}"])
    else:
        hub = [f"for the dataset of a hub write hf:{spec}"] if _HUB_NAME.fullmatch(spec) else []
        raise DataError(f"{spec} does not exist", advice=[*hub, *_similar_names(path)])
    return _with_readers(paths)


def _with_readers(paths: list[Path]) -> list[Path]:
    for file in paths:
        if data_suffix(file) not in READERS:
            raise DataError(
                f"{file} has the extension {data_suffix(file) or 'of no kind'!r}, which is not read",
                advice=[f"rename or convert it to one of {_read_suffixes()}"],
            )
    return paths


def _remote(url: str) -> list[Path]:
    """Copies of the files of a URL. A folder holds files of one format, as here."""
    folder = _copied(url)
    paths = _files(folder)
    is_file = [path.name for path in paths] == [url.rstrip("/").rpartition("/")[2]]
    return _with_readers(paths) if is_file or glob.has_magic(url) else _inside(folder, url)


@lru_cache(maxsize=64)
def _copied(url: str) -> Path:
    """Copy once per process, so that data that is read twice is the same even if the store changes."""
    return local_copy(url)


def _inside(folder: Path, spec: str) -> list[Path]:
    """The data files of a folder and its folders. Raise unless all have one format: a README.txt is not data."""
    paths = [path for path in _files(folder) if data_suffix(path) in READERS]
    if not paths:
        raise DataError(
            f"{spec} is a folder without data files",
            advice=[f"it holds no {_read_suffixes()}, and is not a folder of datasets.save_to_disk", "name a file"],
        )
    kinds = Counter(data_suffix(path) for path in paths)
    if len(kinds) > 1:
        held = ", ".join(f"{suffix} ({count:,})" for suffix, count in sorted(kinds.items()))
        raise DataError(
            f"{spec} is a folder with data files of several kinds: {held}",
            advice=[f"name those of one kind with a glob: '{folder / '**' / _pattern(paths, kind)}'" for kind in kinds],
        )
    return paths


def _pattern(paths: list[Path], kind: str) -> str:
    """A glob of the files of one kind. It ends in a star only if some are compressed: *.json* has *.jsonl too."""
    endings = {path.name[path.name.lower().rindex(kind) :] for path in paths if data_suffix(path) == kind}
    return f"*{endings.pop()}" if len(endings) == 1 else f"*{kind}*"


def _files(folder: Path) -> list[Path]:
    """All files below a folder but hidden ones, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _read_suffixes() -> str:
    return f"{', '.join(READERS.names())}, also with {' or '.join(COMPRESSED)}"


def _similar_names(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return [f"the folder {path.parent} does not exist either; check the path, or name a glob in quotes"]
    names = sorted(entry.name for entry in path.parent.iterdir())
    similar = difflib.get_close_matches(path.name, names, n=3) or [n for n in names if data_suffix(n) in READERS][:3]
    if similar:
        return [f"did you mean {path.parent / name}" for name in similar]
    return [
        f"the folder {path.parent} has no data files; for a hub dataset write hf:NAME, for embedded text builtin:stdlib"
    ]


# -- readers of the file formats ---------------------------------------------------------------------------
#
# Each yields (where, object) and counts in the tally what it refuses.
#
# `where` is "file:number": the line in JSONL, CSV and text, the item in JSON and Parquet. JSONL, CSV, Parquet and
# text are read piece by piece; JSON is read whole.


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
        advice = ["if each line is a separate object, rename the file to .jsonl", "otherwise fix it at that place"]
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


# -- checking the layout against the first objects ---------------------------------------------------------
#
# A mistyped column stops a run with the columns there are, and not as thousands of bad records.


_NUM_LOOKED_AT = 10
_NUM_CHECKED = 12


def checked(items: Iterable[Item], layout: Layout, spec: str) -> Iterator[Item]:
    """The items. Raise if a column of the layout is in none of the first ones."""
    items = iter(items)
    first = list(itertools.islice(items, _NUM_LOOKED_AT)) if layout.has_layout else []
    objects = [value for _, value in first if isinstance(value, Mapping)]
    there = list(dict.fromkeys(str(name) for value in objects for name in value))
    setting = "template" if layout.template else "columns"
    for column in layout.needed_columns if objects else ():
        if column not in there and column not in [layout.columns.get(name) for name in OPTIONAL]:
            near = difflib.get_close_matches(column, there, n=1)
            more = ", ..." if len(there) > _NUM_CHECKED else ""
            raise DataError(
                f"{spec} has no column {column!r}, which data.{setting} names; it has "
                f"{', '.join(there[:_NUM_CHECKED]) or 'none'}{more}",
                advice=[*(f"did you mean {name}?" for name in near), f"correct data.{setting}"],
            )
    yield from first
    yield from items


# -- datasets of the hub, and folders that `datasets.save_to_disk` wrote -----------------------------------


HUB_PREFIX = "hf:"
_FORM = "hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT or hf:NAME::SPLIT"
# What a dataset that cannot be read raises: no network, no such name or config, no room, a damaged file.
_FAULTS = (OSError, ValueError, RuntimeError, LookupError, TypeError)


def read_hub(spec: str, *, is_evaluation: bool, streams: bool = False) -> Iterator[Item]:
    """The items of `hf:NAME[:CONFIG[:SPLIT]]`: of the named split, else of train, or for evaluation validation or test.

    With `streams` nothing is stored on disk: the items are read over the network, in order.
    """
    name, config, split, *rest = [*spec.removeprefix(HUB_PREFIX).split(":"), "", ""]
    if not name or any(rest):
        raise DataError(f"{spec!r} names no dataset", advice=[f"write {_FORM}"])
    datasets = needed("datasets", spec)
    options = {"streaming": True} if streams else {}
    try:
        splits = datasets.load_dataset(name, config or None, **options)
    except _FAULTS as error:
        advice = [
            "check the name, the config and the network (HF_HUB_OFFLINE forbids downloads)",
            "download it elsewhere, save it as .jsonl or .parquet, and name that file",
            "use the embedded text: builtin:stdlib",
        ]
        raise DataError(f"the dataset cannot be loaded: {error}", where=spec, advice=advice) from error
    split = split or _usual_split(splits, is_evaluation=is_evaluation)
    if split not in splits:
        raise _no_split(split, splits, spec, advice=f"name the split: {_FORM}")
    yield from _numbered(splits[split], f"{name}/{split}", spec)


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`: of one dataset, or of several splits."""
    # os.path answers False for names that no file can have; pathlib raises.
    names = ("state.json", "dataset_info.json", "dataset_dict.json")
    has = {name: os.path.isfile(path / name) for name in names}  # noqa: PTH113
    return (has["state.json"] and has["dataset_info.json"]) or has["dataset_dict.json"]


def read_saved(path: Path, *, is_evaluation: bool) -> Iterator[Item]:
    """The items of a folder written by `save_to_disk`. The table stays on disk."""
    datasets = needed("datasets", str(path))
    try:
        saved = datasets.load_from_disk(str(path))
    except _FAULTS as error:
        advice = ["write it again with save_to_disk", "save it as .jsonl or .parquet, and name that file"]
        raise DataError(f"the saved dataset cannot be loaded: {error}", where=str(path), advice=advice) from error
    name = path.name
    if isinstance(saved, Mapping):
        split = _usual_split(saved, is_evaluation=is_evaluation)
        if split not in saved:
            raise _no_split(split, saved, str(path), advice=f"name the folder of a split: {path}/SPLIT")
        name, saved = f"{name}/{split}", saved[split]
    yield from _numbered(saved, name, str(path))


def _usual_split(splits: Mapping[str, Any], *, is_evaluation: bool) -> str:
    wanted = ("validation", "test", "train") if is_evaluation else ("train",)
    return next((name for name in wanted if name in splits), "train")


def _no_split(split: str, splits: Mapping[str, Any], where: str, *, advice: str) -> DataError:
    held = ", ".join(sorted(splits)) or "none"
    return DataError(
        f"the dataset has no split {split}, only {held}",
        where=where,
        advice=[advice, "save the split you want as .jsonl or .parquet, and name that file"],
    )


def _numbered(items: Iterable[object], name: str, where: str) -> Iterator[Item]:
    rows, number = iter(items), 0
    while True:
        number += 1
        try:
            item = next(rows, None)
        except _FAULTS as error:  # a connection that broke, a damaged file
            raise DataError(
                f"the dataset cannot be read at item {number:,}: {error}",
                where=where,
                advice=["try again", "save it as .jsonl or .parquet, and name that file"],
            ) from error
        if item is None:
            return
        yield f"{name}:{number}", item


# -- any spec ----------------------------------------------------------------------------------------------


PIECE_CHARACTERS = 8_000
_NUM_NAMED = 3


def is_files(spec: str) -> bool:
    """Whether a spec that is not an embedded corpus names data files, and no dataset."""
    return is_url(spec) or (not spec.startswith(HUB_PREFIX) and not is_saved(Path(spec).expanduser()))


def refuse_missing(*specs: tuple[str, str]) -> None:
    """Raise if a spec names an embedded corpus or files that are not there. Read nothing, and ask no hub or store.

    Each is (setting, spec).
    """
    for setting, spec in specs:
        with at_setting(setting):
            if spec.startswith(BUILTIN_PREFIX):
                _builtin_name(spec)
            elif not is_url(spec) and is_files(spec):
                locate(spec)


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
        yield from read_file(path, name, tally, is_alone=len(files) == 1, columns=columns)


def note_unread(spec: str, paths: list[Path], tally: Tally) -> None:
    """Note the files of a folder that are not among those that are read."""
    folder = Path(spec).expanduser()
    origins = {path.with_name(f"{path.name}{ORIGIN}") for path in paths}
    if folder.is_dir() and (others := sorted(set(_files(folder)) - set(paths) - origins)):
        named = ", ".join(path.name for path in others[:_NUM_NAMED]) + (", ..." if len(others) > _NUM_NAMED else "")
        tally.note(f"{len(others):,} files of the folder {spec} are of no format that is read: {named}")


ORIGIN = ".origin"  # of a file that `stillroom write` wrote: who wrote it, with which weights, how


def note_origin(spec: str, tally: Tally) -> None:
    """Note which model wrote the files of a spec, where they say so."""
    if is_url(spec) or not is_files(spec):
        return
    for path, name in named_files(spec):
        try:
            about = json.loads(path.with_name(f"{path.name}{ORIGIN}").read_text(encoding="utf-8"))
            writer, settings = about["writer"], about["settings"]
            who = writer.get("model") or writer.get("served_model")
            weights = f", weights {writer['weights']}" if "weights" in writer else ""
            tally.note(f"{name} was written by {who}{weights}, at temperature {settings['temperature']:g}")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            tally.note(f"{name}{ORIGIN} cannot be read: who wrote {name} is not known")


def named_files(spec: str) -> list[tuple[Path, str]]:
    """The files of a spec, each with the name that its records begin with."""
    paths = locate(spec)
    root = os.path.commonpath([path.parent for path in paths])
    return [(path, path.relative_to(root).as_posix()) for path in paths]


def read_file(
    path: Path, name: str, tally: Tally, *, is_alone: bool = True, columns: Collection[str] = ()
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
        raise DataError(f"{path} cannot be read: {error.strerror or error}", advice=advice) from error
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


def cut_text(name: str, text: str, tally: Tally) -> list[tuple[int, str]]:
    """Cut the only document of a file into pieces that are not blank, so that part of it can be held out."""
    pieces = [(line, piece) for line, piece in pieces_of(text) if piece.strip()]
    if len(pieces) > 1:
        tally.note(f"{name} is one document: it is cut between paragraphs into {len(pieces):,} to hold some out")
    return pieces


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


# -- embedded corpora: the text of the Python installation that runs this ----------------------------------


BUILTIN_PREFIX = "builtin:"

Documents = Iterator[tuple[stdlib.Document, Segments]]


def _whole(documents: Iterator[stdlib.Document]) -> Documents:
    return ((document, ((document.text, True),)) for document in documents)


def _questions(root: Path | None, train_on_prompt: bool) -> Documents:
    for document, prompt, answer in stdlib.question_answers(root):
        yield document, ((prompt, train_on_prompt), (answer, True))


_BUILTINS: dict[str, Callable[[bool], Documents]] = {
    "stdlib": lambda _: _whole(stdlib.modules()),
    "stdlib-source": lambda _: _whole(stdlib.modules()),
    "stdlib-docs": lambda _: _whole(stdlib.docstrings()),
    "qa": lambda train_on_prompt: _questions(None, train_on_prompt),
}
_WITH_TOPICS = ("stdlib", "stdlib-docs")
_OWN_ROOT = Path(stdlib.__file__).resolve().parent.parent


def _builtin_name(spec: str) -> str:
    name = spec.removeprefix(BUILTIN_PREFIX)
    if name not in _BUILTINS:
        near = difflib.get_close_matches(name, _BUILTINS, n=1)
        advice = [f"did you mean {BUILTIN_PREFIX}{near[0]}"] if near else []
        specs = ", ".join(f"{BUILTIN_PREFIX}{builtin}" for builtin in _BUILTINS)
        raise DataError(f"there is no embedded corpus {spec!r}", advice=[*advice, f"the embedded ones are {specs}"])
    return name


def embedded_records(spec: str, *, train_on_prompt: bool) -> tuple[list[Record], bool]:
    """All records of an embedded corpus, and whether they come from the standard library."""
    name = _builtin_name(spec)
    documents = list(_BUILTINS[name](train_on_prompt))
    is_stdlib = bool(documents)
    if not is_stdlib:
        documents = list(_questions(_OWN_ROOT, train_on_prompt) if name == "qa" else _whole(stdlib.own_text()))
    elif name in _WITH_TOPICS:
        documents = [*_whole(stdlib.topics()), *documents]
    records = [
        Record(document.name, segments, content_key("".join(text for text, _ in segments)), document.group)
        for document, segments in documents
    ]
    return records, is_stdlib
