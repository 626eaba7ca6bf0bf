"""Count scored tokens of stored documents without reading their tokens one by one.

Of most documents all tokens after the first are scored, or a piece is the whole document. There the number of scored
tokens of each document is enough, and it takes one pass over the flags of the parts.

# T tokens of the chosen documents end to end, D chosen documents
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.data.encoded import Ints, Numbers, Tokens, documents_at, num_true_between
from stillroom.data.store.pair_part import PairPart
from stillroom.data.store.part import Part

_CHUNK = 1 << 20  # places counted at a time: bounds memory for any number of rows


def joined(parts: Sequence[Part] | Sequence[PairPart], name: str, dtype: Any) -> npt.NDArray[Any]:
    """One array of all parts, copied. Pages of one part at a time are in memory."""
    whole = np.empty(sum(len(getattr(part, name)) for part in parts), dtype)
    place = 0
    for part in parts:
        array = getattr(part, name)
        whole[place : place + len(array)] = array
        place += len(array)
        part.release()
    return whole


class ScoredCounts:
    """`Encoded.num_scored_between` of the chosen documents."""

    def __init__(self, parts: Sequence[Part], chosen: Numbers, bounds: Ints, is_scored: Tokens) -> None:
        self._parts, self._chosen, self._bounds, self._is_scored = parts, chosen, bounds, is_scored

    def __call__(self, begins: Ints, ends: Ints) -> Ints:
        """The number of scored tokens from each begin to its end."""
        counts = np.empty(len(begins), np.int64)
        known = _Known(self._parts, self._chosen, self._bounds)
        for start in range(0, len(begins), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            before_end, is_end_known = known.before(ends[chunk], start + 1)
            before_begin, is_begin_known = known.before(begins[chunk], start)
            counts[chunk] = before_end - before_begin
            unknown = start + np.flatnonzero(~(is_end_known & is_begin_known))
            if len(unknown):
                counts[unknown] = num_true_between(self._is_scored, begins[unknown], ends[unknown])
        return counts


class _Known:
    """What the counts of whole documents say about places inside of them."""

    def __init__(self, parts: Sequence[Part], chosen: Numbers, bounds: Ints) -> None:
        num_scored, is_first_scored = _of_documents(parts)
        counts = num_scored[chosen]
        del num_scored
        self._bounds = bounds
        self._is_first_scored = np.append(is_first_scored[chosen], np.False_)  # [D + 1], so that T has a document
        self._is_rest_scored = np.append(counts - self._is_first_scored[:-1] == np.diff(bounds) - 1, np.True_)
        self._before: Ints = np.zeros(len(bounds), np.int64)
        np.cumsum(counts, out=self._before[1:])

    def before(self, places: Ints, guess: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The number of scored tokens before each place, and whether it is known."""
        documents = documents_at(self._bounds, places, guess)
        offsets = places - self._bounds[documents]
        is_known = self._is_rest_scored[documents] | (offsets <= 1)
        counts: Ints = self._before[documents]
        counts += np.where(offsets > 0, self._is_first_scored[documents] + offsets - 1, 0)
        return counts, is_known


def _of_documents(parts: Sequence[Part]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Of each document of the parts: how many of its tokens are scored, and whether the first is."""
    num_documents = sum(len(part) for part in parts)
    num_scored, is_first_scored = np.empty(num_documents, np.int32), np.zeros(num_documents, np.bool_)
    place = 0
    for part in parts:
        own = slice(place, place + len(part))
        running = np.zeros(len(part.is_scored) + 1, np.int32)
        np.cumsum(part.is_scored, dtype=np.int32, out=running[1:])
        ends = np.cumsum(part.lengths, dtype=np.int64)
        firsts = ends - part.lengths
        num_scored[own] = running[ends] - running[firsts]
        has_tokens = part.lengths > 0
        is_first_scored[own][has_tokens] = part.is_scored[firsts[has_tokens]]
        place += len(part)
        part.release()
    return num_scored, is_first_scored
