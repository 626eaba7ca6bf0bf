"""Write data given as Python objects to JSONL, one record a line, so that it is read like any file.

Accepted: iterables of records (lists, generators, `datasets.Dataset`, torch iterables), torch datasets with a length,
and a `DataLoader` of them. A record is a mapping with the fields that files have, or a string.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from stillroom.config.schema import READERS
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.files import reason_of
from stillroom.data.records import FIELDS, SHAPES

EXPECTED = (
    "expected a name (file, glob, hf:NAME, builtin:...), or an iterable of records: mappings like "
    + ", ".join(SHAPES)
    + ", or texts"
)
_SHOWN = 6


@dataclass(frozen=True)
class Written:
    """The number of records written, the digest of the file, and the fields left out."""

    num_records: int
    sha256: str
    left_out: tuple[str, ...]

    def note(self, role: str) -> list[str]:
        if not self.left_out:
            return []
        shown = ", ".join(self.left_out[:_SHOWN]) + (", ..." if len(self.left_out) > _SHOWN else "")
        return [f"{role}: fields that are not read and not kept: {shown}"]


def is_name(data: object, role: str) -> bool:
    """Whether `data` is a name. Raise if it is neither a name nor records."""
    if isinstance(data, str | Path):
        return True
    _records_of(data, role)
    return False


def write_records(data: object, path: Path, role: str, columns: Sequence[str] = ()) -> Written:
    """Write each record as a line of JSON. Line n is record n. `columns` are those that the run's layout names."""
    digest, left_out, number = hashlib.sha256(), dict[str, None](), 0
    names = dict.fromkeys((*FIELDS, *columns))
    with path.open("wb") as file:
        for number, value in enumerate(_readable(_items(data, role, columns), role), 1):
            record = _record(value, number, role)
            kept = {name: record[name] for name in names if name in record}
            if kept:
                left_out.update(dict.fromkeys(str(name) for name in record if name not in kept))
            # A record without a known field keeps its field names, which the reader quotes when it refuses it.
            line = _line(kept or {str(name): None for name in record}, number, role)
            digest.update(line)
            file.write(line)
    if not number:
        raise DataError(
            f"{role} holds no record",
            where=role,
            advice=["a generator can be read once only: give a fresh one"] if isinstance(data, Iterator) else [],
        )
    return Written(number, digest.hexdigest(), tuple(left_out))


def _wrong(role: str, what: str, *advice: str) -> ConfigError:
    return ConfigError(f"{role} {what}", where=role, advice=[*advice, EXPECTED])


def _records_of(data: Any, role: str) -> Iterable[Any]:
    """The records of an object. Raise for an object whose iteration would not yield records."""
    if isinstance(data, Mapping):
        splits = ", ".join(f"[{str(name)!r}]" for name in list(data)[:3])
        raise _wrong(
            role, f"is a {type(data).__name__}, one mapping and not an iterable of records", f"a split: {splits}"
        )
    if hasattr(data, "iterrows") and hasattr(data, "columns"):
        raise _wrong(role, "is a table whose iteration gives the names of its columns", "table.to_dict('records')")
    if isinstance(data, io.IOBase):
        raise _wrong(role, "is an open file", "give its path")
    if isinstance(data, set | frozenset):
        raise _wrong(role, "is a set, whose order changes from process to process", "sort it: sorted(records)")
    if isinstance(data, bytes | bytearray | memoryview):
        raise _wrong(role, f"is {type(data).__name__}", "give a list of texts")
    if isinstance(data, type):
        raise _wrong(role, f"is the class {data.__name__} itself")
    if isinstance(data, Iterable):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # a torch dataset
        try:
            length = len(data)
        except (TypeError, ValueError, OverflowError) as error:  # negative, no number, or too large
            raise _wrong(role, f"does not tell its length: {error}") from error
        return (data[place] for place in range(length))
    raise _wrong(role, f"is a {type(data).__name__}")


def _items(data: object, role: str, columns: Sequence[str]) -> Iterator[Any]:
    records = _records_of(data, role)
    if isinstance(data, DataLoader) and data.batch_size is not None:
        for number, batch in enumerate(data, 1):
            yield from _unbatched(batch, number, role, columns)
        return
    yield from _not_file_names(records, role)


def _readable(items: Iterator[Any], role: str) -> Iterator[Any]:
    """The items. An error of the iterable's source is raised here, not reported as a file that cannot be written."""
    number = 0
    while True:
        number += 1
        try:
            value = next(items)
        except StopIteration:
            return
        except OSError as error:
            raise DataError(
                f"{role} cannot be read: {reason_of(error)}",
                where=f"record {number}",
                advice=["see to where the records come from", "or write them to a file first, and give its name"],
            ) from error
        yield value


def _unbatched(batch: Any, number: int, role: str, wanted: Sequence[str]) -> Iterator[Any]:
    """The records of a collated batch: a list of records, or columns of strings."""
    if isinstance(batch, list | tuple) and all(isinstance(value, str | Mapping) for value in batch):
        yield from batch
        return
    columns = dict(batch) if isinstance(batch, Mapping) else {}
    kept = {name: values for name, values in columns.items() if name in (*FIELDS, *wanted)}
    is_text = all(isinstance(v, list | tuple) and all(isinstance(text, str) for text in v) for v in kept.values())
    if not kept or not is_text or len({len(values) for values in kept.values()}) != 1:
        raise _wrong(
            role,
            f"is a DataLoader whose batch {number} is neither a list of records nor columns of texts",
            "give the loader's dataset: data=loader.dataset",
            "or a loader with collate_fn=list",
        )
    for values in zip(*kept.values(), strict=True):
        yield dict(zip(kept, values, strict=True))


def _not_file_names(records: Iterable[Any], role: str) -> Iterator[Any]:
    """The records. Raise if the first is the name of a data file: strings in a list are texts, not file names."""
    for number, value in enumerate(records, 1):
        if number == 1 and isinstance(value, str) and not value.count("\n"):
            path = Path(value)
            if path.suffix.lower() in READERS and (len(value) < 1024 and path.expanduser().is_file()):
                raise _wrong(role, f"begins with the name of a file, {value}", "give one name or a glob as a string")
        yield value


def _record(value: Any, number: int, role: str) -> Mapping[Any, Any]:
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Mapping):
        if "input_ids" in value and not any(name in value for name in FIELDS):
            raise _wrong(role, f"has tokens in record {number}", "give the texts: a run tokenizes them itself")
        return value
    advice = ["give one name or a glob as a string"] if isinstance(value, Path) else []
    raise _wrong(role, f"holds a {type(value).__name__} as record {number}", *advice)


def _line(record: Mapping[str, Any], number: int, role: str) -> bytes:
    try:
        try:
            return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        except UnicodeEncodeError:  # a lone surrogate can only be written as an escape
            return json.dumps(record).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(
            role, f"has a value in record {number} that is not a text, number, list or mapping: {error}"
        ) from error
