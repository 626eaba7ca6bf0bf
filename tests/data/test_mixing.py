"""Laws of mixing: each source is seen as often as its weight says, in an order that seed and position decide."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.config.schema import DataConfig
from stillroom.core.errors import DataError
from stillroom.core.types import IGNORED
from stillroom.data import Loader, Rows, fixed_batches, open_data
from stillroom.data.loader import MixedRows, Part


class Counted:
    """Stands for rows of which only the number matters."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def mixture(*parts: tuple[int, float]) -> MixedRows:
    return MixedRows([Part(f"s{n}", Counted(count), weight) for n, (count, weight) in enumerate(parts)])  # type: ignore[arg-type]


PARTS = st.lists(st.tuples(st.integers(1, 23), st.floats(0.1, 3.5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, seed=st.integers(0, 99), epoch=st.integers(0, 5), size=st.integers(1, 9))
def test_an_epoch_is_a_pure_function_of_seed_and_number(
    parts: list[tuple[int, float]], seed: int, epoch: int, size: int
) -> None:
    one, other = (mixture(*parts).epoch(seed, epoch, size) for _ in range(2))
    assert [batch.tolist() for batch in one] == [batch.tolist() for batch in other]
    assert len(one) == mixture(*parts).num_batches(size)


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, seed=st.integers(0, 99), size=st.integers(1, 9))
def test_each_source_is_seen_as_often_as_its_weight_says_and_each_row_alike(
    parts: list[tuple[int, float]], seed: int, size: int
) -> None:
    rows, num_epochs = mixture(*parts), 4
    seen = Counter(
        int(row) for epoch in range(num_epochs) for batch in rows.epoch(seed, epoch, size) for row in batch.tolist()
    )
    first = 0
    for count, weight in parts:
        counts = [seen[row] for row in range(first, first + count)]
        assert sum(counts) == num_epochs * max(1, round(weight * count))
        assert max(counts) - min(counts) <= 1  # no row is seen twice before another of its source is seen once
        first += count


@settings(max_examples=40, deadline=None)
@given(parts=PARTS, seed=st.integers(0, 99), size=st.integers(1, 9))
def test_a_micro_batch_holds_rows_of_one_source(parts: list[tuple[int, float]], seed: int, size: int) -> None:
    bounds = np.cumsum([0, *(count for count, _ in parts)])
    for batch in mixture(*parts).epoch(seed, 1, size):
        assert 1 <= len(batch) <= size
        assert len(set(np.searchsorted(bounds, batch, side="right").tolist())) == 1


def test_another_seed_or_epoch_is_another_order() -> None:
    rows = mixture((40, 1.0), (40, 1.0))
    orders = [tuple(np.concatenate(rows.epoch(seed, epoch, 4))) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


# -- with files ------------------------------------------------------------------------------------------


def source(path: Path, count: int, word: str, **over: Any) -> dict[str, Any]:
    path.write_text(
        "".join(json.dumps({"prompt": f"{word} {n}?", "completion": f" {word}!"}) + "\n" for n in range(count))
    )
    return {"path": str(path), **over}


def opened(*sources: Any, **over: Any) -> Any:
    return open_data(DataConfig(train=list(sources), **over), tiny.tokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["shuffled", "short_first"])
def test_a_list_of_one_source_is_the_source(tmp_path: Path, order: str) -> None:
    path = source(tmp_path / "a.jsonl", 40, "a")["path"]
    forms: list[Any] = [path, [path], {"path": path}, [{"path": path, "weight": 1.0}]]
    windows = []
    for form in forms:
        config = DataConfig(train=form, max_length=16, packing="rows", order=order)
        corpus = open_data(config, tiny.tokenizer())
        loader = Loader(corpus.train, batch_size=3, accumulation=2, seed=7)
        loader = loader.short_first(2) if order == "short_first" else loader
        windows.append(
            [[batch.sample_ids for batch in loader.window(index)] for index in range(2 * loader.num_windows)]
        )
        assert not config.is_mixed and corpus.evaluation.num_documents > 0
    assert all(one == windows[0] for one in windows)


@pytest.mark.usefixtures("small_library")
def test_one_source_with_a_weight_or_labels_alone_is_drawn_as_a_mixture(tmp_path: Path) -> None:
    for over in ({"weight": 0.5}, {"objectives": "labels"}):
        assert DataConfig(train=[{"path": "a.jsonl", **over}]).is_mixed
    assert open_data(DataConfig(train=["builtin:qa"], eval="builtin:qa"), tiny.tokenizer()).evaluation.num_documents


def test_a_batch_says_which_source_its_rows_come_from(tmp_path: Path) -> None:
    one, two = source(tmp_path / "a.jsonl", 60, "heat"), source(tmp_path / "b.jsonl", 60, "drip", weight=2)
    corpus = opened(one, two)
    loader = Loader(corpus.train, batch_size=4, accumulation=3, seed=1)
    seen = Counter[str]()
    for index in range(loader.num_windows):
        for batch in loader.window(index):
            assert len(set(batch.sources)) == 1 and len(batch.sources) == len(batch.sample_ids)
            assert {name.split(":")[0] for name in batch.sample_ids} == {Path(batch.sources[0]).name}
            seen[batch.sources[0]] += len(batch.sources)
    parts = {part.name: len(part.rows) for part in corpus.train.parts}
    assert seen == {one["path"]: parts[one["path"]], two["path"]: 2 * parts[two["path"]]}
    assert any(f"source {two['path']}" in note and "weight 2" in note for note in corpus.notes)


def test_rows_of_several_sources_in_one_batch_are_padded_to_the_longest(tmp_path: Path) -> None:
    one, two = source(tmp_path / "a.jsonl", 30, "heat"), source(tmp_path / "b.jsonl", 30, "a long word of many tokens")
    rows = opened(one, two).train
    (batch,) = fixed_batches(rows, len(rows), 1)
    assert set(batch.sources) == {one["path"], two["path"]}
    for line in range(len(rows)):
        alone = rows.batch([line])
        width = alone.input_ids.shape[1]
        assert torch.equal(batch.input_ids[line, :width], alone.input_ids[0])
        assert torch.equal(batch.targets[line, :width], alone.targets[0])
        assert not batch.attention_mask[line, width:].any() and bool((batch.targets[line, width:] == IGNORED).all())
        assert batch.keys[line] == alone.keys[0] and batch.sample_ids[line] == rows.sample_id(line)


def test_packed_rows_of_several_sources_in_one_batch_keep_their_pieces(tmp_path: Path) -> None:
    one, two = source(tmp_path / "a.jsonl", 30, "heat"), source(tmp_path / "b.jsonl", 30, "a long word of many tokens")
    rows = opened(one, two, packing="packed", max_length=48).train
    assert rows.is_packed
    (batch,) = fixed_batches(rows, len(rows), 1)
    assert int(batch.segments.max()) > 0
    for line in range(len(rows)):
        alone = rows.batch([line])
        width = alone.input_ids.shape[1]
        assert torch.equal(batch.segments[line, :width], alone.segments[0])
        assert bool((batch.segments[line, width:] == -1).all()) and batch.keys[line] == alone.keys[0]


def test_a_row_that_is_not_packed_is_one_piece_beside_packed_ones(tmp_path: Path) -> None:
    paths = source(tmp_path / "a.jsonl", 30, "heat"), source(tmp_path / "b.jsonl", 30, "drip")
    plain, packed = (opened(*paths, packing=packing, max_length=48).train.parts for packing in ("rows", "packed"))
    batch = MixedRows([plain[0], packed[1]]).batch([0, len(plain[0].rows)])
    assert torch.equal(batch.segments[0], batch.attention_mask[0] - 1) and int(batch.segments[1].max()) > 0


def test_mixed_rows_answer_each_question_that_rows_answer(tmp_path: Path) -> None:
    public = {name for name in vars(Rows) if not name.startswith("_")}
    assert public <= {*vars(MixedRows)}, "what it does not override would read arrays that it does not have"
    rows = opened(source(tmp_path / "a.jsonl", 30, "heat"), source(tmp_path / "b.jsonl", 30, "drip drip")).train
    assert rows.lengths.tolist() == [rows.batch([row]).input_ids.shape[1] for row in range(len(rows))]
    assert not rows.is_packed


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 7), seed=st.integers(0, 5), epoch=st.integers(0, 2))
def test_grouping_by_length_keeps_rows_and_sources_and_leaves_less_padding(
    tmp_path_factory: Any, size: int, seed: int, epoch: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    sources = []
    for number, weight in enumerate((1, 1.5)):
        values = [{"prompt": f"{number}?", "completion": " word" * (n * 7 % 23 + 1)} for n in range(40)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
        sources.append({"path": str(folder / f"{number}.jsonl"), "weight": weight})
    rows = opened(*sources, max_length=32).train
    plain, grouped = (rows.epoch(seed, epoch, size, groups_lengths=groups) for groups in (False, True))
    seen = [Counter(row for batch in batches for row in batch.tolist()) for batches in (plain, grouped)]
    assert seen[0] == seen[1] and len(plain) == len(grouped)
    assert all(len(set(rows.batch(batch).sources)) == 1 for batch in grouped)
    width = [sum(len(batch) * int(rows.lengths[batch].max()) for batch in batches) for batches in (plain, grouped)]
    assert width[1] < width[0] or size == 1
    again = rows.epoch(seed, epoch + 1, size, groups_lengths=True), rows.epoch(seed, epoch, size, groups_lengths=True)
    assert [batch.tolist() for batch in again[1]] == [batch.tolist() for batch in grouped]
    loader = Loader(rows, batch_size=size, seed=seed, groups_lengths=True)
    first = loader.window(epoch * loader.num_windows)[0]
    assert first.sample_ids == tuple(rows.sample_id(row) for row in grouped[0].tolist())


def test_blocks_do_not_cross_from_one_source_to_another(tmp_path: Path) -> None:
    sources = []
    for name, word in (("a", "heat"), ("b", "drip")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{word} {n} {word}"}) + "\n" for n in range(50)))
        sources.append({"path": str(path)})
    corpus, tokenizer = opened(*sources), tiny.tokenizer()
    texts = [tokenizer.decode(corpus.train.row(row).tolist()) for row in range(len(corpus.train))]
    assert all(("heat" in text) != ("drip" in text) for text in texts)


def test_the_held_out_records_of_all_sources_are_one_set_chosen_by_content(tmp_path: Path) -> None:
    one, two = source(tmp_path / "a.jsonl", 200, "heat"), source(tmp_path / "b.jsonl", 200, "drip")
    twice = {**one, "weight": 3}
    held = [set(opened(*chosen).evaluation.groups) for chosen in ((one, two), (two, one), (twice, two))]
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_split_does_not_move_when_a_source_is_added(tmp_path: Path, order: tuple[int, int]) -> None:
    """With as many documents as measuring takes; of fewer the note says that more are held out."""
    both = [source(tmp_path / "a.jsonl", 800, "heat"), source(tmp_path / "b.jsonl", 800, "drip")]
    alone = set(opened(both[0]).evaluation.groups)
    together = set(opened(*(both[place] for place in order)).evaluation.groups)
    assert alone and alone == {name for name in together if name in alone} and len(together) > len(alone)
    trained = set(opened(*both).train.groups)
    assert not alone & trained


@pytest.mark.usefixtures("small_library")
def test_embedded_text_may_stand_beside_files(tmp_path: Path) -> None:
    corpus = opened("builtin:qa", source(tmp_path / "a.jsonl", 60, "heat", weight=0.5), max_length=64)
    assert [part.name for part in corpus.train.parts] == ["builtin:qa", str(tmp_path / "a.jsonl")]


def test_a_path_may_stand_twice_with_two_layouts(tmp_path: Path) -> None:
    one = source(tmp_path / "a.jsonl", 60, "heat")
    corpus = opened(one, {**one, "template": "{completion}"})
    assert [part.name for part in corpus.train.parts] == [f"{one['path']} #1", f"{one['path']} #2"]


def test_a_source_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(source(tmp_path / "a.jsonl", 99, "heat"), source(tmp_path / "b.jsonl", 1, "drip"), train_share=0.02)
    assert "b.jsonl" in caught.value.what and "left to train on" in caught.value.what


def test_one_bad_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(source(tmp_path / "a.jsonl", 99, "heat"), {"path": str(tmp_path / "no.jsonl")})
    assert "no.jsonl does not exist" in caught.value.what
