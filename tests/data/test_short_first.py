"""Laws of `data.order = "short_first"`: from short to long, each row once, decided by seed and position alone."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError
from stillroom.data import Encoded, Loader, Rows, Tally, open_data, pack
from stillroom.data.corpus import encode_training
from stillroom.data.loader import MixedRows, Part, buckets, ramp

LENGTHS = st.lists(st.integers(2, 30), min_size=2, max_size=90)
PACKINGS = st.sampled_from(["rows", "packed"])


def made(lengths: list[int], packing: Any = "rows", name: str = "r") -> Rows:
    """Rows of records with these lengths."""
    count = sum(lengths)
    names = [f"{name}{number}" for number in range(len(lengths))]
    encoded = Encoded(
        ids=np.arange(count, dtype=np.int32) % 97,
        num_bytes=np.ones(count, np.int32),
        is_scored=np.ones(count, np.bool_),
        bounds=np.concatenate([[0], np.cumsum(lengths)]),
        names=names,
        groups=names,
        has_prompt=np.ones(len(lengths), np.bool_),
    )
    return pack(encoded, packing, 40, Tally())


def names_of(loader: Loader, windows: range) -> list[str]:
    return [
        name for window in windows for batch in loader.window(window) if batch.num_scored for name in batch.sample_ids
    ]


@given(lengths=LENGTHS, batch_size=st.integers(1, 7), seed=st.integers(0, 9))
def test_no_row_of_a_bucket_is_shorter_than_one_of_the_bucket_before(
    lengths: list[int], batch_size: int, seed: int
) -> None:
    rng, sizes = np.random.default_rng(seed), np.array(lengths)
    found = ramp(rng.permutation(len(sizes)), sizes, batch_size, rng)
    assert sorted(np.concatenate(found).tolist()) == list(range(len(sizes)))
    assert all(sizes[one].max() <= sizes[other].min() for one, other in itertools.pairwise(found))
    assert len(found) <= 20 and all(len(bucket) % batch_size == 0 for bucket in found[:-1])


def test_the_rows_of_a_bucket_are_in_random_order() -> None:
    sizes = np.arange(4000)
    first, other = (np.concatenate(ramp(sizes, sizes, 4, np.random.default_rng(seed))) for seed in (0, 1))
    assert len(buckets(sizes, 4)) == 20
    assert (first != other).mean() > 0.9 and np.abs(first - other).max() < 200


@settings(deadline=None)
@given(
    lengths=LENGTHS.filter(lambda values: len({*values}) > 1),
    packing=PACKINGS,
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    num_first=st.integers(1, 30),
    resume=st.integers(0, 30),
    groups=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_batch_size_share_resume_point_and_process_count_give_each_row_once_in_each_epoch(
    lengths: list[int],
    packing: Any,
    batch_size: int,
    accumulation: int,
    num_ranks: int,
    num_first: int,
    resume: int,
    groups: bool,
    seed: int,
) -> None:
    rows = made(lengths, packing)
    if len({*rows.longest.tolist()}) == 1:
        return

    def loaders() -> list[Loader]:
        sizes: dict[str, Any] = {"batch_size": batch_size, "accumulation": accumulation, "num_ranks": num_ranks}
        plain = [Loader(rows, rank=rank, seed=seed, groups_lengths=groups, **sizes) for rank in range(num_ranks)]
        return [loader.short_first(num_first) for loader in plain]

    everyone = sorted(rows.sample_id(row) for row in range(len(rows)))
    running, num_windows = loaders(), loaders()[0].num_windows
    for epoch in (0, 1):
        seen: list[str] = []
        for window in range(epoch * num_windows, (epoch + 1) * num_windows):
            if window == resume:
                running = loaders()  # as after a kill: only the index is known
            seen += [name for one in running for name in names_of(one, range(window, window + 1))]
        assert sorted(seen) == everyone


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=60, max_size=90, unique=False),
    packing=PACKINGS,
    groups=st.booleans(),
    seed=st.integers(0, 3),
)
def test_the_first_windows_go_from_short_to_long_and_the_others_are_shuffled(
    lengths: list[int], packing: Any, groups: bool, seed: int
) -> None:
    rows = made([*lengths, 2, 2, 40], packing)
    plain = Loader(rows, batch_size=1, seed=seed, groups_lengths=groups)
    loader, num_first = plain.short_first(len(rows) // 2), len(rows) // 2
    row_of = {rows.sample_id(row): row for row in range(len(rows))}
    order = [row_of[name] for name in names_of(loader, range(loader.num_windows))]
    stretches = [rows.longest[stretch] for stretch in buckets(np.array(order[:num_first]), 1)]
    assert all(one.max() <= other.min() for one, other in itertools.pairwise(stretches))
    drawn = [row_of[name] for name in names_of(Loader(rows, batch_size=1, seed=seed), range(num_first))]
    assert {*order[:num_first]} == {*drawn}, "the rows that come first are a random share of all lengths"
    later = range(loader.num_windows, 2 * loader.num_windows)
    assert names_of(loader, later) == names_of(plain, later), "a later epoch is in the order of a shuffled run"


def test_packed_rows_go_by_their_longest_record() -> None:
    rows = made([30, 10, 20, 20, 5, 5, 5, 5, 5, 5, 5, 5], "packed")
    assert sorted(rows.longest.tolist()) == [4, 19, 29] and rows.is_packed
    loader = Loader(rows, batch_size=1).short_first(3)
    found = [rows.longest[row].item() for row in loader._order(0)]
    assert found == [4, 19, 29]


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.tuples(st.integers(3, 40), st.floats(0.3, 2.5)), min_size=1, max_size=3),
    batch_size=st.integers(1, 6),
    share=st.floats(0.05, 1.0),
    groups=st.booleans(),
    seed=st.integers(0, 3),
)
def test_of_several_sources_each_is_seen_as_before_and_batches_go_from_short_to_long(
    counts: list[tuple[int, float]], batch_size: int, share: float, groups: bool, seed: int
) -> None:
    parts = [
        Part(f"s{n}", made([2 + (7 * row + n) % 29 for row in range(count)], name=f"s{n}."), weight)
        for n, (count, weight) in enumerate(counts)
    ]
    rows = MixedRows(parts)
    plain = rows.epoch(seed, 0, batch_size, groups_lengths=groups)
    found = rows.epoch(seed, 0, batch_size, groups_lengths=groups, share_short_first=share)
    again = rows.epoch(seed, 0, batch_size, groups_lengths=groups, share_short_first=share)
    assert [one.tolist() for one in found] == [one.tolist() for one in again]
    assert Counter(np.concatenate(found).tolist()) == Counter(np.concatenate(plain).tolist())
    assert len(found) == len(plain) and all(len({*rows.batch(one).sources}) == 1 for one in found)
    num_first = sum(round(share * part.num_batches(batch_size)) for part in parts)
    means = np.array([rows.longest[one].mean() for one in found[:num_first]])
    stretches = buckets(means, 1) if num_first else []
    assert all(one.max() <= other.min() for one, other in itertools.pairwise(stretches))
    later = [
        rows.epoch(seed, 1, batch_size, groups_lengths=groups, share_short_first=given_share)
        for given_share in (share, 0.0)
    ]
    assert [one.tolist() for one in later[0]] == [one.tolist() for one in later[1]]


def test_another_thread_that_asks_for_another_epoch_changes_no_order() -> None:
    """The thread is let in at the worst place: after an order was kept, before it is returned."""

    class Raced(Loader):
        @property
        def _kept(self) -> Any:  # type: ignore[override]
            return self.__dict__.get("kept")

        @_kept.setter
        def _kept(self, value: Any) -> None:
            self.__dict__["kept"] = value
            if value is not None and value[0] == 0:
                self._order(1)

    rows = made([*range(2, 40)])
    assert Raced(rows, batch_size=2)._order(0).tolist() == Loader(rows, batch_size=2)._order(0).tolist()


def test_another_thread_changes_no_order_of_several_sources() -> None:
    class Raced(MixedRows):
        @property
        def _kept(self) -> Any:  # type: ignore[override]
            return self.__dict__.get("kept")

        @_kept.setter
        def _kept(self, value: Any) -> None:
            self.__dict__["kept"] = value
            if value is not None and value[0][1] == 0:
                self.epoch(0, 1, 2)

    parts = [Part("a", made([*range(2, 40)])), Part("b", made([*range(2, 30)]))]
    found, expected = (rows(parts).epoch(0, 0, 2) for rows in (Raced, MixedRows))
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


# -- refused ---------------------------------------------------------------------------------------------


def test_rows_of_one_length_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Loader(made([9] * 12), batch_size=2).short_first(3)
    assert caught.value.exit_code == 2 and "all 12 rows have the same length" in caught.value.what


@pytest.mark.parametrize("packing", ["auto", "blocks"])
def test_blocks_are_refused_by_name(tmp_path: Path, packing: Any) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} heat the still"}) + "\n" for n in range(60)))
    config = DataConfig(train=str(path), packing=packing, order="short_first")
    with pytest.raises(ConfigError):
        encode_training(config, tiny.tokenizer())
    with pytest.raises(ConfigError) as caught:
        open_data(config, tiny.tokenizer())
    assert caught.value.exit_code == 2
    assert "short_first" in caught.value.what and "blocks are all of 256 tokens" in caught.value.what
    assert "rows" in caught.value.advice[0]


# -- in a run --------------------------------------------------------------------------------------------


def test_a_run_begins_with_short_rows_for_its_share_of_steps(make_run: Any) -> None:
    over = {"data__packing": "rows", "data__order": "short_first"}
    run = make_run(**over, train__max_steps=10, train__gradient_accumulation_steps=2)
    plain = make_run(data__packing="rows", train__max_steps=10, train__gradient_accumulation_steps=2)
    means, shuffled = (
        [
            float(np.mean([batch.attention_mask.sum(1).float().mean() for batch in one.loader.window(index)]))
            for index in range(10)
        ]
        for one in (run, plain)
    )
    num_first = 3  # 0.3 of the steps
    assert means[:num_first] == sorted(means[:num_first]) and shuffled[:num_first] != sorted(shuffled[:num_first])
    assert min(means[num_first:]) < means[num_first - 1], "the steps after the share are not the longest"
    seen, drawn = ({*names_of(one.loader, range(5))} for one in (run, plain))
    assert seen == drawn
