"""Spans: the smallest groups of tokens on two sides that cover the same bytes.

Both sides have clean cuts, at which no token is inside. Between two neighbouring cuts that both have, the tokens of
each side stand for the same stretch of bytes. It is a span if both sides cover all of it with tokens that are sure;
otherwise its bytes are left out and counted. Nothing is moved to make it fit.

# A, B tokens of the two sides, S spans
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import IGNORED, Batch
from stillroom.data.tokenize import byte_places
from stillroom.data.two_tokenizers.token_bytes import Bytes, Ints, TokenBytes

# -- the same beginning of a text for both models ----------------------------------------------------------


_PROMPT_TOKENS = 32  # of plain text, in the student's tokens; a short text is cut in the middle


@dataclass(frozen=True)
class CommonPrompt:
    """The same beginning for both models."""

    student: list[int]
    teacher: list[int]
    opens_answer: bool  # a prompt ends here: white space before the answer is the template's


def common_prompt(row: Batch, *, opens_document: bool = True) -> CommonPrompt | None:
    """The tokens of student and teacher before one span of a row of one; None where there is no span to cut at.

    A record with a prompt is cut where its answer begins. A row that begins inside of its document is read from its
    first span on. Nothing is tokenized again: both models are given the tokens that they would read in the whole text.
    """
    if row.other is None or row.spans is None or row.other.spans is None:
        return None
    spans, targets, theirs = row.spans[0].tolist(), row.targets[0].tolist(), row.other.spans[0].tolist()
    begins = [place for place, span in enumerate(spans) if span >= 0 and (not place or spans[place - 1] != span)]
    if not begins:
        return None
    opens_answer = opens_document and targets[0] == IGNORED
    wanted = begins[0] if opens_answer else min(_PROMPT_TOKENS, begins[-1] // 2)
    first = 0 if opens_document else begins[0] + 1  # the target at a position is the token after it
    place = next((one for one in begins if one >= max(wanted, first)), begins[-1])
    their_first = 0 if opens_document else theirs.index(spans[begins[0]]) + 1
    ours = row.input_ids[0, first : place + 1].tolist()
    told = row.other.input_ids[0, their_first : theirs.index(spans[place]) + 1].tolist()
    return CommonPrompt(ours, told, opens_answer) if ours and told else None


# -- where the tokens of a text are in its bytes -----------------------------------------------------------
#
# If the tokens' own bytes are the text, or a space and the text, their places follow by addition. Otherwise the
# tokenizer has changed the text (lower case, NFKC, dropped spaces, unknown characters): then the offsets that it
# reports say where to look, and a group of tokens has a place only if its own bytes stand there. A token that cannot
# be verified keeps the range it claims and is not sure: no span may hold it.
#
# # N tokens, G groups of tokens whose claims overlap, X bytes of the text


Flags = npt.NDArray[np.bool_]
_SPACE = 0x20
_WHITE = np.zeros(256, np.bool_)
_WHITE[[0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20]] = True


@dataclass(frozen=True)
class Placed:
    """Tokens in reading order. Starts and ends never fall; sure tokens do not overlap."""

    index: Ints  # [N], number of the token in its document
    starts: Ints  # [N], in bytes
    ends: Ints  # [N]
    is_sure: Flags  # [N], its own bytes are the text's at this place, but for a space that is invented or implied
    is_own: Flags  # [N], its own bytes are exactly the text's

    @staticmethod
    def none() -> Placed:
        nothing = np.zeros(0, np.int64)
        return Placed(nothing, nothing, nothing, nothing != 0, nothing != 0)

    def shifted(self, num_bytes: int, num_tokens: int) -> Placed:
        return replace(self, index=self.index + num_tokens, starts=self.starts + num_bytes, ends=self.ends + num_bytes)


def place_tokens(text: str, ids: Ints, offsets: tuple[Ints, Ints], table: TokenBytes) -> Placed:
    """Find the bytes of each token. `offsets` are the characters [start, end) that the tokenizer reports."""
    try:
        whole = np.frombuffer(text.encode("utf-8"), np.uint8)
    except UnicodeEncodeError as error:
        raise DataError(f"a text holds half of a surrogate pair, which has no bytes: {error.reason}") from error
    if not len(ids):
        return Placed.none()
    own, sizes = table.spelled(ids)
    if table.is_known[ids].all() and not table.implies_spaces:
        if np.array_equal(own, whole):
            return _added_up(sizes, 0)
        if len(own) == len(whole) + 1 and own[0] == _SPACE and np.array_equal(own[1:], whole):
            return _added_up(sizes, 1)
    claims = _byte_claims(text, *offsets)
    return _Groups(whole, own, sizes, claims, table.is_known[ids]).placed(text if table.implies_spaces else None)


def _added_up(sizes: Ints, num_invented: int) -> Placed:
    """Tokens whose bytes are the text, after `num_invented` bytes that are not."""
    ends = np.cumsum(sizes)
    is_own = ends - sizes >= num_invented
    ends = np.maximum(ends - num_invented, 0)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return Placed(np.arange(len(sizes)), starts, ends, np.ones(len(sizes), np.bool_), is_own)


def _byte_claims(text: str, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Character offsets as byte offsets; ends never fall."""
    places = byte_places(text)
    ends = np.maximum.accumulate(np.maximum(ends, starts)) if len(ends) else ends
    return places[starts], places[ends]


class _Groups:
    """Tokens grouped where their claims overlap, compared with the text as groups."""

    def __init__(self, whole: Bytes, own: Bytes, sizes: Ints, claims: tuple[Ints, Ints], is_known: Flags) -> None:
        starts, ends = claims
        earliest = np.minimum.accumulate(starts[::-1])[::-1]  # a later token may reach back
        reached = np.concatenate([[0], ends[:-1]])
        is_first = earliest >= reached
        is_first[:1] = True
        self._group = np.cumsum(is_first) - 1  # [N]
        firsts = np.flatnonzero(is_first)
        self._whole, self._own, self._token_sizes = whole, own, sizes
        self._before = np.cumsum(sizes) - sizes  # own bytes before each token
        self.starts, self.ends = earliest[firsts], ends[np.append(firsts[1:], len(ends)) - 1]
        self.sizes = np.add.reduceat(sizes, firsts)
        self._own_starts = self._before[firsts]
        self._is_known = np.logical_and.reduceat(is_known, firsts)
        self._white_before = np.concatenate([[0], np.cumsum(_WHITE[whole])])
        padded = np.append(own, np.uint8(0))  # a group without bytes may stand at the end
        self._leads = (padded[self._own_starts] == _SPACE) & (self.sizes > 0)

    def placed(self, text: str | None) -> Placed:
        """`text` is given where words imply the spaces before them."""
        core, invented, is_sure = self._cores()
        sizes = self.sizes - invented
        ends = np.where(is_sure, core + sizes, self.ends)
        core = np.where(is_sure, core, self.starts)
        implied = self._implied(text, core, ends, is_sure) if text is not None else np.zeros(len(core), np.bool_)
        group = self._group
        inside = np.maximum(self._before - self._own_starts[group] - invented[group], 0)
        token_ends = self._before + self._token_sizes - self._own_starts[group] - invented[group]
        sure = is_sure[group]
        starts = np.where(sure, core[group] + inside, core[group])
        stops = np.where(sure, core[group] + np.maximum(token_ends, 0), ends[group])
        opens = np.concatenate([[True], group[1:] != group[:-1]])
        touched = (implied[group] & opens) | (invented[group] > self._before - self._own_starts[group])
        starts = starts - (implied[group] & opens)
        return Placed(np.arange(len(group)), starts, stops, sure, sure & ~touched)

    def _cores(self) -> tuple[Ints, Ints, Flags]:
        """Where each group's own bytes stand, how many of them (0 or 1) are an invented space, and which are found."""
        none = np.zeros(len(self.starts), np.int64)
        reached = np.concatenate([[0], self.ends[:-1]])
        before = np.where(self.starts > 0, self._whole[np.maximum(self.starts - 1, 0)], 0) if len(self._whole) else none
        takes_space = self._leads & (before == _SPACE) & (self.starts - 1 >= reached)
        whites = self._first_dark(self.starts) - self.starts
        tries = (
            (self.starts, none, np.ones(len(none), np.bool_)),
            (self.starts - 1, none, takes_space),
            (self.starts, none + 1, self._leads),
            (self.starts + whites, none, whites > 0),
        )
        core, invented, is_sure = self.starts.copy(), none.copy(), np.zeros(len(none), np.bool_)
        for begin, skipped, is_tried in tries:
            found = is_tried & ~is_sure & self._is_known & self._matches(begin, skipped)
            core, invented = np.where(found, begin, core), np.where(found, skipped, invented)
            is_sure |= found
        return core, invented, is_sure

    def _matches(self, begin: Ints, skipped: Ints) -> Flags:
        """Whether the own bytes after `skipped` stand at `begin`, and the rest of the claim is white space."""
        sizes = self.sizes - skipped
        ends = begin + sizes
        fits = (sizes >= 0) & (begin >= 0) & (ends <= self.ends)
        begin, sizes = np.where(fits, begin, 0), np.where(fits, sizes, 0)
        total = np.cumsum(sizes)
        inside = np.arange(int(total[-1]) if len(total) else 0) - np.repeat(total - sizes, sizes)
        group = np.repeat(np.arange(len(sizes)), sizes)
        differs = self._whole[begin[group] + inside] != self._own[self._own_starts[group] + skipped[group] + inside]
        num_different = np.bincount(group[differs], minlength=len(sizes))
        ends = np.where(fits, ends, 0)
        rest = self.ends - ends
        is_white = self._white_before[self.ends] - self._white_before[ends] == rest
        matches: Flags = fits & (num_different == 0) & is_white
        return matches

    def _first_dark(self, places: Ints) -> Ints:
        """The first byte at or after each place that is not white space."""
        dark = np.append(np.flatnonzero(~_WHITE[self._whole]), len(self._whole))
        return dark[np.searchsorted(dark, places)]

    def _implied(self, text: str, core: Ints, ends: Ints, is_sure: Flags) -> Flags:
        """The groups before which a single space between two words was dropped.

        Both neighbours must be letters or digits that the tokenizer would otherwise have read as one word: before and
        after punctuation, and between ideographs, the tokens are the same with and without the space.
        """
        reached = np.concatenate([[0], ends[:-1]])
        is_gap = is_sure & (core - reached == 1) & (core > 1)
        is_gap[1:] &= is_sure[:-1]
        places = np.maximum(core, 2)
        if not len(self._whole) or not is_gap.any():
            return np.zeros(len(core), np.bool_)
        is_gap &= self._whole[np.minimum(places - 1, len(self._whole) - 1)] == _SPACE
        is_gap[:1] = False
        is_word = _word_bytes(text)
        last = len(is_word) - 1
        implied: Flags = is_gap & is_word[np.minimum(places - 2, last)] & is_word[np.minimum(core, last)]
        return implied


def _word_bytes(text: str) -> Flags:
    """For each byte, whether its character is a letter or a digit of a script that writes words apart."""
    distinct, place = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    is_word = np.array([chr(point).isalnum() and not _is_ideograph(point) for point in distinct.tolist()], np.bool_)
    of_bytes: Flags = np.repeat(is_word[place], np.diff(byte_places(text)))
    return of_bytes


def _is_ideograph(point: int) -> bool:
    return 0x2E80 <= point <= 0x9FFF or 0xF900 <= point <= 0xFAFF or 0x20000 <= point <= 0x3FFFF


# -- spans -------------------------------------------------------------------------------------------------


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


# -- the tokens of one vocabulary in those of another ------------------------------------------------------
#
# Marks (begin, end, padding, unknown) are matched by their role, because their names differ. Any other token is one
# token of the same bytes where there is one. Otherwise it is cut as the other tokenizer cuts it inside of a text;
# where that tokenizer has no text for the bytes (half a character) or changes them, the longest tokens that fit are
# taken from the left. A token that cannot be spelled at all has no pieces.
#
# # V ids of the wanted vocabulary


# What a mark of the wanted vocabulary takes, the first that there is. Models without a begin mark begin with the end
# mark, and models without padding are padded with it.
_ROLES = {"bos": ("bos", "eos"), "eos": ("eos", "bos"), "pad": ("pad", "eos", "unk"), "unk": ("unk",)}
# Put before a token, so that a tokenizer which marks the beginning of a text does not mark the token.
_ANCHORS = ("", "\n", ".", "a")


@dataclass(frozen=True)
class Pieces:
    """Which tokens of the held vocabulary each token of the wanted one consists of."""

    tokens: tuple[tuple[int, ...], ...]  # [V]
    is_token: tuple[bool, ...]  # [V], False for ids that the tokenizer does not use
    num_marks: int  # matched by role

    @property
    def num_copied(self) -> int:
        return sum(len(one) == 1 for one in self.tokens) - self.num_marks

    @property
    def num_averaged(self) -> int:
        return sum(len(one) > 1 for one in self.tokens)

    @property
    def num_unspelled(self) -> int:
        return sum(not one and is_token for one, is_token in zip(self.tokens, self.is_token, strict=True))


def by_bytes(table: TokenBytes) -> dict[bytes, int]:
    """The ordinary token of each byte string; of a character and <0xNN> the character."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for token in np.flatnonzero(table.is_known & ~table.is_special & (table.sizes > 0)).tolist():
        found[table.bytes_of(token)].append(token)
    return {spelled: min(ids, key=lambda one: (table.is_byte[one], one)) for spelled, ids in found.items()}


def pieces_of(wanted: Any, held: Any) -> Pieces:
    """The tokens of the tokenizer `wanted` in those of `held`. Raise where tokens do not say which bytes they are."""
    tables = TokenBytes.of(wanted, "teacher"), TokenBytes.of(held, "student")
    for table, role in zip(tables, ("teacher", "student"), strict=True):
        if table.implies_spaces:
            raise ConfigError(
                f"tokens of the {role} stand for a word with or without the space before it: they cannot be compared "
                "by their bytes",
                where="student.vocabulary",
                advice=["teach across tokenizers: --preset cross-tokenizer"],
            )
    spelling, known = tables[0], by_bytes(tables[1])
    marks = _marks(wanted, held)
    spelled = {token: spelling.bytes_of(token) for token in np.flatnonzero(spelling.is_known).tolist()}
    spelled = {token: text for token, text in spelled.items() if text and token not in marks}
    found: dict[int, tuple[int, ...]] = {token: (known[text],) for token, text in spelled.items() if text in known}
    rest = {token: text for token, text in spelled.items() if token not in found}
    cut = _cut(held, tables[1], sorted(set(rest.values())))
    longest = max(map(len, known), default=0)
    found |= {token: cut.get(text) or _longest_first(text, known, longest) for token, text in rest.items()}
    found |= {token: (own,) for token, own in marks.items()}
    num_ids = len(spelling.sizes)
    used = set(wanted.get_vocab().values())
    return Pieces(
        tuple(found.get(token, ()) for token in range(num_ids)),
        tuple(token in used for token in range(num_ids)),
        len(marks),
    )


def _marks(wanted: Any, held: Any) -> dict[int, int]:
    """The marks of the wanted vocabulary, and the held one's of the same role. The end mark comes first: it may be
    the padding too."""
    found: dict[int, int] = {}
    for role in ("eos", "bos", "unk", "pad"):
        token = getattr(wanted, f"{role}_token_id", None)
        own = [getattr(held, f"{one}_token_id", None) for one in _ROLES[role]]
        taken = next((one for one in own if one is not None), None)
        if token is not None and taken is not None:
            found.setdefault(int(token), int(taken))
    return found


def _cut(held: Any, table: TokenBytes, wanted: Sequence[bytes]) -> dict[bytes, tuple[int, ...]]:
    """The tokens that the tokenizer reads these bytes as, where they are a text and its tokens are exactly them."""
    texts = {}
    for one in wanted:
        try:
            texts[one] = one.decode("utf-8")
        except UnicodeDecodeError:
            continue
    found: dict[bytes, tuple[int, ...]] = {}
    for anchor in _ANCHORS:
        left = [one for one in texts if one not in found]
        if not left:
            break
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        answers = held([anchor + texts[one] for one in left], **options)["input_ids"]
        for one, ids in zip(left, answers, strict=True):
            pieces = _ending(list(ids), one, table)
            if pieces:
                found[one] = pieces
    return found


def _ending(ids: list[int], wanted: bytes, table: TokenBytes) -> tuple[int, ...]:
    """The last tokens that are together exactly these bytes; none where no cut is there or one is not known."""
    size = 0
    for first in range(len(ids) - 1, -1, -1):
        if not table.is_known[ids[first]]:
            return ()
        size += int(table.sizes[ids[first]])
        if size >= len(wanted):
            spelled = b"".join(table.bytes_of(one) for one in ids[first:])
            return tuple(ids[first:]) if spelled == wanted else ()
    return ()


def _longest_first(text: bytes, known: dict[bytes, int], longest: int) -> tuple[int, ...]:
    found: list[int] = []
    begin = 0
    while begin < len(text):
        ends = range(min(len(text), begin + longest), begin, -1)
        end = next((end for end in ends if text[begin:end] in known), begin)
        if end == begin:
            return ()
        found.append(known[text[begin:end]])
        begin = end
    return tuple(found)


# -- groups of tokens that say the same about how a text continues -----------------------------------------
#
# Where both models stand at the same byte, a token of one is the beginning of tokens of the other, or begins with
# one. A token and the first piece it is cut into by the other tokenizer are in one group, so a group of the teacher's
# tokens and the group of the student's with the same number stand for the same continuations, and their masses can be
# compared.


@dataclass(frozen=True)
class Groups:
    """The group of every id of both vocabularies. Every group has a token on each side."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    num_groups: int


def token_groups(student: Any, teacher: Any) -> Groups:
    """Join each token with the first piece that the other tokenizer makes of it. Raise as `pieces_of` does."""
    if student.get_vocab() == teacher.get_vocab():
        everyone = tuple(range(max(student.get_vocab().values()) + 1))
        return Groups(everyone, everyone, len(everyone))
    of_student, of_teacher = pieces_of(student, teacher), pieces_of(teacher, student)
    num_student = len(of_student.tokens)
    links = [(own, num_student + cut[0]) for own, cut in enumerate(of_student.tokens) if cut]
    links += [(cut[0], num_student + own) for own, cut in enumerate(of_teacher.tokens) if cut]
    roots = _joined(links, num_student + len(of_teacher.tokens))
    return _numbered(roots, (of_student, of_teacher), int(student.eos_token_id or 0))


def _joined(links: list[tuple[int, int]], size: int) -> list[int]:
    """The root of every node after all links are made."""
    parents = list(range(size))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for one, other in links:
        first, second = sorted((root(one), root(other)))
        parents[second] = first
    return [root(node) for node in range(size)]


def _numbered(roots: list[int], pieces: tuple[Pieces, Pieces], end_mark: int) -> Groups:
    """Groups from 0 on. Ids that nothing spells are one group, or join the end mark's where one side has none."""
    num_student = len(pieces[0].tokens)
    sides = roots[:num_student], roots[num_student:]
    shared = set(sides[0]) & set(sides[1])
    is_odd = [[one not in shared for one in side] for side in sides]
    numbers = {one: number for number, one in enumerate(sorted(shared))}
    rest = numbers.get(roots[end_mark], 0)
    if all(any(side) for side in is_odd):
        rest = len(numbers)
    student, teacher = (tuple(numbers.get(one, rest) for one in side) for side in sides)
    return Groups(student, teacher, max(*student, *teacher) + 1)
