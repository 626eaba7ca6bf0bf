"""Laws of the plan: it follows from the missing rows alone."""

from __future__ import annotations

import cache_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from stillroom.teachers.cache.writer import needed_rows, plan_shards


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    size=st.integers(1, 100),
    written=st.sets(st.integers(0, 40)),
)
def test_what_is_left_after_some_shards_are_written_is_planned_as_before(
    lengths: list[int], size: int, written: set[int]
) -> None:
    rows = cases.needed(cases.rows_of(lengths))
    plans = plan_shards(rows, size)
    assert sorted(row.key for plan in plans for row in plan.rows) == sorted(row.key for row in rows)
    done = {row.key for number, plan in enumerate(plans) if number in written for row in plan.rows}
    left = plan_shards([row for row in rows if row.key not in done][::-1], size)
    assert [plan.name for plan in left] == [plan.name for number, plan in enumerate(plans) if number not in written]


def test_batches_hold_every_row_once_within_their_bound() -> None:
    one, other = cases.rows_of([3, 9, 4, 4, 7, 2]), cases.rows_of([5, 5], seed=1)
    (plan,) = plan_shards(cases.needed(one, other), 1000)
    batches = list(plan.batches(16))
    assert sorted(key for batch in batches for key in batch.keys) == sorted(row.key for row in plan.rows)
    assert all(batch.input_ids.numel() <= 16 or len(batch.keys) == 1 for batch in batches)
    assert all(len(batch.keys) == 1 for batch in plan.batches(1))


def test_a_content_that_stands_twice_is_needed_once() -> None:
    rows = cases.rows_of([4, 6])
    assert len(needed_rows([(rows, [0, 1, 0]), (rows, [1])])) == 2
