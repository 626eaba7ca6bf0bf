"""Chosen documents of several parts as one stream of tokens, read by slices. Nothing is copied before it is read.

# T tokens of the chosen documents end to end, D chosen documents
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.data.encoded import Encoded, Ints, Numbers, Tokens
from stillroom.data.spans.paired import Paired
from stillroom.data.store.pair_part import PairPart, chosen_spans
from stillroom.data.store.part import Part
from stillroom.data.store.scored import ScoredCounts, joined
from stillroom.data.store.texts import JoinedTexts

_PARTS_MAPPED = 16  # parts whose pages are kept between two reads: they take memory, if only of the kernel's cache


def numbers(count: int) -> Numbers:
    """0 to count, in four bytes each where that is enough."""
    return np.arange(count, dtype=np.int32 if count < 1 << 31 else np.int64)


class _Layout:
    """Where each chosen document stands: token p of the stream is token p + shift[d] of the parts end to end."""

    def __init__(self, parts: Sequence[Part | PairPart], chosen: Numbers, lengths: npt.NDArray[np.int32]) -> None:
        self.bounds: Ints = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths[chosen], out=self.bounds[1:])
        firsts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=firsts[1:])
        self.shift: Ints = firsts[chosen]
        self.shift -= self.bounds[:-1]
        self.part_firsts = np.cumsum([0, *(len(part.ids) for part in parts)], dtype=np.int64)

    def places(self, start: int, end: int) -> Ints:
        """The places of tokens start to end of the stream in the parts end to end."""
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds, end, side="left"))
        edges: Ints = np.clip(self.bounds[first : last + 1], start, end)
        places: Ints = np.arange(start, end) + np.repeat(self.shift[first:last], edges[1:] - edges[:-1])
        return places


class _Pages:
    """Gives back the pages of parts that were read, before they are those of the whole store."""

    def __init__(self, parts: Sequence[Part | PairPart]) -> None:
        self._parts = parts
        self._read: set[int] = set()

    def read(self, part: int) -> None:
        self._read.add(part)
        if len(self._read) > _PARTS_MAPPED:
            done, self._read = self._read, set()
            for number in tuple(done):
                self._parts[number].release()


class Stream:
    """One array of the parts, seen through the layout. `stream[a:b]` is an ndarray."""

    def __init__(self, parts: Sequence[Part | PairPart], name: str, layout: _Layout, pages: _Pages, dtype: Any) -> None:
        self._layout, self._pages, self._dtype = layout, pages, np.dtype(dtype)
        self._arrays: list[npt.NDArray[Any]] = [getattr(part, name) for part in parts]

    def __len__(self) -> int:
        return int(self._layout.bounds[-1])

    def __getitem__(self, where: slice) -> npt.NDArray[Any]:
        start, end, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"a stream of tokens is read forwards, token by token, not by steps of {step}")
        if end <= start:
            return np.empty(0, self._dtype)
        firsts, bounds = self._layout.part_firsts, self._layout.bounds
        document = int(bounds.searchsorted(start, side="right")) - 1
        if end <= bounds[document + 1]:  # inside of one document, and so of one part
            place = start + int(self._layout.shift[document])
            part = int(firsts.searchsorted(place, side="right")) - 1
            place -= int(firsts[part])
            found: npt.NDArray[Any] = self._arrays[part][place : place + end - start].astype(self._dtype)
            self._pages.read(part)
            return found
        places = self._layout.places(start, end)
        low = int(np.searchsorted(firsts, places[0], side="right")) - 1
        high = int(np.searchsorted(firsts, places[-1], side="right")) - 1
        cuts = [0, *np.searchsorted(places, firsts[low + 1 : high + 1], side="left"), len(places)]
        found = np.empty(len(places), self._dtype)
        for at, part in enumerate(range(low, high + 1)):
            own = slice(cuts[at], cuts[at + 1])
            found[own] = self._arrays[part][places[own] - firsts[part]]
            self._pages.read(part)
        return found


class _EndToEnd:
    """Arrays one after another, read by slices."""

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        self._arrays = arrays
        self._firsts = np.cumsum([0, *(len(array) for array in arrays)]).tolist()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, where: slice) -> npt.NDArray[Any]:
        start, end, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"a stream of tokens is read forwards, token by token, not by steps of {step}")
        spans = zip(self._arrays, self._firsts[:-1], self._firsts[1:], strict=True)
        pieces = [
            array[max(start - first, 0) : end - first] for array, first, last in spans if first < end and start < last
        ]
        return np.concatenate(pieces) if pieces else self._arrays[0][:0]


def end_to_end(several: Sequence[Encoded]) -> Encoded:
    """The documents of at least one `Encoded`, one after the other. Nothing is copied before it is read."""
    if len(several) == 1:
        return several[0]
    firsts = np.cumsum([0, *(len(one.ids) for one in several)], dtype=np.int64)
    everyone = np.arange(sum(one.num_documents for one in several))
    return Encoded(
        ids=_EndToEnd([one.ids for one in several]),
        num_bytes=_EndToEnd([one.num_bytes for one in several]),
        is_scored=_EndToEnd([one.is_scored for one in several]),
        bounds=np.concatenate([[0], *(one.bounds[1:] + first for one, first in zip(several, firsts, strict=False))]),
        names=JoinedTexts([one.names for one in several], everyone),
        groups=JoinedTexts([one.groups for one in several], everyone),
        has_prompt=np.concatenate([one.prompts for one in several]),
        paired=Paired.joined([one.paired for one in several if one.paired is not None]),
    )


def encoded_stream(parts: Sequence[Part], chosen: Numbers) -> Encoded:
    """The chosen documents, numbered over all parts in rising order, without those that have no tokens."""
    lengths = joined(parts, "lengths", np.int32)
    kept = chosen[lengths[chosen] > 0]
    layout, pages = _Layout(parts, kept, lengths), _Pages(parts)
    del lengths
    names = JoinedTexts([part.names for part in parts], kept, pages.read)
    is_scored = Stream(parts, "is_scored", layout, pages, np.bool_)
    return Encoded(
        ids=Stream(parts, "ids", layout, pages, np.int32),
        num_bytes=Stream(parts, "num_bytes", layout, pages, np.int32),
        is_scored=is_scored,
        bounds=layout.bounds,
        names=names,
        groups=names,
        has_prompt=joined(parts, "has_prompt", np.bool_)[kept],
        count_scored=ScoredCounts(parts, kept, layout.bounds, is_scored),
        paired=_paired(parts, kept, layout.bounds, names),
    )


def _paired(parts: Sequence[Part], kept: Numbers, bounds: Ints, names: Sequence[str]) -> Paired | None:
    """The teacher's side of the chosen documents; None where the parts have none. Spans alone are held in memory."""
    beside = [part.pair for part in parts if part.pair is not None]
    if not parts or len(beside) != len(parts):
        return None
    lengths = joined(beside, "lengths", np.int32)
    layout, pages = _Layout(beside, kept, lengths), _Pages(beside)
    encoded = Encoded(
        ids=Stream(beside, "ids", layout, pages, np.int32),
        num_bytes=Stream(beside, "num_bytes", layout, pages, np.int32),
        is_scored=Stream(beside, "is_scored", layout, pages, np.bool_),
        bounds=layout.bounds,
        names=names,
        groups=names,
    )
    spans, coverage = chosen_spans(beside, kept, bounds[:-1], layout.bounds[:-1])
    return Paired(encoded, spans, coverage, int(bounds[-1]))
