"""Tokenize documents with two tokenizers and find their spans, document by document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stillroom.config.schema import DataConfig
from stillroom.core.errors import ConfigError
from stillroom.data.chat import Span, chat_writer
from stillroom.data.records import Chat, Record, Segments, Tally, Unusable
from stillroom.data.tokenize import Encoded, Encoder, Ints, TokenizedRecord, Tokenizer, byte_places, end_to_end
from stillroom.data.two_tokenizers.align import Coverage, Placed, Spans, common_spans, coverage_of, place_tokens
from stillroom.data.two_tokenizers.token_bytes import TokenBytes

# -- chats -------------------------------------------------------------------------------------------------
#
# Each tokenizer has its own template, so a chat is printed twice; both prints share the contents of the turns.


Range = tuple[int, int, int, int]  # characters [start, end) of the student's text and of the teacher's: equal contents


class ChatPrint(Protocol):
    """A chat writer that can say where the contents stand."""

    def __call__(self, chat: Chat, /) -> tuple[Segments, bool]: ...
    def contents(self, chat: Chat) -> list[tuple[tuple[int, bool], Span]]: ...


@dataclass(frozen=True)
class OtherChat:
    """A chat as the teacher's template prints it, and the contents that both prints have."""

    segments: Segments
    has_template: bool
    ranges: tuple[Range, ...]


@dataclass
class PairedChats:
    """A chat writer that returns the student's print and keeps the teacher's, by the key of the record."""

    student: ChatPrint
    teacher: ChatPrint
    tally: Tally
    train_on_prompt: bool = False
    others: dict[str, OtherChat | None] = field(default_factory=dict)

    def __call__(self, chat: Chat) -> tuple[Segments, bool]:
        segments, has_template = self.student(chat)
        if chat.key not in self.others:
            self.others[chat.key] = self._other(chat, segments)
        return segments, has_template

    def _other(self, chat: Chat, segments: Segments) -> OtherChat | None:
        try:
            other, has_template = self.teacher(chat)
            places = self.student.contents(chat), self.teacher.contents(chat)
        except Unusable:
            self.tally.counters["unpaired_chats"] += 1
            return None
        texts = ("".join(text for text, _ in segments), "".join(text for text, _ in other))
        if self.train_on_prompt:
            other = tuple((text, True) for text, _ in other)
        ranges = tuple(shared_ranges(*places, *texts))
        self.tally.counters["unpaired_turns"] += len(places[0]) - len(ranges)
        return OtherChat(other, has_template, ranges)

    def paired(self, record: Record) -> tuple[Record, tuple[Range, ...]] | None:
        """The record as the teacher reads it, with the ranges that are the same; None where there is none."""
        if record.key not in self.others:
            return record, ((0, len(record.text), 0, len(record.text)),)
        other = self.others[record.key]
        if other is None:
            return None
        return Record(record.id, other.segments, record.key, record.group, other.has_template), other.ranges


def shared_ranges(
    student: Sequence[tuple[tuple[int, bool], Span]],
    teacher: Sequence[tuple[tuple[int, bool], Span]],
    student_text: str,
    teacher_text: str,
) -> list[Range]:
    """The contents that both prints have, without the white space around them, which templates strip or keep."""
    theirs: dict[tuple[int, bool], list[Span]] = {}
    for name, span in teacher:
        theirs.setdefault(name, []).append(_core(teacher_text, span))
    ranges: list[Range] = []
    for name, span in student:
        start, end = _core(student_text, span)
        waiting = theirs.get(name, [])
        if waiting and teacher_text[slice(*waiting[0])] == student_text[start:end] and start < end:
            ranges.append((start, end, *waiting.pop(0)))
    ranges.sort()
    return [one for place, one in enumerate(ranges) if not place or one[2] >= ranges[place - 1][3]]


def _core(text: str, span: Span) -> Span:
    start, end = span
    inside = text[start:end]
    return start + len(inside) - len(inside.lstrip()), end - len(inside) + len(inside.rstrip())


# -- documents in the tokens of two models -----------------------------------------------------------------
#
# The teacher's tokens are separate flat arrays, document by document like the student's. Each row of the student is
# paired with a row of the teacher: the tokens of the same stretch of text. A span is in a pair of rows if all its
# tokens are targets in both, so that both models give each a probability.
#
# # T tokens of the student, S spans, P pieces of rows


@dataclass(frozen=True)
class Beside:
    """For each piece of the student's rows, what the teacher reads there. [P] each.

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
        """What the teacher reads at the student's pieces `starts` to `ends`. `bounds` are the student's documents.

        A piece that begins with its document has the teacher's from its beginning; one that begins inside has the
        teacher's tokens from the span of its first token on, which is not a target there either.
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


# -- encoding ----------------------------------------------------------------------------------------------


_BATCH = 256  # documents whose records are held at once, tokenized on both sides


@dataclass(frozen=True)
class TwoTokenizers:
    """The tables of both sides, made once for a run. Raise `ConfigError` if one cannot be used."""

    student: Tokenizer
    teacher: Tokenizer

    @cached_property
    def tables(self) -> tuple[TokenBytes, TokenBytes]:
        return TokenBytes.of(self.student, "student"), TokenBytes.of(self.teacher, "teacher")


@dataclass(frozen=True, kw_only=True)
class PairEncoder(Encoder):
    """An `Encoder` of the student's tokens that keeps the teacher's with them, in `Encoded.paired`.

    `covered` collects the coverage of all that was encoded.
    """

    two: TwoTokenizers
    chats: PairedChats
    covered: list[Coverage] = field(default_factory=list)

    @staticmethod
    def make(two: TwoTokenizers, config: DataConfig, tally: Tally) -> PairEncoder:
        """Make an encoder for both tokenizers. Raise `ConfigError` for one that cannot be used, before data is read."""
        _ = two.tables
        printers = chat_writer(two.student, tally, config), chat_writer(two.teacher, Tally(), config)
        chats = PairedChats(*printers, tally, train_on_prompt=config.train_on_prompt)
        return PairEncoder(two.student, tally, config.bos, keeps_places=True, two=two, chats=chats)

    def __call__(self, records: Sequence[Record]) -> Encoded:
        self.note_limits()
        if named := next((record.id for record in records if record.context is not None), None):
            raise ConfigError(
                "records have teacher_messages or teacher_prompt, which is for models with one tokenizer",
                where=named,
                advice=["leave the columns out: data.columns names the ones to read", "take a teacher of the family"],
            )
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
        """Note the coverage, and pad the teacher's rows as its tokenizer does."""
        assert encoded.paired is not None
        self.covered.append(encoded.paired.coverage)
        marks = (self.two.teacher.pad_token_id, self.two.teacher.eos_token_id)
        pad = next((one for one in marks if one is not None), 0)
        return replace(encoded, paired=replace(encoded.paired, pad_id=int(pad)))

    def documents(
        self, records: Sequence[Record]
    ) -> Iterator[tuple[TokenizedRecord, TokenizedRecord, Spans, Coverage]]:
        """Each record in the tokens of both, its spans, numbered from its own first tokens, and their coverage."""
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

    def judged(self, least: float) -> Coverage:
        """Note the coverage of all documents. Raise if it is below `least`."""
        coverage = sum(self.covered, Coverage())
        for note in (coverage_note(coverage), *shorter_notes(coverage)):
            self.tally.note(note)
        if coverage.num_bytes and (coverage.share < least or not coverage.num_spans):
            raise ConfigError(
                f"the tokenizers of teacher and student read {coverage.share:.1%} of the text as the same bytes: "
                f"{coverage.left_out:,} of {coverage.num_bytes:,} bytes are dropped or changed by one of them",
                where="teacher.model, student.model",
                advice=[
                    "use a teacher or a student whose tokenizer keeps every byte, as byte-level BPE does",
                    f"accept less with --set data.min_coverage={max(coverage.share - 0.01, 0.0):.2f}",
                ],
            )
        return coverage


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
    bytes_at = [byte_places(text) for text in texts]
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


# -- notes about the coverage ------------------------------------------------------------------------------


_SHORT = 2.0  # tokens of the student in a span: terms on spans helped at 1.4, and harmed a student of characters


def coverage_note(coverage: Coverage) -> str:
    """One line for the log."""
    per_span = [tokens / max(coverage.num_spans, 1) for tokens in (coverage.student_tokens, coverage.teacher_tokens)]
    return (
        f"two tokenizers: {coverage.share:.1%} of {coverage.num_bytes:,} bytes are in spans that both have, "
        f"{coverage.one_to_one_share:.1%} in spans of one token each, {coverage.left_out:,} bytes are left out; "
        f"{per_span[0]:.2f} tokens of the student and {per_span[1]:.2f} of the teacher in a span"
    )


def shorter_notes(coverage: Coverage) -> list[str]:
    """A warning where the student's tokens are much shorter than the teacher's.

    A teacher that has just ended a token knows that no longer token came: after "th" it expects no "e". A student of
    characters does not know where the teacher's tokens end, and would learn that "e" is rare after "th".
    """
    per_span = coverage.student_tokens / max(coverage.num_spans, 1)
    if per_span < _SHORT:
        return []
    return [
        f"the student's tokens are much shorter than the teacher's, {per_span:.2f} in a span: what the teacher knows "
        "by where its own tokens end, the student cannot know, and learns it wrong. compare with objectives.ce "
        "alone before you rely on it"
    ]
