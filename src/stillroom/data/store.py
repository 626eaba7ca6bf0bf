"""Token store: tokenize each data file once and map its tokens from disk at later starts.

An entry is a folder with one raw file per array and a manifest that has the sha256 of each. It is found by the content
of the data file, the tokenizer and the settings that act before tokenizing. It is built in a temporary folder and
renamed when complete, so a killed build leaves nothing under the entry's name. Every byte is compared with its hash
before the entry is used; a damaged entry is reported and built again.

# T tokens of the chosen documents end to end, D documents, R runs of documents that are adjacent in a file, S spans
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stillroom.config.schema import DataConfig, Layout, SourceConfig
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.files import is_disk_full, reason_of, replaced_folder, sum_of_file, write_durably
from stillroom.core.locks import hold
from stillroom.core.remote import copies_folder
from stillroom.core.types import Detail
from stillroom.data.chat import chat_writer, day_or_today, prints_day
from stillroom.data.records import BadRecord, Shaper, Tally
from stillroom.data.sources import (
    Item,
    checked,
    cut_text,
    data_suffix,
    is_compressed,
    is_files,
    named_files,
    note_unread,
    read_file,
    read_files,
)
from stillroom.data.tokenize import (
    Contexts,
    Encoded,
    Encoder,
    Ints,
    Numbers,
    TokenizedRecord,
    Tokenizer,
    Tokens,
    opening_ids,
)
from stillroom.data.two_tokenizers.align import Coverage, Spans
from stillroom.data.two_tokenizers.encode import Paired, PairEncoder, TwoTokenizers

FORMAT = 4  # of entries, and of how records are made and tokenized: raise it when either changes
SPANS_FORMAT = 1  # of how spans of two tokenizers are found and stored: raise it when that changes
WORTH_STORING = 32 << 20  # bytes of all files of a source: tokenizing less takes about as long as opening an entry
BATCH_CHARACTERS = 8 << 20  # text that is tokenized and written at a time: bounds memory for files of any size
BATCH_RECORDS = 50_000
DIGEST_BYTES = 16
MANIFEST = "manifest.json"

_COPY_ITEMS = 1 << 20
_SECONDS_BETWEEN_LINES = 15.0
_NUM_BAD_KEPT = 20

Array = npt.NDArray[Any]
Tell = Callable[[str], object]
Document = tuple[TokenizedRecord, TokenizedRecord, Spans, Coverage]  # student's tokens, teacher's, and what they share

# The dtype each array begins with; one whose values do not fit is widened. A record without tokens has length 0.
_STUDENT = {
    "ids": "<u2",  # [tokens]
    "num_bytes": "|u1",  # [tokens]
    "is_scored": "|b1",  # [tokens]
    "lengths": "<i4",  # [D]
    "has_prompt": "|b1",  # [D]
    "digests": f"|S{DIGEST_BYTES}",  # [D], of the record's key: what a split goes by
    "share_hashes": "<u8",  # [D], what `data.train_share` goes by
    "name_ends": "<i8",  # [D], in `names`
    "names": "|u1",  # UTF-8 of all names end to end
}
_SPANS = {name: "|b1" if name == "is_exact" else "<i4" for name in Spans.__dataclass_fields__}
_COVERAGE = tuple(Coverage.__dataclass_fields__)
_TEACHER = {
    "teacher_ids": "<u2",
    "teacher_num_bytes": "|u1",
    "teacher_is_scored": "|b1",
    "teacher_lengths": "<i4",  # [D]
    "num_spans": "<i4",  # [D]
    "coverage": "<i8",  # [D * 6], the numbers of `Coverage` of each document
    **_SPANS,  # [spans], numbered from the first tokens of their document, so that any documents can be chosen
}


# -- keys ------------------------------------------------------------------------------------------------------

# Settings that choose what is read or act after tokenizing. All others are part of the key, so one that is added later
# is too.
_AFTER_TOKENIZING = frozenset(
    {
        "train",
        "eval",
        "eval_share",
        "train_share",
        "streaming",
        "max_length",
        "packing",
        "on_long",
        "group_by_length",
        "order",
        "max_bad_share",
        "cache",
        "day",  # in the variant of the entry, where a template prints it
        "teacher_prefix",  # the store is not used with one
    }
)
_ORIGIN = ("is_local", "local_files_only", "name_or_path", "revision", "trust_remote_code", "token", "cache_dir")
_PACKAGES = ("tokenizers", "transformers")


def tokenizer_digest(tokenizer: Tokenizer) -> str | None:
    """Hash everything a tokenizer would save, its class and the libraries. None if it cannot be saved."""
    save: Any = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        return None
    kind = type(tokenizer)
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}".encode())
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
        try:
            save(folder)
        except (NotImplementedError, OSError, TypeError, ValueError):  # a class without files, or with objects in them
            return None
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                contents = _without_origin(path)
                digest.update(f"{path.relative_to(folder).as_posix()}:{len(contents)}:".encode() + contents)
    facts = {
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "chat_template": tokenizer.chat_template,
        "eos": tokenizer.eos_token_id,
        "opening": opening_ids(tokenizer, "auto"),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def tokenizers_digest(tokenizer: Tokenizer, teacher: Tokenizer | None) -> str | None:
    """Hash one tokenizer, or two with the way their spans are found."""
    if teacher is None:
        return tokenizer_digest(tokenizer)
    both = tokenizer_digest(tokenizer), tokenizer_digest(teacher)
    return None if None in both else f"spans {SPANS_FORMAT}: {both[0]} {both[1]}"


def _without_origin(path: Path) -> bytes:
    """Read a saved file without the fields that say where the tokenizer was read from."""
    contents = path.read_bytes()
    if path.name != "tokenizer_config.json":
        return contents
    settings = json.loads(contents)
    return json.dumps({name: settings[name] for name in sorted(settings) if name not in _ORIGIN}).encode()


def entry_key(content: str, *, name: str, variant: str, tokenizer: str, config: DataConfig) -> str:
    """Hash all that the tokens of a file depend on. Of the sources only the layout counts, so any mixture finds it.

    `name` is the prefix of the records' names, `variant` says how they differ from those of the whole file. `config`
    has one source.
    """
    (source,) = config.sources
    settings = config.model_dump(mode="json", exclude={*_AFTER_TOKENIZING, *Layout.model_fields})
    layout = source.model_dump(mode="json", include=set(Layout.model_fields))
    facts = [FORMAT, content, name, variant, tokenizer, settings, layout]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


def digests_of(keys: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """[D] The first 16 bytes of the sha256 of each key."""
    joined = b"".join(hashlib.sha256(key.encode("utf-8")).digest()[:DIGEST_BYTES] for key in keys)
    return np.frombuffer(joined, dtype=f"S{DIGEST_BYTES}")


def hashes_of(digests: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint64]:
    """[D] The first 8 bytes of each digest as a number: `builtin.corpus.hash_share` times 2^64."""
    return np.ascontiguousarray(digests).view(">u8").reshape(-1, 2)[:, 0].astype(np.uint64)


# -- opening ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredFile:
    """The arrays of one data file, mapped from its entry, and what was counted while it was read and tokenized."""

    arrays: Mapping[str, Array]
    tally: Tally

    def __len__(self) -> int:
        return len(self.arrays["lengths"])

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def stored_files(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Tokenizer,
    tally: Tally,
    *,
    teacher: Tokenizer | None = None,
    splits_text: bool = False,
    tell: Tell | None = None,
) -> list[StoredFile] | None:
    """Open all files of a source in the store, in the order of the files; None if it is to be read in memory.

    What was counted while reading and tokenizing is added to the tally. `splits_text` cuts a lone text into pieces.
    With a tokenizer of the `teacher` its tokens and the spans of both are stored with the student's.
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
    why_not = "data.max_records may end inside of a file" if config.max_records else ""
    why_not = why_not or ("it keeps no context of the teacher" if config.teacher_prefix else "")
    if cuts and source.has_layout:
        why_not = why_not or "a lone text with a layout is cut into pieces after it was laid out"
    if why_not:
        tally.note(f"the token store is not used for {spec}: {why_not}")
        return None
    folder = copies_folder("tokens") if config.cache == "auto" else Path(config.cache).expanduser()
    store = TokenStore(folder, config.alone(source), tokenizer, digest, tell or tally.note, teacher)
    if source.has_layout:  # raise if the first objects lack a column of the layout, as `read_records` does
        next(checked(read_files(spec, Tally(), source.needed_columns), source, spec), None)
    note_unread(spec, [path for path, _ in files], tally)
    prints = any(prints_day(one) for one in (tokenizer, teacher) if one is not None)
    variant = " ".join([*(["cut"] if cuts else []), *([day_or_today(config.day)] if prints else [])])
    opened: list[StoredFile] = []
    for path, name in files:
        read = partial(read_file, path, name, is_alone=is_alone, columns=source.needed_columns)
        items = partial(_cut_items, name, read) if cuts else read
        opened.append(store.open(DataFile(path, name, items, variant)))
        tally.absorb(opened[-1].tally)
    del tally.bad[_NUM_BAD_KEPT:]
    return opened


def _cut_items(name: str, read: Callable[[Tally], Iterator[Item]], tally: Tally) -> Iterator[Item]:
    """Read the objects of a text file; if it is one document, its pieces, so that part of it can be held out."""
    items = list(itertools.islice(found := read(tally), 2))
    if len(items) > 1 or not items:
        yield from itertools.chain(items, found)
        return
    value = items[0][1]
    text = str(value["text"]) if isinstance(value, dict) else ""
    for line, piece in cut_text(name, text, tally):
        yield f"{name}:{line}", {"text": piece}


# -- entries ---------------------------------------------------------------------------------------------------


class Damaged(ValueError):
    """Raised for a file of an entry that is not what was written; the message names it and says how."""


@dataclass(frozen=True)
class DataFile:
    """A data file: `items` reads its objects, and counts in the tally what cannot be read."""

    path: Path
    name: str
    items: Callable[[Tally], Iterator[Item]]
    variant: str = ""


@dataclass(frozen=True)
class TokenStore:
    """Entries for one tokenizer, or for two, and a configuration of one source."""

    folder: Path
    config: DataConfig
    tokenizer: Tokenizer
    tokenizer_digest: str
    tell: Tell
    teacher: Tokenizer | None = None  # where it has its own tokenizer

    def open(self, source: DataFile) -> StoredFile:
        """Map the tokens of a file, tokenizing it first where there is no intact entry.

        A complete entry is read without the lock, so a folder that is read-only serves. Processes that need an entry
        at the same time wait for the first one to build it.
        """
        key = entry_key(
            sum_of_file(source.path).sha256,
            name=source.name,
            variant=source.variant,
            tokenizer=self.tokenizer_digest,
            config=self.config,
        )
        entry = self.folder / key[:2] / key
        try:
            with contextlib.suppress(Damaged, FileNotFoundError):
                return self._read(entry)
            entry.parent.mkdir(parents=True, exist_ok=True)
            with hold(entry.with_name(f"{key}.lock"), waits=True):
                try:
                    return self._read(entry)
                except FileNotFoundError:
                    pass
                except Damaged as error:
                    self.tell(f"token store: the entry of {source.name} is damaged ({error}); it is built again")
                with replaced_folder(entry) as folder:
                    self._build(folder, key, source)
                return self._read(entry, is_checked=True)
        except OSError as error:
            why = "the disk is full" if is_disk_full(error) else reason_of(error)
            raise DataError(
                f"the token store in {self.folder} cannot be used: {why}",
                where="data.cache",
                advice=["--set data.cache=FOLDER names another place", "--set data.cache=off tokenizes in memory"],
            ) from error

    @property
    def _dtypes(self) -> dict[str, str]:
        return _STUDENT if self.teacher is None else _STUDENT | _TEACHER

    def _read(self, entry: Path, *, is_checked: bool = False) -> StoredFile:
        """Check and map an entry. Raise `FileNotFoundError` if there is none."""
        text, _, checksum = (entry / MANIFEST).read_bytes().partition(b"\n")
        if checksum != hashlib.sha256(text).hexdigest().encode() + b"\n":
            raise Damaged(f"{entry / MANIFEST}: its checksum does not match")
        try:
            manifest = json.loads(text)
            arrays = {entry / f"{name}.bin": manifest["arrays"][name] for name in self._dtypes}
            expected = {path: array["sha256"] for path, array in arrays.items()}
            tally = _tally_of(manifest["tally"])
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"{entry / MANIFEST}: it is not a manifest of this format") from error
        if not is_checked:
            with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
                for path, found in zip(expected, pool.map(_digest_or_none, expected), strict=True):
                    if found != expected[path]:
                        raise Damaged(f"{path}: {'it is missing' if found is None else 'its sha256 does not match'}")
        return StoredFile({path.stem: _mapped(path, array["dtype"]) for path, array in arrays.items()}, tally)

    def _build(self, folder: Path, key: str, source: DataFile) -> None:
        """Tokenize a file batch by batch into the folder; write the manifest last."""
        tally, progress = Tally(), _Progress(source, self.tell)
        with contextlib.ExitStack() as stack:
            columns = {
                name: stack.enter_context(_Column(folder / f"{name}.bin", dtype))
                for name, dtype in self._dtypes.items()
            }
            num_name_bytes = 0
            for items, num_characters in _batches(source.items(tally)):
                documents = self._tokenized(items, tally)
                arrays = _arrays_of(documents, is_paired=self.teacher is not None)
                arrays["name_ends"] += num_name_bytes
                num_name_bytes += len(arrays["names"])
                for name, column in columns.items():
                    column.append(arrays[name])
                progress.add(num_characters, len(documents), len(arrays["ids"]))
        manifest = {
            "key": key,
            "of": source.name,
            "arrays": {name: column.to_dict() for name, column in columns.items()},
            "tally": _tally_values(tally),
        }
        text = json.dumps(manifest).encode()
        write_durably(folder / MANIFEST, text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")
        progress.end()

    @cached_property
    def _two(self) -> TwoTokenizers | None:
        return None if self.teacher is None else TwoTokenizers(self.tokenizer, self.teacher)

    def _tokenized(self, items: Sequence[Item], tally: Tally) -> list[Document]:
        """Make records of objects and tokenize them. The teacher's side of one tokenizer is empty."""
        # Made again for each batch: it keeps the teacher's print of every chat it has seen.
        pair = None if self._two is None else PairEncoder.make(self._two, self.config, tally)
        write_chat = chat_writer(self.tokenizer, tally, self.config) if pair is None else pair.chats
        (source,) = self.config.sources
        records = list(Shaper.of(self.config, source, write_chat, tally).records(items))
        if named := next((record.id for record in records if record.context is not None), None):
            raise ConfigError(
                "the token store keeps no context of the teacher, and records have teacher_messages or teacher_prompt",
                where=named,
                advice=["--set data.cache=off tokenizes the data in memory"],
            )
        tally.counters["records"] += len(records)
        if pair is not None:
            return list(pair.documents(records))
        encoder, spans, coverage = Encoder(self.tokenizer, tally, self.config.bos), Spans.none(), Coverage()
        return [(document, document, spans, coverage) for document in encoder.tokenized(records)]


def _batches(items: Iterator[Item]) -> Iterator[tuple[list[Item], int]]:
    """Gather objects into batches of bounded text, with the number of characters of each."""
    batch: list[Item] = []
    num_characters = 0
    for item in items:
        batch.append(item)
        num_characters += _num_characters(item[1])
        if num_characters >= BATCH_CHARACTERS or len(batch) >= BATCH_RECORDS:
            yield batch, num_characters
            batch, num_characters = [], 0
    if batch:
        yield batch, num_characters


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_characters(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(_num_characters(inner) for inner in value)
    return 1


# -- writing an entry ------------------------------------------------------------------------------------------


def _arrays_of(documents: Sequence[Document], *, is_paired: bool) -> dict[str, Array]:
    """Put documents end to end in the arrays of an entry."""
    students = [student for student, *_ in documents]
    keys = [one.record.key for one in students]
    names = [one.record.id.encode("utf-8", "surrogatepass") for one in students]
    arrays = {
        **_token_arrays(students),
        "has_prompt": np.array([one.has_prompt for one in students], np.bool_),
        "digests": digests_of(keys),
        "share_hashes": hashes_of(digests_of([f"share:{key}" for key in keys])),
        "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        "names": np.frombuffer(b"".join(names), np.uint8),
    }
    if is_paired:
        spans = Spans.joined([own for _, _, own, _ in documents])
        teachers = _token_arrays([teacher for _, teacher, _, _ in documents])
        arrays |= {f"teacher_{name}": array for name, array in teachers.items()}
        arrays |= {name: getattr(spans, name) for name in _SPANS}
        arrays["num_spans"] = np.array([len(own) for _, _, own, _ in documents], np.int32)
        counts = [[getattr(covered, name) for name in _COVERAGE] for *_, covered in documents]
        arrays["coverage"] = np.array(counts, np.int64).ravel()
    return arrays


def _token_arrays(documents: Sequence[TokenizedRecord]) -> dict[str, Array]:
    nothing = np.empty(0, np.int32)
    return {
        "ids": np.concatenate([nothing, *(one.ids for one in documents)]),
        "num_bytes": np.concatenate([nothing, *(one.num_bytes for one in documents)]),
        "is_scored": np.concatenate([nothing.astype(np.bool_), *(one.is_scored for one in documents)]),
        "lengths": np.array([len(one.ids) for one in documents], np.int32),
    }


class _Column:
    """A raw file that an array is appended to, hashed as it is written."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._path = path
        self._begin(np.dtype(dtype))

    def _begin(self, dtype: np.dtype[Any]) -> None:
        self._dtype, self._digest, self._file = dtype, hashlib.sha256(), self._path.open("wb")

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Array) -> None:
        narrow = values.astype(self._dtype)
        if (narrow != values).any():
            self._widen(values.dtype)
            narrow = values
        self._put(narrow)

    def _put(self, values: Array) -> None:
        contents = np.ascontiguousarray(values, self._dtype).tobytes()
        self._file.write(contents)
        self._digest.update(contents)

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Write the file again in a wider dtype."""
        self._file.close()
        narrow, old = self._path.with_suffix(".narrow"), self._dtype
        self._path.rename(narrow)
        self._begin(dtype)
        with narrow.open("rb") as file:
            while len(values := np.fromfile(file, old, _COPY_ITEMS)):
                self._put(values)
        narrow.unlink()

    def to_dict(self) -> dict[str, str]:
        return {"dtype": self._dtype.str, "sha256": self._digest.hexdigest()}


def _digest_or_none(path: Path) -> str | None:
    try:
        return sum_of_file(path).sha256
    except FileNotFoundError:
        return None


def _mapped(path: Path, dtype: str) -> Array:
    if np.dtype(dtype).kind not in "biuS":
        raise Damaged(f"{path}: {dtype} is not a type of stored arrays")
    if not path.stat().st_size:  # nothing can be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


def _tally_values(tally: Tally) -> dict[str, Any]:
    return {
        "counters": dict(tally.counters),
        "notes": tally.notes,
        "bad": [[bad.where, bad.why] for bad in tally.bad],
        "shapes": dict(tally.shapes),
    }


def _tally_of(value: dict[str, Any]) -> Tally:
    bad = [BadRecord(where, why) for where, why in value["bad"]]
    return Tally(Counter(value["counters"]), list(value["notes"]), bad, Counter(value["shapes"]))


class _Progress:
    """Tell how far tokenizing a file is and how fast, at most every quarter of a minute."""

    def __init__(self, source: DataFile, tell: Tell) -> None:
        self._source, self._tell = source, tell
        self._begun = self._told = time.monotonic()
        self._num_characters = self._num_records = self._num_tokens = 0

    def add(self, num_characters: int, num_records: int, num_tokens: int) -> None:
        self._num_characters += num_characters
        self._num_records += num_records
        self._num_tokens += num_tokens
        if time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self._tell(f"tokenizing {self._source.name}: {self._extent()} read, {self._rate()}")

    def end(self) -> None:
        self._tell(Detail(f"tokenized {self._source.name}: {self._rate()}"))

    def _extent(self) -> str:
        if is_compressed(self._source.path):
            return f"{self._num_characters:,} characters"
        return f"about {min(0.99, self._num_characters / max(self._source.path.stat().st_size, 1)):.0%}"

    def _rate(self) -> str:
        per_second = self._num_tokens / max(time.monotonic() - self._begun, 1e-3)
        return f"{self._num_records:,} records, {self._num_tokens:,} tokens, {per_second:,.0f} tokens/s"


# -- chosen documents as one stream ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runs:
    """Where the tokens of a stream are: run r is the stream's tokens bounds[r] to bounds[r + 1], in one array."""

    owners: Ints  # [R], the number of the array
    starts: Ints  # [R], the first token in that array
    bounds: Ints  # [R + 1]

    @staticmethod
    def of(firsts: Ints, lengths: Ints, owners: Ints) -> _Runs:
        """Join documents that follow each other in their array."""
        is_new = np.ones(len(firsts), np.bool_)
        is_new[1:] = (firsts[1:] != firsts[:-1] + lengths[:-1]) | (owners[1:] != owners[:-1])
        begins = np.flatnonzero(is_new)
        sizes = np.add.reduceat(lengths, begins) if len(begins) else lengths
        return _Runs(owners[begins], firsts[begins], np.concatenate([[0], np.cumsum(sizes)]))


class Stream:
    """Runs of several arrays end to end. `stream[a:b]` is an ndarray; nothing is copied before it is read."""

    def __init__(self, arrays: Sequence[Tokens], runs: _Runs, dtype: npt.DTypeLike) -> None:
        self._arrays, self._runs, self._dtype = arrays, runs, np.dtype(dtype)

    def __len__(self) -> int:
        return int(self._runs.bounds[-1])

    def __getitem__(self, where: slice) -> Array:
        start, end, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"a stream of tokens is read forwards, token by token, not by steps of {step}")
        runs = self._runs
        found = np.empty(max(end - start, 0), self._dtype)
        place, run = start, int(np.searchsorted(runs.bounds, start, side="right")) - 1
        while place < end:
            stop = min(end, int(runs.bounds[run + 1]))
            first = int(runs.starts[run]) + place - int(runs.bounds[run])
            found[place - start : stop - start] = self._arrays[int(runs.owners[run])][first : first + stop - place]
            place, run = stop, run + 1
        return found


class _Strings(Sequence[str]):
    """Strings that are read one by one: ten million names are not ten million Python objects."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._at(number) for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._at(index)

    @abstractmethod
    def _at(self, index: int) -> str: ...


@dataclass(frozen=True)
class _StoredNames(_Strings):
    """The names of an entry."""

    stored: StoredFile

    def __len__(self) -> int:
        return len(self.stored["name_ends"])

    def _at(self, index: int) -> str:
        ends = self.stored["name_ends"]
        start = int(ends[index - 1]) if index else 0
        return self.stored["names"][start : int(ends[index])].tobytes().decode("utf-8", "surrogatepass")


class _ChosenStrings(_Strings):
    """Chosen strings of several sequences, numbered end to end."""

    def __init__(self, several: Sequence[Sequence[str]], chosen: Numbers) -> None:
        self._several, self._chosen = several, chosen
        self._firsts = np.cumsum([0, *(len(one) for one in several)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def _at(self, index: int) -> str:
        number = int(self._chosen[index])
        owner = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._several[owner][number - int(self._firsts[owner])]


def whole_column(files: Sequence[StoredFile], name: str) -> Array:
    """Copy one array of all files into memory."""
    return np.concatenate([np.empty(0, (_STUDENT | _TEACHER)[name]), *(file[name] for file in files)])


def numbers(count: int) -> Numbers:
    """0 to count, in four bytes each where that is enough."""
    return np.arange(count, dtype=np.int32 if count < 1 << 31 else np.int64)


def encoded_documents(files: Sequence[StoredFile], chosen: Numbers) -> Encoded:
    """Give the chosen documents, numbered over all files in rising order, without those that have no tokens."""
    kept = chosen[whole_column(files, "lengths")[chosen] > 0]
    names = _ChosenStrings([_StoredNames(file) for file in files], kept)
    encoded = _side(files, kept, names, "")
    paired = _paired(files, kept, encoded.bounds, names) if files and "teacher_ids" in files[0].arrays else None
    return Encoded(
        ids=encoded.ids,
        num_bytes=encoded.num_bytes,
        is_scored=encoded.is_scored,
        bounds=encoded.bounds,
        names=names,
        groups=names,
        has_prompt=whole_column(files, "has_prompt")[kept],
        paired=paired,
    )


def _side(files: Sequence[StoredFile], kept: Numbers, names: Sequence[str], prefix: str) -> Encoded:
    """Give the student's tokens of documents, or the teacher's with the prefix of its arrays."""
    lengths = whole_column(files, f"{prefix}lengths")
    firsts = np.concatenate([np.cumsum(file[f"{prefix}lengths"], dtype=np.int64) for file in files] or [lengths])
    firsts -= lengths
    own = lengths[kept].astype(np.int64)
    owners = np.repeat(np.arange(len(files)), [len(file) for file in files])[kept]
    runs = _Runs.of(firsts[kept], own, owners)

    def stream(name: str, dtype: npt.DTypeLike) -> Stream:
        return Stream([file[f"{prefix}{name}"] for file in files], runs, dtype)

    return Encoded(
        ids=stream("ids", np.int32),
        num_bytes=stream("num_bytes", np.int32),
        is_scored=stream("is_scored", np.bool_),
        bounds=np.concatenate([[0], np.cumsum(own)]),
        names=names,
        groups=names,
    )


def _paired(files: Sequence[StoredFile], kept: Numbers, bounds: Ints, names: Sequence[str]) -> Paired:
    """Give the teacher's tokens of documents and the spans of both. The spans alone are held in memory."""
    teacher = _side(files, kept, names, "teacher_")
    counts = whole_column(files, "num_spans").astype(np.int64)
    own = counts[kept]
    before = np.cumsum(own) - own
    firsts = (np.cumsum(counts) - counts)[kept]
    places = np.arange(int(own.sum())) + np.repeat(firsts - before, own)
    columns = {name: whole_column(files, name)[places] for name in _SPANS}
    for name in _SPANS:
        if name != "is_exact":
            columns[name] = columns[name].astype(np.int64)
        if name.startswith(("student_", "teacher_")):
            begins = bounds if name.startswith("student_") else teacher.bounds
            columns[name] += np.repeat(begins[:-1], own)
    table = whole_column(files, "coverage").reshape(-1, len(_COVERAGE))
    coverage = Coverage(*table[kept].sum(axis=0).tolist())
    return Paired(teacher, Spans(**columns), coverage, int(bounds[-1]))


def end_to_end(several: Sequence[Encoded]) -> Encoded:
    """Join the documents of at least one `Encoded`. Nothing is copied before it is read."""
    if len(several) == 1:
        return several[0]
    sizes = np.array([len(one.ids) for one in several], np.int64)
    everyone = np.arange(len(several))
    runs = _Runs(everyone, np.zeros_like(everyone), np.concatenate([[0], np.cumsum(sizes)]))
    documents = np.arange(sum(one.num_documents for one in several))
    bounds = [one.bounds[1:] + first for one, first in zip(several, runs.bounds, strict=False)]
    return Encoded(
        ids=Stream([one.ids for one in several], runs, np.int32),
        num_bytes=Stream([one.num_bytes for one in several], runs, np.int32),
        is_scored=Stream([one.is_scored for one in several], runs, np.bool_),
        bounds=np.concatenate([[0], *bounds]),
        names=_ChosenStrings([one.names for one in several], documents),
        groups=_ChosenStrings([one.groups for one in several], documents),
        has_prompt=np.concatenate([one.prompts for one in several]),
        paired=Paired.joined([one.paired for one in several if one.paired is not None]),
        contexts=Contexts.joined(several),
    )
