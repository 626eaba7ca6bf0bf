"""Laws of counting scored tokens of stored documents: any range has the count of its flags."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.encoded import documents_at, num_true_between
from stillroom.data.records import Tally
from stillroom.data.store.part import Part
from stillroom.data.store.stream import encoded_stream
from stillroom.data.store.texts import Texts

FLAGS = st.one_of(
    st.integers(0, 9).map(lambda size: [True] * size),  # plain text
    st.integers(0, 9).map(lambda size: [False, *[True] * size]),  # plain text with an opening
    st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda sizes: [False] * sizes[0] + [True] * sizes[1]),
    st.lists(st.booleans(), max_size=9),
)
PARTS = st.lists(st.lists(FLAGS, max_size=6), min_size=1, max_size=4)


def part_of(documents: list[list[bool]]) -> Part:
    flags = [flag for document in documents for flag in document]
    count = len(documents)
    return Part(
        ids=np.arange(len(flags)),
        num_bytes=np.ones(len(flags)),
        is_scored=np.array(flags, np.bool_),
        lengths=np.array([len(document) for document in documents], np.int32),
        has_prompt=np.zeros(count, np.bool_),
        digests=np.zeros(count, "S16"),
        share_hashes=np.zeros(count, np.uint64),
        names=Texts.of([str(number) for number in range(count)]),
        tally=Tally(),
    )


@given(parts=PARTS, data=st.data())
def test_any_range_has_the_count_of_its_flags(parts: list[list[list[bool]]], data: st.DataObject) -> None:
    everyone = [document for part in parts for document in part]
    is_chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(everyone), max_size=len(everyone))), np.bool_)
    chosen = np.flatnonzero(is_chosen)
    encoded = encoded_stream([part_of(part) for part in parts], chosen)
    flags = np.array([flag for number in chosen for flag in everyone[number]], np.bool_)
    assert encoded.is_scored[: len(flags)].tolist() == flags.tolist()
    place = st.integers(0, len(flags))
    ranges = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=12))
    begins, ends = (np.array([one[side] for one in ranges], np.int64) for side in (0, 1))
    expected = [int(flags[begin:end].sum()) for begin, end in ranges]
    assert encoded.num_scored_between(begins, ends).tolist() == expected
    assert num_true_between(flags, begins, ends).tolist() == expected
    assert encoded.num_scored == int(flags.sum())


def test_whole_documents_are_counted_without_reading_their_tokens() -> None:
    parts = [part_of([[False, False, True], [True, False]]), part_of([[False, True, True, True]])]
    encoded = encoded_stream(parts, np.arange(3))
    reads: list[Any] = []

    class Unread:
        def __getitem__(self, where: slice) -> Any:
            reads.append(where)
            return encoded.is_scored[where]

    counter: Any = encoded.count_scored
    counter._is_scored = Unread()
    assert counter(encoded.bounds[:-1] + 1, encoded.bounds[1:]).tolist() == [1, 0, 3]
    assert counter(np.array([5, 6, 7]), np.array([9, 8, 7])).tolist() == [3, 2, 0] and not reads
    assert counter(np.array([2]), np.array([3])).tolist() == [1] and reads, "the middle of a document with a prompt"


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=20), data=st.data())
def test_the_document_of_a_place_is_found_whatever_is_guessed(lengths: list[int], data: st.DataObject) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = data.draw(st.lists(st.integers(0, len(owner) - 1), max_size=20))
    guess = data.draw(st.integers(0, len(lengths)))
    for tried in (np.array(places, np.int64), bounds[:-1], bounds[1:] - 1):
        assert documents_at(bounds, tried, guess).tolist() == owner[tried].tolist()


def test_pages_of_parts_that_were_read_are_given_back() -> None:
    released: list[int] = []

    class Watched(Part):
        def release(self) -> None:
            released.append(int(self.digests[0]))

    parts = [part_of([[True, True]]) for _ in range(40)]
    watched = [
        Watched(**{**vars(part), "digests": np.array([str(number)], "S16")}) for number, part in enumerate(parts)
    ]
    encoded = encoded_stream(watched, np.arange(40))
    kept: set[int] = set()
    for number in range(40):
        released.clear()
        assert encoded.ids[2 * number : 2 * number + 1].tolist() == [0] and encoded.names[number] == "0"
        kept = (kept | {number}) - {*released[:-1]}
        assert len(kept) <= 17, "sixteen parts, and the one that is read"
