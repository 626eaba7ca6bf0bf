"""Laws of the packing of answers."""

from __future__ import annotations

import cache_cases as cases
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.teachers.cache.format import id_bytes, pack, unpack
from stillroom.teachers.signals import RowAnswer, SignalSpec


@given(
    num_positions=st.integers(0, 20),
    exact=st.integers(0, 5),
    draws=st.integers(0, 9),
    vocab_size=st.sampled_from([2, 256, 257, 65_536, 65_537, 200_000]),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_comes_back(num_positions: int, exact: int, draws: int, vocab_size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    answer = RowAnswer(
        generator.integers(0, vocab_size, (num_positions, exact)).astype(np.int32),
        np.sort(generator.integers(0, 65_536, (num_positions, exact)).astype(np.uint16), axis=1),
        *(generator.integers(0, 65_536, num_positions).astype(np.uint16) for _ in range(3)),
        np.sort(generator.integers(0, min(vocab_size, 4), (num_positions, draws)).astype(np.int32), axis=1)
        if seed % 2
        else np.sort(generator.integers(0, vocab_size, (num_positions, draws)).astype(np.int32), axis=1),
    )
    spec = SignalSpec("hybrid", exact, draws)
    assert cases.same(unpack(pack(answer, id_bytes(vocab_size)), num_positions, spec, id_bytes(vocab_size)), answer)


def test_an_id_takes_the_bytes_its_vocabulary_needs() -> None:
    assert [id_bytes(size) for size in (2, 256, 257, 65_536, 65_537, 151_936)] == [1, 1, 2, 2, 3, 3]


def test_bytes_of_another_shape_are_refused() -> None:
    answer = RowAnswer.unusable(4, cases.HYBRID)
    packed = pack(answer, 1)
    for spec, positions in ((SignalSpec("hybrid", 5, 6), 4), (cases.HYBRID, 5), (SignalSpec("top_k", 4, 0), 4)):
        with pytest.raises(ValueError, match=r"bytes|drawn"):
            unpack(packed, positions, spec, 1)
    with pytest.raises(ValueError, match=r"."):
        unpack(packed[:-3], 4, cases.HYBRID, 1)
