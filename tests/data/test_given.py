"""Laws of data given as objects: every kind of iterable is the same file, and what is none is refused."""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stillroom.core.errors import ConfigError, DataError, StillroomError
from stillroom.data.objects import is_name, write_records

TEXTS = ["one", "two\nlines", "na\u00efve \u2028 \U0001f600", "four", "five"]
RECORDS = [{"text": text} for text in TEXTS]
PAIRS = [{"prompt": f"{text}?", "completion": text} for text in TEXTS]


class MapStyle(Dataset[Any]):
    """A torch dataset as most are: a length and items, and no end of its own to iterate to."""

    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, place: int) -> Any:
        return RECORDS[place % len(RECORDS)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(RECORDS)

    def __len__(self) -> int:
        return len(RECORDS)


KINDS = {
    "list": lambda: RECORDS,
    "texts": lambda: TEXTS,
    "tuple": lambda: tuple(RECORDS),
    "generator": lambda: (record for record in RECORDS),
    "datasets.Dataset": lambda: datasets.Dataset.from_list(RECORDS),
    "a column": lambda: datasets.Dataset.from_list(RECORDS)["text"],
    "torch format": lambda: datasets.Dataset.from_list(RECORDS).with_format("torch"),
    "datasets.IterableDataset": lambda: datasets.Dataset.from_list(RECORDS).to_iterable_dataset(),
    "torch.Dataset": MapStyle,
    "torch.IterableDataset": Stream,
    "loader": lambda: DataLoader(MapStyle(), batch_size=2),
    "loader of records": lambda: DataLoader(MapStyle(), batch_size=None),
    "loader of lists": lambda: DataLoader(MapStyle(), batch_size=2, collate_fn=list),
    "loader of texts": lambda: DataLoader(TEXTS, batch_size=2),  # type: ignore[arg-type]
    "pandas records": lambda: pandas.DataFrame(RECORDS).to_dict("records"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_records_are_the_same_file(kind: str, tmp_path: Path) -> None:
    data = KINDS[kind]()
    assert not is_name(data, "data")
    written = write_records(data, tmp_path / "train.jsonl", "data")
    assert [json.loads(line) for line in (tmp_path / "train.jsonl").read_bytes().splitlines()] == RECORDS
    assert written.num_records == len(RECORDS)
    assert written.sha256 == write_records(RECORDS, tmp_path / "plain.jsonl", "data").sha256
    assert written.left_out == ()


def test_a_collated_batch_is_taken_apart_again(tmp_path: Path) -> None:
    write_records(DataLoader(PAIRS, batch_size=3), tmp_path / "train.jsonl", "data")  # type: ignore[arg-type]
    assert [json.loads(line) for line in (tmp_path / "train.jsonl").read_bytes().splitlines()] == PAIRS


def test_names_are_names() -> None:
    assert is_name("texts.jsonl", "data") and is_name(Path("texts.jsonl"), "data")


def test_fields_that_nobody_reads_are_left_out_and_said(tmp_path: Path) -> None:
    """They may hold what JSON cannot."""
    rows = [{"text": "a", "when": datetime.datetime(2020, 1, 1), "label": torch.ones(2)}]
    written = write_records(rows, tmp_path / "train.jsonl", "data")
    assert written.note("data") == ["data: fields that are not read and not kept: when, label"]
    # A record without any field that is read stays a bad record, which the reader counts and names.
    write_records([{"when": datetime.datetime(2020, 1, 1)}], tmp_path / "train.jsonl", "data")
    assert json.loads((tmp_path / "train.jsonl").read_bytes()) == {"when": None}


def test_half_a_surrogate_pair_is_written_as_the_reader_expects_it(tmp_path: Path) -> None:
    write_records(["a\ud800b"], tmp_path / "train.jsonl", "data")
    assert json.loads((tmp_path / "train.jsonl").read_bytes()) == {"text": "a\ud800b"}


class Lengthy:
    """Like a dataset of torch, with any length."""

    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, place: int) -> str:
        return "a text"


def wrong(folder: Path) -> Iterator[tuple[Any, str]]:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    yield 3, "data is a int"
    yield None, "data is a NoneType"
    yield list, "class list itself"
    yield {"text": "one record"}, "data is a dict"
    yield datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}), r"\['train'\]"
    yield pandas.DataFrame(RECORDS), "to_dict"
    yield io.StringIO("a\nb\n"), "open file"
    yield {"a", "b"}, "is a set"
    yield b"text", "data is bytes"
    yield torch.nn.Linear(2, 2), "data is a Linear"
    yield Lengthy(-3), "length"
    yield Lengthy(2**70), "length"
    yield Lengthy("many"), "length"
    yield [3], "holds a int as record 1"
    yield [*RECORDS, None], "holds a NoneType as record 6"
    yield [["a", "b"]], "holds a list as record 1"
    yield torch.ones(3, 4), "holds a Tensor as record 1"
    yield [folder / "a.jsonl"], "glob"
    yield [str(folder / "a.jsonl")], "begins with the name of a file"
    yield [{"input_ids": [1, 2, 3]}], "has tokens in record 1"
    yield [{"text": datetime.datetime(2020, 1, 1)}], "value in record 1"
    yield DataLoader([{"messages": [{"role": "user", "content": "a"}]}] * 2, batch_size=2), "loader.dataset"  # type: ignore[arg-type]
    yield DataLoader(torch.ones(4, 2), batch_size=2), "loader.dataset"  # type: ignore[arg-type]


def test_what_is_no_data_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    for value, told in wrong(tmp_path):
        with pytest.raises(ConfigError, match=told) as found:
            write_records(value, tmp_path / "train.jsonl", "data")
        assert "expected" in str(found.value)


def test_data_without_a_record_is_no_data(tmp_path: Path) -> None:
    spent = iter(RECORDS)
    list(spent)
    with refused(DataError, "data"):
        write_records(spent, tmp_path / "train.jsonl", "data")
    with refused(StillroomError, "data"):
        write_records([], tmp_path / "train.jsonl", "data")


def test_the_columns_of_a_layout_are_kept(tmp_path: Path) -> None:
    rows = [{"q": "one?", "a": "yes", "id": 1}, {"q": "two?", "a": "no", "id": 2}]
    written = write_records(rows, tmp_path / "a.jsonl", "data", ("q", "a"))
    assert written.left_out == ("id",)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        {"q": row["q"], "a": row["a"]} for row in rows
    ]
    loader = DataLoader([{"q": row["q"], "a": row["a"]} for row in rows], batch_size=2)  # type: ignore[arg-type]
    assert write_records(loader, tmp_path / "b.jsonl", "data", ("q", "a")).sha256 == written.sha256
