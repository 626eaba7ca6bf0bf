"""Laws of counting scored tokens of stored documents: any range has the count of its flags."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stillroom.data.records import Tally
from stillroom.data.store import StoredFile, encoded_documents
from stillroom.data.tokenize import documents_at, num_true_between

FLAGS = st.one_of(
    st.integers(0, 9).map(lambda size: [True] * size),  # plain text
    st.integers(0, 9).map(lambda size: [False, *[True] * size]),  # plain text with an opening
    st.tuples(st.integers(1, 5), st.integers(0, 5)).map(lambda sizes: [False] * sizes[0] + [True] * sizes[1]),
    st.lists(st.booleans(), max_size=9),
)
FILES = st.lists(st.lists(FLAGS, max_size=6), min_size=1, max_size=4)


def file_of(documents: list[list[bool]]) -> StoredFile:
    flags = [flag for document in documents for flag in document]
    names = [str(number) for number in range(len(documents))]
    return StoredFile(
        {
            "ids": np.arange(len(flags)),
            "num_bytes": np.ones(len(flags)),
            "is_scored": np.array(flags, np.bool_),
            "lengths": np.array([len(document) for document in documents], np.int32),
            "has_prompt": np.zeros(len(names), np.bool_),
            "names": np.frombuffer("".join(names).encode(), np.uint8),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
        },
        Tally(),
    )


@given(files=FILES, data=st.data())
def test_any_range_has_the_count_of_its_flags(files: list[list[list[bool]]], data: st.DataObject) -> None:
    everyone = [document for file in files for document in file]
    is_chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(everyone), max_size=len(everyone))), np.bool_)
    chosen = np.flatnonzero(is_chosen)
    encoded = encoded_documents([file_of(file) for file in files], chosen)
    flags = np.array([flag for number in chosen for flag in everyone[number]], np.bool_)
    assert encoded.is_scored[: len(flags)].tolist() == flags.tolist()
    place = st.integers(0, len(flags))
    ranges = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=12))
    begins, ends = (np.array([one[side] for one in ranges], np.int64) for side in (0, 1))
    expected = [int(flags[begin:end].sum()) for begin, end in ranges]
    assert encoded.num_scored_between(begins, ends).tolist() == expected
    assert num_true_between(flags, begins, ends).tolist() == expected
    assert encoded.num_scored == int(flags.sum())


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=20), data=st.data())
def test_the_document_of_a_place_is_found(lengths: list[int], data: st.DataObject) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = data.draw(st.lists(st.integers(0, len(owner) - 1), max_size=20))
    for tried in (np.array(places, np.int64), bounds[:-1], bounds[1:] - 1):
        assert documents_at(bounds, tried).tolist() == owner[tried].tolist()
