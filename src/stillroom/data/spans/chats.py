"""Chats printed twice: each tokenizer has its own template, and the contents of the turns are what both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stillroom.data.alignment import Span
from stillroom.data.records import Record, Segments, Tally, Turn, Unusable, chat_key

Range = tuple[int, int, int, int]  # characters [start, end) of the student's text and of the teacher's: equal contents


class ChatPrint(Protocol):
    """A chat writer that can say where the contents stand."""

    def __call__(self, turns: tuple[Turn, ...], /) -> tuple[Segments, bool]: ...
    def contents(self, turns: tuple[Turn, ...]) -> list[tuple[tuple[int, bool], Span]]: ...


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

    def __call__(self, turns: tuple[Turn, ...]) -> tuple[Segments, bool]:
        segments, has_template = self.student(turns)
        key = chat_key(turns)
        if key not in self.others:
            self.others[key] = self._other(turns, segments)
        return segments, has_template

    def _other(self, turns: tuple[Turn, ...], segments: Segments) -> OtherChat | None:
        try:
            other, has_template = self.teacher(turns)
            places = self.student.contents(turns), self.teacher.contents(turns)
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
