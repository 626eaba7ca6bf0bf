"""Find where the turns of a chat stand in the text that a template prints.

Do not search for an answer's words: the question may contain them. Print the chat a second time with marks
(private-use characters, each used once) in the contents. If removing the marks gives the first print, the marks show
where the contents are. If not, try other places for the marks; what cannot be aligned is not scored.

A template may cut a content at tags (the thought up to `</think>`), strip it, or test how it begins. So mark
contents in stretches between the tags that appear in the template's source, first with the white space at a stretch's
ends inside the marks, then outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from stillroom.data.records import Turn, is_blank
from stillroom.data.template import ChatPrinter

_TAG = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]")
_ATOM = re.compile(r"<[^<>\s]{1,60}>|\[[^\[\]\s]{1,60}\]|\w+|\s+|.", re.DOTALL)
_FIRST_MARK, _LAST_MARK = 0xF0000, 0x10FFFD  # private-use code points

Span = tuple[int, int]  # characters [start, end) of the printed chat


@dataclass(frozen=True)
class Stretch:
    """A part of a turn's content, or of its thought, between two marks."""

    turn: int
    opens: str
    closes: str
    is_thought: bool = False
    is_final: bool = False  # only tags and white space follow it in the content
    lead: str = ""  # the tags before it, if the content begins with them


@dataclass(frozen=True)
class Place:
    stretch: Stretch
    start: int
    end: int


@dataclass(frozen=True)
class Aligned:
    """A printed chat and the places of its turns."""

    whole: str
    places: tuple[Place, ...]  # in reading order
    marked: tuple[Turn, ...]  # the turns with marks, to print parts of the chat again
    stretches: tuple[Stretch, ...]
    marks: frozenset[str]
    marks_everyone: bool
    is_in_parts: bool  # contents were passed to the template as lists of parts
    generated: tuple[Span, ...] | None  # what the template itself marks as generated

    def of_turn(self, turn: int) -> list[Place]:
        return [place for place in self.places if place.stretch.turn == turn]

    @property
    def printed_turns(self) -> set[int]:
        return {place.stretch.turn for place in self.places}

    def before(self, start: int) -> int:
        """The end of the marked text before `start`."""
        return max((place.end for place in self.places if place.end <= start), default=0)

    def after(self, end: int) -> int:
        """The start of the marked text after `end`, or the end of the chat."""
        return min((place.start for place in self.places if place.start >= end), default=len(self.whole))


def messages_of(turns: Sequence[Turn], *, in_parts: bool) -> list[dict[str, object]]:
    """Turns as the messages a template takes. A thought is passed under both names in use."""
    messages: list[dict[str, object]] = []
    for turn in turns:
        content: object = [{"type": "text", "text": turn.content}] if in_parts else turn.content
        thought = {"reasoning_content": turn.thought, "thinking": turn.thought} if turn.thought else {}
        messages.append({"role": turn.role, "content": content, **thought})
    return messages


def align(printer: ChatPrinter, turns: Sequence[Turn], whole: str, *, in_parts: bool) -> Iterator[Aligned]:
    """Yield each way to mark the turns that leaves the printed chat unchanged, the most exact first."""
    tags = set(_TAG.findall(printer.source))
    tried: list[tuple[Turn, ...]] = []
    for marks_everyone, left, right in product((True, False), (True, False), (True, False)):
        marks = _free_marks([printer.source, whole, *(turn.content + turn.thought for turn in turns)])
        generation = (next(marks, ""), next(marks, ""))
        writer = _Marker(tags, marks, is_outer=(left, right))
        marked = tuple(
            writer.marked(number, turn) if marks_everyone or turn.role == "assistant" else turn
            for number, turn in enumerate(turns)
        )
        if marked in tried:
            continue
        tried.append(marked)
        printed = printer.try_print(messages_of(marked, in_parts=in_parts), generation_marks=generation)
        if printed is None:
            continue
        used = frozenset(generation) | {m for stretch in writer.stretches for m in (stretch.opens, stretch.closes)}
        unmarked, positions = _without_marks(printed, used)
        if unmarked == whole:
            yield Aligned(
                whole,
                tuple(_places(writer.stretches, positions)),
                marked,
                tuple(writer.stretches),
                used,
                marks_everyone,
                in_parts,
                _generated(positions, generation) if printer.has_generation_marks else None,
            )


def generated_spans(printer: ChatPrinter, turns: Sequence[Turn]) -> tuple[Span, ...]:
    """The spans that the template marks with `{% generation %}`; empty if it marks none."""
    marks = _free_marks([printer.source, *(turn.content + turn.thought for turn in turns)])
    generation = (next(marks), next(marks))
    printed = printer.try_print(messages_of(turns, in_parts=False), generation_marks=generation)
    return () if printed is None else _generated(_without_marks(printed, frozenset(generation))[1], generation)


def after_mark(printed: str, mark: str, marks: frozenset[str]) -> str | None:
    """The text after the last `mark` in a marked print, with all marks removed; None without such a mark."""
    _, separator, after = printed.rpartition(mark)
    return _without_marks(after, marks)[0] if separator else None


def common_start(left: str, right: str) -> str:
    """The common prefix of two texts in whole words and tags: `<|end|>` and `<|endoftext|>` share nothing."""
    shared = ""
    for one, other in zip(_ATOM.findall(left), _ATOM.findall(right), strict=False):
        if one != other:
            break
        shared += one
    return shared


# -- marks -----------------------------------------------------------------------------------------------


def _free_marks(texts: Iterable[str]) -> Iterator[str]:
    taken = {character for text in texts for character in text if ord(character) >= _FIRST_MARK}
    return (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in taken)


class _Marker:
    """Put marks into turns. `is_outer`: whether white space at the (left, right) end of a content is inside them."""

    def __init__(self, tags: set[str], marks: Iterator[str], *, is_outer: tuple[bool, bool]) -> None:
        self._tags = tags
        self._marks = marks
        self._is_outer = is_outer
        self.stretches: list[Stretch] = []

    def marked(self, number: int, turn: Turn) -> Turn:
        thought = self._stretch(Stretch(number, "", "", is_thought=True), turn.thought, (False, False))
        return replace(turn, thought=thought, content=self._content(number, turn.content))

    def _content(self, number: int, content: str) -> str:
        parts = self._parts(content)
        filled = [place for place, part in enumerate(parts) if not is_blank(part) and part not in self._tags]
        if not filled:
            return self._stretch(Stretch(number, "", "", is_final=True), content, (False, False))
        for place in filled:
            is_final = place == filled[-1]
            lead = "".join(parts[:place]).strip() if place == filled[0] else ""
            stretch = Stretch(number, "", "", is_final=is_final, lead=lead)
            parts[place] = self._stretch(stretch, parts[place], self._is_outer if is_final else (False, False))
        return "".join(parts)

    def _parts(self, content: str) -> list[str]:
        """The content cut around the tags that appear in the template's source."""
        parts: list[str] = [""]
        for piece in re.split(f"({_TAG.pattern})", content):
            if piece in self._tags:
                parts += [piece, ""]
            else:
                parts[-1] += piece
        return parts

    def _stretch(self, stretch: Stretch, text: str, is_outer: tuple[bool, bool]) -> str:
        core = text.strip()
        if is_blank(core):
            return text
        stretch = replace(stretch, opens=next(self._marks, ""), closes=next(self._marks, ""))
        self.stretches.append(stretch)
        start = 0 if is_outer[0] else text.index(core)
        end = len(text) if is_outer[1] else text.index(core) + len(core)
        return text[:start] + stretch.opens + text[start:end] + stretch.closes + text[end:]


def _without_marks(printed: str, marks: frozenset[str]) -> tuple[str, dict[str, list[int]]]:
    """The print without marks, and the positions of each mark in it."""
    positions: dict[str, list[int]] = {}
    pieces: list[str] = []
    cursor = length = 0
    for match in _MARKS.finditer(printed):
        if match[0] not in marks:  # a private-use character of the text itself
            continue
        pieces.append(printed[cursor : match.start()])
        length += match.start() - cursor
        positions.setdefault(match[0], []).append(length)
        cursor = match.end()
    return "".join([*pieces, printed[cursor:]]), positions


_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


def _places(stretches: Sequence[Stretch], positions: dict[str, list[int]]) -> list[Place]:
    """The places of the stretches that are printed whole and exactly once."""
    places = []
    for stretch in stretches:
        starts, ends = positions.get(stretch.opens, []), positions.get(stretch.closes, [])
        if len(starts) == len(ends) == 1 and starts[0] <= ends[0]:
            places.append(Place(stretch, starts[0], ends[0]))
    return sorted(places, key=lambda place: place.start)


def _generated(positions: dict[str, list[int]], marks: tuple[str, str]) -> tuple[Span, ...]:
    return tuple(zip(positions.get(marks[0], []), positions.get(marks[1], []), strict=False))
