"""Laws of sources in the token store: two layouts never share an entry, and a mixture is that of memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.config.schema import DataConfig
from stillroom.core.errors import DataError
from stillroom.data import Corpus, Rows, open_data
from stillroom.data.store import entry_key

ROWS = [{"q": f"what is {n}?", "a": f"it is {n}.", "b": f"not {n}.", "text": f"no {n}"} for n in range(60)]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"columns": {"prompt": "q", "completion": "a"}},
    {"columns": {"prompt": "q", "completion": "b"}},
    {"columns": {"prompt": "a", "completion": "q"}},
    {"template": "{q} {a}"},
    {"template": "{q}\n{a}"},
    {"template": "{q} {a}", "scored": ("a",)},
    {"template": "{q} {a}", "scored": ("q",)},
]


def file_of(path: Path, rows: Sequence[dict[str, str]] = ROWS) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def rows_shown(rows: Rows) -> list[Any]:
    batches = [rows.batch([row]) for row in range(len(rows))]
    return [(batch.sample_ids, batch.sources, batch.documents, batch.keys) for batch in batches]


def shown(corpus: Corpus) -> Any:
    return corpus.counters, rows_shown(corpus.train), rows_shown(corpus.evaluation)


def opened(cache: Path | str, train: Any, **over: Any) -> Corpus:
    return open_data(DataConfig(train=train, cache=str(cache), **{"max_length": 24, **over}), tiny.tokenizer())


def num_entries(cache: Path) -> int:
    return len([*cache.glob("*/*/manifest.json")])


def key(config: DataConfig) -> str:
    return entry_key("content", name="a.jsonl", variant="", tokenizer="tokenizer", config=config)


def test_two_layouts_or_two_ways_of_scoring_never_share_a_key() -> None:
    configs = [
        DataConfig(train="a.jsonl", train_on_prompt=is_scored, **layout)
        for layout in LAYOUTS
        for is_scored in (False, True)
    ]
    assert len({key(config) for config in configs}) == 2 * len(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_one_key_in_the_section_in_a_source_and_in_any_mixture(layout: dict[str, Any]) -> None:
    section = DataConfig(train="a.jsonl", **layout)
    alone = DataConfig(train=[{"path": "a.jsonl", **layout}])  # type: ignore[arg-type]
    mixed = DataConfig(train=[{"path": "b.jsonl", "template": "{x}"}, {"path": "a.jsonl", "weight": 2, **layout}])  # type: ignore[arg-type]
    assert key(section) == key(alone) == key(mixed.alone(mixed.sources[1]))
    assert layout == {} or key(mixed.alone(mixed.sources[0])) != key(section)


def test_one_file_in_all_layouts_has_an_entry_for_each_and_the_rows_of_memory(tmp_path: Path) -> None:
    path, cache = file_of(tmp_path / "a.jsonl"), tmp_path / "cache"
    train = [{"path": path, **layout} for layout in LAYOUTS]
    in_memory = opened("off", train)
    for _ in range(2):  # made, then found
        assert shown(opened(cache, train)) == shown(in_memory)
    assert num_entries(cache) == len(LAYOUTS)
    opened(cache, path, **LAYOUTS[1])
    assert num_entries(cache) == len(LAYOUTS), "the same layout of the section is the same entry"
    opened(cache, path, **LAYOUTS[1], train_on_prompt=True)
    assert num_entries(cache) == len(LAYOUTS) + 1


@settings(deadline=None, max_examples=12)
@given(
    counts=st.lists(st.integers(10, 40), min_size=1, max_size=3),
    packing=st.sampled_from(["auto", "blocks", "rows", "packed"]),
    train_share=st.sampled_from([1.0, 0.7]),
    has_eval=st.booleans(),
)
def test_stored_mixtures_are_those_of_memory(
    tmp_path_factory: Any, counts: list[int], packing: Any, train_share: float, has_eval: bool
) -> None:
    folder = tmp_path_factory.mktemp("data")
    train = []
    for number, count in enumerate(counts):
        rows = [{"q": f"{number} asks {n}", "a": f"says {n}", "text": f"{number} of {n} words"} for n in range(count)]
        train.append({"path": file_of(folder / f"{number}.jsonl.gz", rows), **LAYOUTS[(0, 1, 6)[number]]})
    over: dict[str, Any] = {"packing": packing, "train_share": train_share}
    if has_eval:
        over["eval"] = file_of(folder / "held.jsonl", [{"text": f"1 asks {n}says {n}"} for n in range(9)])
    stored = opened(folder / "cache", train, **over)
    assert shown(stored) == shown(opened("off", train, **over))
    assert num_entries(folder / "cache") == len(counts) + has_eval


@pytest.mark.usefixtures("small_library")
def test_embedded_text_may_stand_beside_a_stored_file(tmp_path: Path) -> None:
    train = [{"path": file_of(tmp_path / "a.jsonl"), **LAYOUTS[1]}, "builtin:qa"]
    stored, in_memory = (opened(cache, train, max_length=128) for cache in (tmp_path / "cache", "off"))
    assert shown(stored) == shown(in_memory) and num_entries(tmp_path / "cache") == 1
    assert len({name.split(":")[0] for name in stored.evaluation.groups}) > 1


@pytest.mark.parametrize("cache", ["off", "cache"])
def test_a_mistyped_column_is_refused_with_those_there_are(tmp_path: Path, cache: str) -> None:
    path = file_of(tmp_path / "a.jsonl")
    with pytest.raises(DataError):
        opened(cache if cache == "off" else tmp_path / cache, path, template="{q} {answer}")
    assert num_entries(tmp_path / "cache") == 0


def test_max_records_takes_the_first_without_the_store_and_says_so(tmp_path: Path) -> None:
    path = file_of(tmp_path / "a.jsonl")
    corpus = opened(tmp_path / "cache", path, max_records=30)
    assert corpus.counters["records"] == 30 and num_entries(tmp_path / "cache") == 0
    assert any("token store is not used" in note and "max_records" in note for note in corpus.notes)


def test_files_of_a_folder_that_are_not_read_are_named_with_the_store_too(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    file_of(folder / "a.jsonl")
    (folder / "NOTES.md").write_text("what this is")
    assert any("NOTES.md" in note for note in opened(tmp_path / "cache", str(folder)).notes)


@pytest.mark.parametrize("layout", [{}, {"template": "{text}!"}])
def test_a_lone_text_is_cut_up_as_in_memory(tmp_path: Path, layout: dict[str, Any]) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("\n\n".join(f"paragraph {n} " * 20 for n in range(60)).encode()))
    assert shown(opened(tmp_path / "cache", str(path), **layout)) == shown(opened("off", str(path), **layout))
