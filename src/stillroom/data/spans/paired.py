"""Documents in the tokens of two models, with the spans that both have.

The teacher's tokens are flat arrays of their own, document by document as the student's. A row of the student has a
row of the teacher beside it: the tokens of the same stretch of text. A span is in a pair of rows if all its tokens are
targets in both, so that both models give each a probability.

# T tokens of the student, S spans, P pieces of rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stillroom.data.encoded import Encoded, Ints
from stillroom.data.spans.common import Coverage, Spans


@dataclass(frozen=True)
class Beside:
    """For each piece of the student's rows, what stands beside it. [P] each.

    The teacher's piece is its tokens starts to ends, those from `targets` on are scored, and the spans are `firsts` to
    `lasts`. A piece without spans has no tokens.
    """

    starts: Ints
    ends: Ints
    targets: Ints
    firsts: Ints
    lasts: Ints

    @property
    def lengths(self) -> Ints:
        lengths: Ints = np.maximum(self.ends - self.starts - 1, 0)
        return lengths


@dataclass(frozen=True)
class Paired:
    """The teacher's tokens of the same documents, and the spans, numbered over all of them."""

    encoded: Encoded
    spans: Spans
    coverage: Coverage
    num_student: int  # tokens of the student
    pad_id: int = 0

    @cached_property
    def student_spans(self) -> npt.NDArray[np.int32]:
        """[T] The span of each token of the student, -1: none."""
        return _numbered(self.spans.student_firsts, self.spans.student_ends, self.num_student)

    @cached_property
    def teacher_spans(self) -> npt.NDArray[np.int32]:
        return _numbered(self.spans.teacher_firsts, self.spans.teacher_ends, len(self.encoded.ids))

    @staticmethod
    def joined(several: Sequence[Paired]) -> Paired | None:
        """Several one after the other; None of none."""
        if not several:
            return None
        spans, encoded = list[Spans](), [one.encoded for one in several]
        student = teacher = 0
        for one in several:
            spans.append(one.spans.shifted(student, teacher))
            student, teacher = student + one.num_student, teacher + len(one.encoded.ids)
        bounds = np.cumsum([0, *(len(one.ids) for one in encoded)])
        joined = Encoded(
            ids=np.concatenate([one.ids[:] for one in encoded]),
            num_bytes=np.concatenate([one.num_bytes[:] for one in encoded]),
            is_scored=np.concatenate([one.is_scored[:] for one in encoded]),
            bounds=np.concatenate([[0], *(one.bounds[1:] + at for one, at in zip(encoded, bounds, strict=False))]),
            names=tuple(name for one in encoded for name in one.names),
            groups=tuple(group for one in encoded for group in one.groups),
        )
        coverage = sum((one.coverage for one in several), Coverage())
        return Paired(joined, Spans.joined(spans), coverage, student, several[0].pad_id)

    def beside(self, bounds: Ints, starts: Ints, ends: Ints) -> Beside:
        """What stands beside the student's pieces `starts` to `ends`. `bounds` are the student's documents.

        A piece that begins with its document has the teacher's from its beginning; one that begins inside has the
        teacher's tokens from the span of its first token on, which is no target there either.
        """
        spans, theirs = self.spans, self.encoded.bounds
        documents = np.searchsorted(bounds, starts, side="right") - 1
        is_opening = bounds[documents] == starts
        firsts = np.searchsorted(spans.student_firsts, starts + 1)
        lasts = np.searchsorted(spans.student_ends, ends, side="right")
        holding = np.searchsorted(spans.student_ends, starts, side="right")
        after = np.append(spans.teacher_firsts, len(self.encoded.ids))
        inside = np.minimum(after[holding], np.maximum(after[firsts] - 1, theirs[documents]))
        begins = np.where(is_opening, theirs[documents], inside)
        firsts = np.maximum(firsts, np.searchsorted(spans.teacher_firsts, begins, side="right"))
        lasts = np.maximum(lasts, firsts)
        closing = np.searchsorted(bounds, ends)
        is_closed = bounds[closing] == ends
        reached = np.append(spans.teacher_ends, 0)[lasts - 1]
        stops = np.where(is_closed, theirs[closing], reached)
        is_empty = lasts == firsts
        begins = np.where(is_empty, 0, begins)
        targets = np.where(is_opening, begins + 1, after[firsts])
        return Beside(begins, np.where(is_empty, 0, stops), targets, firsts, lasts)


def _numbered(firsts: Ints, ends: Ints, size: int) -> npt.NDArray[np.int32]:
    """[size] The number of the range that each place is in, -1 outside of all. The ranges are in order."""
    numbers = np.full(size, -1, np.int32)
    sizes = ends - firsts
    total = np.cumsum(sizes)
    places = np.arange(int(total[-1]) if len(total) else 0) + np.repeat(firsts - (total - sizes), sizes)
    numbers[places] = np.repeat(np.arange(len(firsts), dtype=np.int32), sizes)
    return numbers


def span_numbers(
    of_tokens: npt.NDArray[np.int32],
    rows: Sequence[Sequence[tuple[int, int, int]]],
    limits: Sequence[Sequence[tuple[int, int]]],
    width: int,
) -> Ints:
    """[B, width] The span of each position's target, numbered in its row from 0; -1: none.

    `rows` are the pieces (start, end, ...) of each row, `limits` the spans of each piece.
    """
    numbers = np.full((len(rows), width), -1, np.int64)
    for line, (pieces, spans) in enumerate(zip(rows, limits, strict=True)):
        place = seen = 0
        for (start, end, *_), (first, last) in zip(pieces, spans, strict=True):
            if end - start < 2:
                continue
            own = of_tokens[start + 1 : end].astype(np.int64)
            is_in = (own >= first) & (own < last)
            numbers[line, place : place + len(own)] = np.where(is_in, own - first + seen, -1)
            place, seen = place + len(own), seen + last - first
    return numbers


def span_flags(
    numbers: Ints, flags: npt.NDArray[np.bool_], limits: Sequence[Sequence[tuple[int, int]]]
) -> npt.NDArray[np.bool_]:
    """[B, L] The flag of each position's span; False outside of spans."""
    found = np.zeros(numbers.shape, np.bool_)
    for line, spans in enumerate(limits):
        of_row = np.concatenate([np.zeros(0, np.bool_), *(flags[first:last] for first, last in spans)])
        is_in = numbers[line] >= 0
        found[line, is_in] = of_row[numbers[line, is_in]]
    return found
