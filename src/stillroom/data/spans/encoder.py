"""Tokenize documents with two tokenizers and find their spans, document by document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stillroom.data.bos import Bos
from stillroom.data.encode import Encoder, TokenizedRecord, Tokenizer, end_to_end
from stillroom.data.encoded import Encoded, Ints
from stillroom.data.records import Record, Tally
from stillroom.data.spans.chats import PairedChats, Range
from stillroom.data.spans.common import Coverage, Spans, common_spans, coverage_of
from stillroom.data.spans.paired import Paired
from stillroom.data.spans.places import Placed, place_tokens
from stillroom.data.spans.token_bytes import TokenBytes

_BATCH = 256  # documents whose records are held at once, tokenized on both sides


@dataclass(frozen=True)
class TwoTokenizers:
    """The tables of both sides, made once for a run. Raise `ConfigError` if one cannot be used."""

    student: Tokenizer
    teacher: Tokenizer

    @cached_property
    def tables(self) -> tuple[TokenBytes, TokenBytes]:
        return TokenBytes.of(self.student, "student"), TokenBytes.of(self.teacher, "teacher")


@dataclass(frozen=True)
class PairEncoder(Encoder):
    """An `Encoder` of the student's tokens that keeps the teacher's beside them, in `Encoded.paired`."""

    two: TwoTokenizers | None = None
    chats: PairedChats | None = None
    tell_coverage: Callable[[Coverage], object] = lambda _coverage: None

    @staticmethod
    def of(
        two: TwoTokenizers,
        chats: PairedChats,
        tally: Tally,
        bos: Bos,
        tell_coverage: Callable[[Coverage], object] = lambda _coverage: None,
    ) -> PairEncoder:
        return PairEncoder(
            two.student, tally, bos, keeps_places=True, two=two, chats=chats, tell_coverage=tell_coverage
        )

    def __call__(self, records: Sequence[Record]) -> Encoded:
        self.note_limits()
        students: list[TokenizedRecord] = []
        teachers: list[TokenizedRecord] = []
        parts, coverage, num_student, num_teacher = list[Spans](), Coverage(), 0, 0
        for student, teacher, spans, covered in self.documents(records):
            if not len(student.ids):
                continue
            parts.append(spans.shifted(num_student, num_teacher))
            coverage += covered
            num_student, num_teacher = num_student + len(student.ids), num_teacher + len(teacher.ids)
            students.append(student)
            teachers.append(teacher)
        self.note_lost(len(records) - len(students))
        paired = Paired(end_to_end(teachers), Spans.joined(parts), coverage, num_student)
        return self.found(replace(end_to_end(students), paired=paired))

    def found(self, encoded: Encoded) -> Encoded:
        """Tell the coverage, and pad the teacher's rows as its tokenizer does."""
        assert self.two is not None and encoded.paired is not None
        self.tell_coverage(encoded.paired.coverage)
        marks = (self.two.teacher.pad_token_id, self.two.teacher.eos_token_id)
        pad = next((one for one in marks if one is not None), 0)
        return replace(encoded, paired=replace(encoded.paired, pad_id=int(pad)))

    def documents(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[TokenizedRecord, TokenizedRecord, Spans, Coverage]]:
        """Each record in the tokens of both, its spans, numbered from its own first tokens, and their coverage."""
        assert self.two is not None
        theirs = Encoder(self.two.teacher, Tally(), self.bos, keeps_places=True)
        for student, teacher, ranges in self._both(records, theirs):
            spans, covered = Spans.none(), Coverage()
            if len(student.ids):
                spans, covered = document_spans(student, teacher, ranges, self.two.tables)
            yield replace(student, places=None), replace(teacher, places=None), spans, covered

    def _both(
        self, records: Sequence[Record], theirs: Encoder
    ) -> Iterator[tuple[TokenizedRecord, TokenizedRecord, tuple[Range, ...]]]:
        """Each record in the tokens of both; without a print for the teacher it has no tokens and no ranges there."""
        assert self.chats is not None
        for start in range(0, len(records), _BATCH):
            batch = records[start : start + _BATCH]
            others = [self.chats.paired(record) for record in batch]
            read = iter(theirs.tokenized([other[0] for other in others if other is not None]))
            for student, other in zip(self.tokenized(batch), others, strict=True):
                if other is None:
                    nothing = np.empty(0, np.int32)
                    yield student, TokenizedRecord(student.record, nothing, nothing, nothing != 0), ()
                else:
                    yield student, next(read), other[1]


def document_spans(
    student: TokenizedRecord,
    teacher: TokenizedRecord,
    ranges: Sequence[Range],
    tables: tuple[TokenBytes, TokenBytes],
) -> tuple[Spans, Coverage]:
    """The spans of one document whose tokens are all scored, and how much of the scored text both share they cover."""
    texts = student.record.text, teacher.record.text
    if not len(teacher.ids) or not ranges:
        return Spans.none(), Coverage(int(_scored_bytes(student.record).sum()))
    bytes_at = [_byte_places(text) for text in texts]
    limits = np.array(ranges, np.int64).reshape(-1, 4)
    own = bytes_at[0][limits[:, 0]], bytes_at[0][limits[:, 1]]
    their = bytes_at[1][limits[:, 2]], bytes_at[1][limits[:, 3]]
    places = [_placed(one, table) for one, table in zip((student, teacher), tables, strict=True)]
    num_bytes = int(bytes_at[0][-1])
    sides = (
        _within(places[0], own, own[0], _follows_space(texts[0], limits[:, 0])),
        _within(places[1], their, own[0], _follows_space(texts[1], limits[:, 2])),
    )
    spans = _scored(common_spans(*sides, num_bytes), student.is_scored, teacher.is_scored)
    shared = np.zeros(num_bytes + 1, np.int64)
    np.add.at(shared, own[0], 1)
    np.add.at(shared, own[1], -1)
    coverage = coverage_of(spans, int((_scored_bytes(student.record) & (np.cumsum(shared)[:-1] > 0)).sum()))
    if student.has_end_mark and teacher.has_end_mark:
        spans = spans.with_end_marks(len(student.ids) - 1, len(teacher.ids) - 1)
    return spans, coverage


def _placed(tokenized: TokenizedRecord, table: TokenBytes) -> Placed:
    """The tokens of the text, without opening and end mark."""
    assert tokenized.places is not None
    first, last = tokenized.num_opening, len(tokenized.ids) - tokenized.has_end_mark
    ids = tokenized.ids[first:last].astype(np.int64)
    return place_tokens(tokenized.record.text, ids, tokenized.places, table).shifted(0, first)


def _within(placed: Placed, own: tuple[Ints, Ints], common: Ints, follows_space: npt.NDArray[np.bool_]) -> Placed:
    """The tokens in the ranges [own[0], own[1]), moved to where the ranges stand in the student's text.

    One that reaches over an end of a range is cut to the range and is not sure. A single space before a range, which
    templates put there or leave out, is as one that a tokenizer invents before a text.
    """
    first = np.searchsorted(own[1], placed.starts, side="right")
    first = np.minimum(first, len(own[0]) - 1)
    begin, end = own[0][first], own[1][first]
    # A token of no bytes is inside where it stands before the end of a range.
    is_inside = (placed.starts < end) & (placed.ends >= begin) & ((placed.ends > begin) | (placed.starts >= begin))
    is_spaced = (placed.starts == begin - 1) & follows_space[first] & (placed.ends > begin)
    is_whole = (placed.starts >= begin) & (placed.ends <= end)
    starts, ends = np.clip(placed.starts, begin, end), np.clip(placed.ends, begin, end)
    shift = common[first] - begin
    return Placed(
        placed.index[is_inside],
        (starts + shift)[is_inside],
        (ends + shift)[is_inside],
        (placed.is_sure & (is_whole | (is_spaced & (placed.ends <= end))))[is_inside],
        (placed.is_own & is_whole)[is_inside],
    )


def _follows_space(text: str, starts: Ints) -> npt.NDArray[np.bool_]:
    return np.array([start > 0 and text[start - 1] == " " for start in starts.tolist()], np.bool_)


def _scored(spans: Spans, student: npt.NDArray[np.bool_], teacher: npt.NDArray[np.bool_]) -> Spans:
    """The spans whose tokens are scored on both sides."""
    is_kept = np.ones(len(spans), np.bool_)
    for flags, firsts, ends in (
        (student, spans.student_firsts, spans.student_ends),
        (teacher, spans.teacher_firsts, spans.teacher_ends),
    ):
        before = np.concatenate([[0], np.cumsum(flags)])
        is_kept &= before[ends] - before[firsts] == ends - firsts
    return Spans(*(getattr(spans, name)[is_kept] for name in Spans.__dataclass_fields__))


def _scored_bytes(record: Record) -> npt.NDArray[np.bool_]:
    """For each byte of the text, whether it is scored."""
    sizes = [len(text.encode("utf-8")) for text, _ in record.segments]
    return np.repeat(np.array([flag for _, flag in record.segments], np.bool_), sizes)


def _byte_places(text: str) -> Ints:
    """The byte at which each character begins, and the end of the text."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    places: Ints = np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)
    return places
