"""Spans: the smallest groups of tokens on two sides that cover the same bytes.

Both sides have clean cuts, at which no token is inside. Between two neighbouring cuts that both have, the tokens of
each side stand for the same stretch of bytes. It is a span if both sides cover all of it with tokens that are sure;
otherwise its bytes are left out and counted. Nothing is moved to make it fit.

# A, B tokens of the two sides, S spans
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stillroom.data.spans.places import Flags, Placed
from stillroom.data.spans.token_bytes import Ints


@dataclass(frozen=True)
class Coverage:
    """How much of the text that both sides have is in spans, in bytes and in tokens of the two sides."""

    num_bytes: int = 0
    in_spans: int = 0
    one_to_one: int = 0  # bytes in spans of one token on each side
    num_spans: int = 0
    student_tokens: int = 0
    teacher_tokens: int = 0

    @property
    def left_out(self) -> int:
        return self.num_bytes - self.in_spans

    @property
    def share(self) -> float:
        return self.in_spans / self.num_bytes if self.num_bytes else 1.0

    @property
    def one_to_one_share(self) -> float:
        return self.one_to_one / self.num_bytes if self.num_bytes else 1.0

    def __add__(self, other: Coverage) -> Coverage:
        names = Coverage.__dataclass_fields__
        return Coverage(*(getattr(self, name) + getattr(other, name) for name in names))

    def to_dict(self) -> dict[str, float]:
        return {
            "bytes": self.num_bytes,
            "left_out_bytes": self.left_out,
            "share": round(self.share, 6),
            "one_to_one_share": round(self.one_to_one_share, 6),
            "spans": self.num_spans,
            "student_tokens": self.student_tokens,
            "teacher_tokens": self.teacher_tokens,
        }


@dataclass(frozen=True)
class Spans:
    """Span s is the tokens student_firsts[s] to student_ends[s] and teacher_firsts[s] to teacher_ends[s]."""

    student_firsts: Ints  # [S]
    student_ends: Ints  # [S]
    teacher_firsts: Ints  # [S]
    teacher_ends: Ints  # [S]
    sizes: Ints  # [S], in bytes
    is_exact: Flags  # [S], one token on each side, and the bytes of both are exactly the text's

    def __len__(self) -> int:
        return len(self.sizes)

    @staticmethod
    def none() -> Spans:
        nothing = np.zeros(0, np.int64)
        return Spans(nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.bool_))

    @staticmethod
    def joined(parts: list[Spans]) -> Spans:
        parts = [Spans.none(), *parts]
        names = Spans.__dataclass_fields__
        return Spans(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def shifted(self, student: int, teacher: int) -> Spans:
        return Spans(
            self.student_firsts + student,
            self.student_ends + student,
            self.teacher_firsts + teacher,
            self.teacher_ends + teacher,
            self.sizes,
            self.is_exact,
        )

    def with_end_marks(self, student: int, teacher: int) -> Spans:
        """One more span, of both sides' marks for the end of a text: the same event, without bytes."""
        firsts, ends = (np.array(pair, np.int64)[:, None] for pair in ((student, teacher), (student + 1, teacher + 1)))
        marks = Spans(firsts[0], ends[0], firsts[1], ends[1], np.zeros(1, np.int64), np.ones(1, np.bool_))
        return Spans.joined([self, marks])


def common_spans(student: Placed, teacher: Placed, num_bytes: int) -> Spans:
    """The spans of two tokenizations of the same `num_bytes` bytes."""
    cuts = np.flatnonzero(_cuts(student, num_bytes) & _cuts(teacher, num_bytes))
    sides = [_Side.of(placed, cuts) for placed in (student, teacher)]
    sizes = np.diff(cuts)
    is_span = np.logical_and.reduce([side.is_covered(sizes) for side in sides]) if len(sizes) else sizes != 0
    firsts = [side.bounds[:-1][is_span] for side in sides]
    lasts = [side.bounds[1:][is_span] - 1 for side in sides]
    numbers = [
        placed.index[bound] for placed, pair in zip((student, teacher), zip(firsts, lasts, strict=True), strict=True)
        for bound in pair
    ]  # fmt: skip
    is_single = (firsts[0] == lasts[0]) & (firsts[1] == lasts[1])
    is_exact = is_single & student.is_own[firsts[0]] & teacher.is_own[firsts[1]]
    return Spans(numbers[0], numbers[1] + 1, numbers[2], numbers[3] + 1, sizes[is_span], is_exact)


def coverage_of(spans: Spans, num_bytes: int) -> Coverage:
    num_student, num_teacher = spans.student_ends - spans.student_firsts, spans.teacher_ends - spans.teacher_firsts
    is_single = (num_student == 1) & (num_teacher == 1)
    return Coverage(
        num_bytes,
        int(spans.sizes.sum()),
        int(spans.sizes[is_single].sum()),
        len(spans),
        int(num_student.sum()),
        int(num_teacher.sum()),
    )


def _cuts(placed: Placed, num_bytes: int) -> Flags:
    """The places at which a token begins or ends. Tokens of a group that is not sure all have the group's range."""
    is_cut = np.zeros(num_bytes + 1, np.bool_)
    is_cut[placed.starts] = True
    is_cut[placed.ends] = True
    return is_cut


@dataclass(frozen=True)
class _Side:
    """The tokens of one side between neighbouring cuts. A token of no bytes belongs to what follows it."""

    bounds: Ints  # [cuts]
    covered: Ints  # [cuts], bytes of sure tokens before
    unsure: Ints  # [cuts], tokens before that are not sure

    @staticmethod
    def of(placed: Placed, cuts: npt.NDArray[np.int64]) -> _Side:
        bounds = np.searchsorted(placed.starts, cuts, side="left")
        sizes = np.where(placed.is_sure, placed.ends - placed.starts, 0)
        covered = np.concatenate([[0], np.cumsum(sizes)])[bounds]
        unsure = np.concatenate([[0], np.cumsum(~placed.is_sure)])[bounds]
        return _Side(bounds, covered, unsure)

    def is_covered(self, sizes: Ints) -> Flags:
        is_covered: Flags = (np.diff(self.covered) == sizes) & (np.diff(self.unsure) == 0) & (np.diff(self.bounds) > 0)
        return is_covered
