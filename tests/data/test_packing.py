"""Laws of packing: best fit loses nothing, overfills nothing and wastes little; grouping changes only the order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.types import IGNORED
from stillroom.data import Encoded, Encoder, Loader, Record, Rows, Tally, pack
from stillroom.data.packing import best_fit, stable_order

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=120)


@given(lengths=LENGTHS, slack=st.integers(0, 30))
def test_every_piece_is_in_one_row_and_no_row_is_too_long(lengths: list[int], slack: int) -> None:
    sizes, capacity = np.array(lengths, np.int64), max([1, *lengths]) + slack
    order, firsts = best_fit(sizes, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert firsts[0] == 0 and firsts[-1] == len(lengths) and (np.diff(firsts) > 0).all()
    filled = [int(sizes[order[start:end]].sum()) for start, end in itertools.pairwise(firsts)]
    assert max(filled, default=0) <= capacity
    # Of two rows at most half full one would be empty: at most one is.
    assert sum(2 * amount <= capacity for amount in filled) <= 1
    first_pieces = [int(order[start]) for start in firsts[:-1]]
    assert first_pieces == sorted(first_pieces)


def test_best_fit_takes_the_row_with_the_least_room() -> None:
    order, firsts = best_fit(np.array([7, 5, 3, 5]), 10)
    rows = [order[start:end].tolist() for start, end in itertools.pairwise(firsts)]
    assert rows == [[0, 2], [1, 3]]


@given(values=st.lists(st.sampled_from([0, 1, 2, 65_535, 65_536, 65_537, 131_072, 1 << 33]), max_size=60))
def test_numbers_of_any_size_are_sorted_stably(values: list[int]) -> None:
    numbers = np.array(values, np.int64)
    assert stable_order(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()


def test_a_piece_that_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        best_fit(np.array([3, 11]), 10)


def documents(count: int) -> Encoded:
    texts = tiny.sentences(count, 3)
    records = [
        Record(f"d{number}", ((text[:30], False), (text[30:] + "!", True)), text) for number, text in enumerate(texts)
    ]
    return Encoder(tiny.tokenizer(), Tally())(records)


def scored(rows: Rows) -> list[tuple[int, ...]]:
    """For each piece: its inputs and targets."""
    found = []
    for row in range(len(rows)):
        batch = rows.batch([row])
        segments = batch.segments if batch.segments is not None else batch.attention_mask - 1
        for number in range(int(segments.max()) + 1):
            here = segments[0] == number
            found.append((*batch.input_ids[0, here].tolist(), *batch.targets[0, here].tolist()))
    return sorted(found)


def test_packed_rows_hold_the_inputs_and_targets_of_rows() -> None:
    encoded = documents(60)
    alone, packed = (pack(encoded, packing, 64, Tally()) for packing in ("rows", "packed"))
    assert scored(packed) == scored(alone)
    for name in ("num_tokens", "num_targets", "num_documents"):
        assert getattr(packed, name) == getattr(alone, name)
    assert len(packed) < len(alone) and int(packed.lengths.max()) <= 64
    assert packed.sample_id(0).startswith("d") and "+" in packed.sample_id(0)


def test_the_first_token_of_a_piece_is_no_target_of_the_piece_before() -> None:
    batch = pack(documents(20), "packed", 64, Tally()).batch([0, 1])
    assert batch.segments is not None
    ends = batch.segments[:, 1:] != batch.segments[:, :-1]
    assert bool((batch.targets[:, :-1][ends] != batch.input_ids[:, 1:][ends]).any())
    assert bool((batch.targets[batch.segments == -1] == IGNORED).all())


@given(batch_size=st.integers(1, 7), seed=st.integers(0, 5))
def test_grouped_batches_are_a_permutation_with_less_padding(batch_size: int, seed: int) -> None:
    rows = pack(documents(80), "rows", 64, Tally())
    plain, grouped = (Loader(rows, batch_size=batch_size, seed=seed, groups_lengths=groups) for groups in (False, True))
    names, num_positions = [], []
    for loader in (plain, grouped):
        batches = [batch for window in range(loader.num_windows) for batch in loader.window(window)]
        names.append(sorted(name for batch in batches for name in batch.sample_ids))
        num_positions.append(sum(batch.input_ids.numel() for batch in batches))
    assert names[0] == names[1]
    if batch_size > 1:
        assert num_positions[1] < num_positions[0]
    else:
        assert num_positions[1] == num_positions[0]
    again = Loader(rows, batch_size=batch_size, seed=seed, groups_lengths=True).window(2)[0]
    assert again.sample_ids == grouped.window(2)[0].sample_ids, "a pure function of seed and index"
