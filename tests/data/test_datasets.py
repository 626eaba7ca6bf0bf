"""Datasets of the hub and saved folders: which split is read, streaming, and damage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import datasets as hugging_face
import pytest

from stillroom.core.errors import DataError
from stillroom.data import sources
from stillroom.data.records import Tally
from stillroom.data.sources import read_spec


class Hub:
    """Stands for the `datasets` package; remembers how it was called."""

    def __init__(self, splits: dict[str, Any]) -> None:
        self.splits = splits
        self.calls: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, **options: Any) -> Any:
        self.calls.append((name, config, options))
        return self.splits


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub({split: [{"text": f"{split} {n}"} for n in range(3)] for split in ("train", "validation", "extra")})
    monkeypatch.setattr(sources, "needed", lambda module, where: hub)
    return hub


def wheres(spec: str, **over: Any) -> list[str]:
    return [where for where, _ in read_spec(spec, Tally(), **over)]


def refusal(spec: str) -> DataError:
    with pytest.raises(DataError) as caught:
        wheres(spec)
    assert caught.value.exit_code == 2 and caught.value.advice
    return caught.value


def test_a_split_may_be_named(hub: Hub) -> None:
    assert wheres("hf:a/b")[0] == "a/b/train:1"
    assert wheres("hf:a/b", is_evaluation=True)[0] == "a/b/validation:1"
    assert wheres("hf:a/b:main:extra", is_evaluation=True) == [f"a/b/extra:{n}" for n in (1, 2, 3)]
    assert wheres("hf:a/b::extra")[0] == "a/b/extra:1"
    assert [call[:2] for call in hub.calls] == [("a/b", None), ("a/b", None), ("a/b", "main"), ("a/b", None)]


def test_a_split_that_is_not_there_is_refused_with_those_that_are(hub: Hub) -> None:
    error = refusal("hf:a/b:main:tset")
    assert "no split tset, only extra, train, validation" in error.what and "SPLIT" in error.advice[0]
    assert "names no dataset" in refusal("hf:a/b:main:train:more").what


def test_streaming_stores_nothing(hub: Hub) -> None:
    assert len(wheres("hf:a/b", streams=True)) == 3
    assert hub.calls == [("a/b", None, {"streaming": True})]


def test_a_stream_that_breaks_is_told_with_its_place(hub: Hub) -> None:
    def broken() -> Any:
        yield {"text": "one"}
        raise ConnectionError("the line went dead")

    hub.splits["train"] = broken()
    error = refusal("hf:a/b")
    assert "at item 2: the line went dead" in error.what


def saved(folder: Path, *splits: str) -> str:
    tables = {
        split: hugging_face.Dataset.from_list([{"text": f"{split} {n}"} for n in range(4)]) for split in splits or ("",)
    }
    (hugging_face.DatasetDict(tables) if splits else tables[""]).save_to_disk(str(folder))
    return str(folder)


def test_a_saved_dataset_is_recognised_by_its_files(tmp_path: Path) -> None:
    assert wheres(saved(tmp_path / "one")) == [f"one:{n}" for n in (1, 2, 3, 4)]
    spec = saved(tmp_path / "several", "train", "test")
    assert wheres(spec)[0] == "several/train:1"
    assert wheres(spec, is_evaluation=True)[0] == "several/test:1"
    assert wheres(f"{spec}/test")[0] == "test:1"
    assert next(iter(read_spec(spec, Tally())))[1] == {"text": "train 0"}


def test_a_damaged_saved_dataset_is_refused(tmp_path: Path) -> None:
    spec = saved(tmp_path / "d")
    table = next(Path(spec).glob("*.arrow"))
    table.write_bytes(table.read_bytes()[:40])
    assert "cannot be loaded" in refusal(spec).what
    table.unlink()
    assert "cannot be loaded" in refusal(spec).what
    (Path(spec) / "state.json").write_text("{")
    assert "cannot be loaded" in refusal(spec).what
    assert refusal(spec).where == spec


def test_saved_splits_without_train_are_refused_with_those_there_are(tmp_path: Path) -> None:
    spec = saved(tmp_path / "d", "train", "test")
    shutil.rmtree(Path(spec) / "train")
    (Path(spec) / "dataset_dict.json").write_text('{"splits": ["test"]}')
    error = refusal(spec)
    assert "no split train, only test" in error.what and "SPLIT" in error.advice[0]
