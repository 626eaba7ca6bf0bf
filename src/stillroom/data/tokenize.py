"""Tokenize records, and count the text bytes of each token.

1. The bytes of a document's tokens sum to the length of its text in UTF-8, so bits per byte can be compared between
   tokenizers.
2. The tokens decode to what the tokenizer makes of the whole text; nothing is added or lost between segments.
3. No token holds both scored and unscored text. If one would straddle a border, tokenize the text from the border
   on separately, as a model continues a prompt. If the tokenizer cannot do that, keep the tokens of the whole text;
   the straddling token is counted and not scored.

# T tokens of all documents end to end, D documents
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from stillroom.core.errors import BrokenAtStart, ConfigError, DataError, foreign_errors
from stillroom.core.files import reason_of
from stillroom.data.records import Record, Tally, WrittenTokens, joined, num_before

if TYPE_CHECKING:
    from stillroom.data.two_tokenizers.encode import Paired


# -- tokenized documents as flat arrays, in memory or read from the token store ----------------------------


Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.integer[Any]]  # in as few bytes as they fit into
_CHUNK = 1 << 22  # tokens counted at a time: bounds memory for any number of documents


class Tokens(Protocol):
    """An array [T] that is read by slices: an ndarray, or a stream over files of the token store."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class Contexts:
    """What the teacher reads of each document before its first scored token, where that is not what the student reads.

    Context k is the tokens bounds[k] to bounds[k + 1]; documents may share one.
    """

    ids: npt.NDArray[np.int32]
    bounds: Ints
    numbers: Ints  # [D] the context of each document; -1: the tokens that the student reads
    firsts: Ints  # [D] tokens of the document before its first scored one, which the context replaces

    def of(self, document: int) -> npt.NDArray[np.int32]:
        """The tokens of a document's context; none where it has none."""
        number = int(self.numbers[document])
        return self.ids[self.bounds[number] : self.bounds[number + 1]] if number >= 0 else self.ids[:0]

    @cached_property
    def lengths(self) -> Ints:
        """[D] The tokens of each document's context."""
        return np.where(self.numbers >= 0, np.append(np.diff(self.bounds), 0)[self.numbers], 0)

    @staticmethod
    def made(contexts: Sequence[Sequence[int] | None], firsts: Sequence[int]) -> Contexts:
        """The contexts of documents, equal ones once."""
        table: dict[tuple[int, ...], int] = {}
        numbers = [-1 if ids is None else table.setdefault(tuple(ids), len(table)) for ids in contexts]
        flat = np.array([token for ids in table for token in ids], np.int32)
        bounds = np.cumsum([0, *(len(ids) for ids in table)], dtype=np.int64)
        return Contexts(flat, bounds, np.array(numbers, np.int64), np.array(firsts, np.int64))

    @staticmethod
    def joined(several: Sequence[Encoded]) -> Contexts | None:
        """Those of several collections of documents, one after the other; None where none has any."""
        if all(one.contexts is None for one in several):
            return None
        parts = [one.contexts or Contexts.made([None] * one.num_documents, [0] * one.num_documents) for one in several]
        tokens = np.cumsum([0, *(len(one.ids) for one in parts)])
        seen = np.cumsum([0, *(len(one.bounds) - 1 for one in parts)])
        return Contexts(
            np.concatenate([one.ids for one in parts]),
            np.concatenate([[0], *(one.bounds[1:] + at for one, at in zip(parts, tokens, strict=False))]),
            np.concatenate(
                [np.where(one.numbers < 0, -1, one.numbers + at) for one, at in zip(parts, seen, strict=False)]
            ),
            np.concatenate([one.firsts for one in parts]),
        )


@dataclass(frozen=True)
class Encoded:
    """Documents as flat arrays. Document d is the tokens bounds[d] to bounds[d + 1]."""

    ids: Tokens  # [T], int32
    num_bytes: Tokens  # [T], int32, text bytes of each token
    is_scored: Tokens  # [T], bool
    bounds: Ints  # [D + 1]
    names: Sequence[str]  # D
    groups: Sequence[str]  # D, documents of a group are held out together
    has_prompt: Sequence[bool] | npt.NDArray[np.bool_] = ()  # D, a chat or a prompt with an answer; empty: none is
    paired: Paired | None = None  # the same documents in the teacher's tokens, if it has its own tokenizer
    contexts: Contexts | None = None  # what the teacher alone reads before their first scored tokens

    def __post_init__(self) -> None:
        num_tokens, num_documents = len(self.ids), len(self.names)
        is_whole = len(self.num_bytes) == len(self.is_scored) == num_tokens and len(self.groups) == num_documents
        is_bounded = len(self.bounds) == num_documents + 1 and self.bounds[0] == 0 and self.bounds[-1] == num_tokens
        if not (is_whole and is_bounded and len(self.has_prompt) in (0, num_documents)):
            raise DataError(f"{num_tokens} tokens of {num_documents} documents: the arrays do not belong together")

    @property
    def num_documents(self) -> int:
        return len(self.names)

    @property
    def num_scored(self) -> int:
        return int(self.num_scored_between(np.array([0]), np.array([len(self.ids)]))[0])

    @property
    def prompts(self) -> npt.NDArray[np.bool_]:
        """[D] Which documents are a chat or a prompt with an answer."""
        return np.array(self.has_prompt, np.bool_) if len(self.has_prompt) else np.zeros(self.num_documents, np.bool_)

    def documents_at(self, places: Ints) -> Ints:
        """The document that each token is in."""
        return documents_at(self.bounds, places)

    def num_scored_between(self, begins: Ints, ends: Ints) -> Ints:
        """The number of scored tokens from each begin to its end."""
        return num_true_between(self.is_scored, begins, ends)


def documents_at(bounds: Ints, places: Ints) -> Ints:
    """Find the document that each place is in. Fast if document n has place n, as in rows of whole documents."""
    count = len(places)
    is_guessed = count < len(bounds) and bool((bounds[:count] <= places).all())
    if is_guessed and bool((places < bounds[1 : count + 1]).all()):
        return np.arange(count)
    documents: Ints = np.searchsorted(bounds, places, side="right")
    documents -= 1
    return documents


def num_true_between(flags: Tokens, begins: Ints, ends: Ints) -> Ints:
    """How many flags are set from each begin to its end. Flags before the first begin are not read."""
    low = int(begins.min()) if len(begins) else 0
    counts = _num_true_from(flags, ends, low)
    counts -= _num_true_from(flags, begins, low)
    return counts


def _num_true_from(flags: Tokens, places: Ints, low: int) -> Ints:
    """How many flags are set from `low` to each place."""
    counts = np.zeros(len(places), np.int64)
    if (places[1:] < places[:-1]).any():
        order = np.argsort(places, kind="stable")
        counts[order] = _num_true_from(flags, places[order], low)
        return counts
    seen, high = 0, int(places[-1]) if len(places) else low
    for start in range(low, high, _CHUNK):
        running = np.cumsum(flags[start : min(start + _CHUNK, high)], dtype=np.int64)
        first, last = np.searchsorted(places, [start, start + len(running)], side="right")
        # A place at the start of the chunk has its count from the chunk before; at `low` it is 0.
        counts[first:last] = seen + running[places[first:last] - start - 1]
        seen += int(running[-1])
    return counts


# -- the opening of a document -----------------------------------------------------------------------------
#
# These are the tokens that a tokenizer adds before a text by default.
#
# Most models of the Llama kind were trained with a begin-of-text token (BOS) before each document and answer badly
# without it. Tokenize a short text to learn whether a tokenizer adds one: its class and settings do not tell. An
# opening has no bytes, is never a target, and occurs once in a document.


Bos = Literal["auto"] | bool

_PROBE = "a"


def opening_ids(tokenizer: Tokenizer, wanted: Bos) -> tuple[int, ...]:
    """The tokens that begin a document: usually BOS or none; with some tokenizers two tokens."""
    if wanted is False:
        return ()
    own = _added_before_text(tokenizer)
    if own or wanted == "auto":
        return own
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        raise ConfigError(
            "data.bos is true and the tokenizer has no begin-of-text token",
            where="data.bos",
            advice=[
                "--set data.bos=auto follows the tokenizer's own default",
                "name bos_token in the tokenizer's files",
            ],
        )
    return (int(bos),)


def is_opened(ids: Sequence[int], opening: Sequence[int]) -> bool:
    """Whether the tokens already begin with the opening, as most chat templates print it."""
    return list(ids[: len(opening)]) == list(opening)


def opened(ids: Sequence[int], opening: Sequence[int]) -> list[int]:
    """Put the opening before the tokens unless it is there."""
    return list(ids) if is_opened(ids, opening) else [*opening, *ids]


def opening_note(tokenizer: Tokenizer, wanted: Bos, opening: Sequence[int]) -> str:
    """One line for the log."""
    if not opening:
        why = "data.bos is false" if wanted is False else "the tokenizer adds none by itself"
        return f"documents begin without a begin-of-text token: {why}"
    why = "data.bos is true" if not _added_before_text(tokenizer) else "the tokenizer adds it by itself"
    names = " ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in opening)
    return f"each document begins with {names}: {why}"


def opening_difference(teacher: Any, student: Any, wanted: Bos) -> list[str]:
    """A note if the teacher's tokenizer opens texts differently from the student's, which is used."""
    if wanted != "auto" or _added_before_text(teacher) == _added_before_text(student):
        return []
    theirs, ours = (
        " ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in _added_before_text(tokenizer)) or "nothing"
        for tokenizer in (teacher, student)
    )
    return [
        f"the teacher's tokenizer begins texts with {theirs} and the student's with {ours}: documents begin as the "
        "student's; data.bos = true or false decides for both"
    ]


def _added_before_text(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer adds before a text with its default settings."""
    bare = list(tokenizer([_PROBE], add_special_tokens=False)["input_ids"][0])
    whole = list(tokenizer([_PROBE], add_special_tokens=True)["input_ids"][0])
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    return tuple(int(number) for number in whole[: next(starts, 0)])


# -- tokenizing --------------------------------------------------------------------------------------------


# Put before a continuation, so that a tokenizer that marks the beginning of a text with a space does not mark it.
_ANCHORS = ("\n", "|", ".", "0", "a", "e", "x", "\u4e00")
_BATCH_CHARACTERS = 1 << 20  # bounds memory: offsets are Python tuples


def vocabulary_hash(tokenizer: Any) -> str:
    """A hash of the mapping from tokens to ids."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\t{token}\n".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()[:16]


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that is used here."""

    @property
    def is_fast(self) -> bool: ...
    @property
    def eos_token(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def pad_token_id(self) -> Any: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def special_tokens_map(self) -> Any: ...
    def get_chat_template(self) -> Any: ...
    def __call__(self, text: Any, **options: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


def _tokenizing() -> AbstractContextManager[None]:
    """Turn any error of a tokenizer into ours: its files come from elsewhere, and a text may meet a damaged part."""
    return foreign_errors(
        lambda error: BrokenAtStart(
            f"the tokenizer fails on a text of the data: {reason_of(error)}",
            where=type(error).__name__,
            advice=["get the files of the tokenizer again", "see how it reads them: stillroom data SPEC --model MODEL"],
        )
    )


def spell(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode tokens, special ones included, without any clean-up."""
    with _tokenizing():
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_ends(text: str, offsets: Sequence[tuple[int, int]]) -> Ints:
    """The character at which each token ends. Never decreases; the last is the end of the text.

    A token begins where the previous one ended: characters that the tokenizer skipped belong to the next token, and
    of several tokens inside one character the first holds it and the others are empty.
    """
    ends: Ints = np.array([end for _, end in offsets], dtype=np.int64)
    if len(ends):
        ends[-1] = len(text)
        ends = np.maximum.accumulate(ends)
    return ends


def even_ends(text: str, num_tokens: int) -> Ints:
    """Ends for a tokenizer without offsets: characters divided evenly."""
    return np.arange(1, num_tokens + 1, dtype=np.int64) * len(text) // max(num_tokens, 1)


def byte_places(text: str) -> Ints:
    """The byte of UTF-8 at which each character begins, and the end of the text."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    places: Ints = np.concatenate([[0], np.cumsum(widths)])
    return places


def bytes_between(text: str, ends: Ints) -> npt.NDArray[np.int32]:
    """UTF-8 bytes between consecutive ends; they sum to the length of the text."""
    if not text.isascii():
        ends = byte_places(text)[ends]
    sizes = ends.astype(np.int32)
    sizes[1:] -= ends[:-1].astype(np.int32)
    return sizes


@dataclass(frozen=True)
class _Piece:
    """Tokens of one text, and the tokenizer's start and end character of each.

    Tokens may overlap where a tokenizer marks the beginning of a text: `\u2581` and `qu` both start at 0, and the
    first ends at 1.
    """

    ids: list[int]
    ends: Ints
    starts: Ints

    def straddled(self, borders: Ints) -> Ints:
        """The borders at which no token ends, or that lie inside a token."""
        earliest = np.append(np.minimum.accumulate(self.starts[::-1])[::-1], np.iinfo(np.int64).max)
        is_inside = earliest[np.searchsorted(self.ends, borders, side="right")] < borders
        straddled: Ints = borders[is_inside | ~np.isin(borders, self.ends)]
        return straddled


@dataclass(frozen=True)
class TokenizedRecord:
    """The tokens of one record; none if the tokenizer sees nothing in it."""

    record: Record
    ids: npt.NDArray[np.int32]
    num_bytes: npt.NDArray[np.int32]
    is_scored: npt.NDArray[np.bool_]
    places: tuple[Ints, Ints] | None = None  # characters [start, end) of the tokens of the text, where they are kept
    num_opening: int = 0  # tokens put before those of the text
    has_end_mark: bool = False  # whether a token was put after them
    is_as_written: bool = False  # the tokens are those that a model wrote after its prompt

    @property
    def begins_with_token(self) -> bool:
        """Whether its first scored token begins with the first scored text, and none before holds a part of that."""
        if self.record.context is None or self.is_as_written:
            return True
        first, segments = int(self.is_scored.argmax()), self.record.segments
        return int(self.num_bytes[first:].sum()) == len(joined(segments[num_before(segments) :]).encode("utf-8"))

    @property
    def has_prompt(self) -> bool:
        """Whether the record is a chat or a prompt with an answer, rather than one plain text."""
        return self.record.has_template or len(self.record.segments) > 1


@dataclass(frozen=True)
class Encoder:
    """Tokenize records. What cannot be done exactly is counted or noted in the tally."""

    tokenizer: Tokenizer
    tally: Tally
    bos: Bos = "auto"
    keeps_places: bool = False

    @cached_property
    def opening(self) -> tuple[int, ...]:
        """The tokens that each document begins with."""
        return opening_ids(self.tokenizer, self.bos)

    def __call__(self, records: Sequence[Record]) -> Encoded:
        self.note_limits()
        documents = [document for document in self.tokenized(records) if len(document.ids)]
        self.note_lost(len(records) - len(documents))
        return (
            self._with_contexts(documents) if any(one.context is not None for one in records) else end_to_end(documents)
        )

    def _with_contexts(self, documents: Sequence[TokenizedRecord]) -> Encoded:
        """The documents with what the teacher reads before each. Lost are those whose scored text begins in a token."""
        kept = [one for one in documents if one.begins_with_token]
        self.tally.counters["unaligned_contexts"] += len(documents) - len(kept)
        self.tally.counters["teacher_contexts"] += sum(one.record.context is not None for one in kept)
        contexts: list[Sequence[int] | None] = []
        for one in kept:
            text, is_print = one.record.context, one.record.has_template
            ids = None if text is None else self._pieces([text], keeps_special=is_print)[0].ids
            contexts.append(None if ids is None else opened(ids, self.opening))
        firsts = [int(one.is_scored.argmax()) for one in kept]
        return replace(end_to_end(kept), contexts=Contexts.made(contexts, firsts))

    def found(self, encoded: Encoded) -> Encoded:
        """Documents that were tokenized before, as they are used now."""
        return encoded

    def note_limits(self) -> None:
        """Note what this tokenizer adds to a text and what it cannot do."""
        self.tally.detail(opening_note(self.tokenizer, self.bos, self.opening))
        if not self.tokenizer.is_fast:
            self.tally.note("the tokenizer gives no offsets: bytes are shared evenly over the tokens of a text")
        if self.tokenizer.eos_token_id is None:
            self.tally.note("the tokenizer has no end-of-text token: documents follow each other without a mark")
        elif self._pieces([str(self.tokenizer.eos_token)])[0].ids == [self.tokenizer.eos_token_id]:
            self.tally.note("the tokenizer reads special tokens in plain text: a document may spell one")

    def note_lost(self, num_lost: int) -> None:
        """Count and note documents without tokens."""
        if num_lost:
            self.tally.counters["documents_without_tokens"] += num_lost
            self.tally.note(f"{num_lost:,} documents are left out: the tokenizer sees nothing in them")

    def tokenized(self, records: Sequence[Record]) -> Iterator[TokenizedRecord]:
        """The tokens of each record, in order."""
        for batch in _batches(records):
            pieces = self._pieces([record.text for record in batch], keeps_special=batch[0].has_template)
            for record, piece in zip(batch, pieces, strict=True):
                piece, is_scored = self._bordered(record, piece)
                document = self._finished(record, piece, is_scored)
                yield document if record.tokens is None else self._as_written(document, record.tokens)

    def _bordered(self, record: Record, piece: _Piece) -> tuple[_Piece, npt.NDArray[np.bool_]]:
        """Tokens that end at every segment border where possible, and which of them are scored."""
        if len(record.segments) == 1:
            return piece, np.full(len(piece.ids), record.segments[0][1], np.bool_)
        borders = np.cumsum([len(text) for text, _ in record.segments])
        flags = np.array([is_scored for _, is_scored in record.segments], dtype=np.bool_)
        if not piece.ids:
            return piece, np.empty(0, np.bool_)
        if len(flags) > 1 and not self.tokenizer.is_fast:
            return self._segment_wise(record)
        piece, inner = self._snapped(record.text, piece, borders[:-1])
        straddled = piece.straddled(inner)
        if len(straddled) and (parted := self._cut_at(record, piece, straddled, borders[:-1])):
            piece, straddled = parted, straddled[:0]
        is_scored = flags[np.searchsorted(borders, piece.ends, side="left")]
        if len(straddled):
            holds_both = np.unique(np.searchsorted(piece.ends, straddled, side="right"))
            is_scored[holds_both] = False
            self.tally.counters["straddling_tokens"] += len(holds_both)
        return piece, is_scored

    def _cut_at(self, record: Record, whole: _Piece, straddled: Ints, borders: Ints) -> _Piece | None:
        """Tokenize the text in parts, cut at the straddled borders. None if that changes the text or does not help."""
        for cuts in (straddled, borders):  # the new tokens may straddle another border
            texts = [record.text[start:end] for start, end in itertools.pairwise([0, *cuts, len(record.text)])]
            pieces = [self._pieces(texts[:1], keeps_special=record.has_template)[0]]
            pieces += [self._continued(text, keeps_special=record.has_template) for text in texts[1:]]
            joined = _Piece(
                [token for piece in pieces for token in piece.ids],
                np.concatenate([piece.ends + start for piece, start in zip(pieces, [0, *cuts], strict=True)]),
                np.concatenate([piece.starts + start for piece, start in zip(pieces, [0, *cuts], strict=True)]),
            )
            joined, inner = self._snapped(record.text, joined, borders)
            expected = (spell(self.tokenizer, whole.ids), record.text)
            if not len(joined.straddled(inner)) and spell(self.tokenizer, joined.ids) in expected:
                return joined
        return None

    def _continued(self, text: str, *, keeps_special: bool) -> _Piece:
        """The tokens of a text that continues another; empty if every anchor shares a token with it."""
        for anchor in _ANCHORS:
            piece = self._pieces([anchor + text], keeps_special=keeps_special)[0]
            first = int(np.searchsorted(piece.ends, len(anchor), side="right"))
            if first and not len(piece.straddled(np.array([len(anchor)]))):
                return _Piece(piece.ids[first:], piece.ends[first:] - len(anchor), piece.starts[first:] - len(anchor))
        return _Piece([], np.empty(0, np.int64), np.empty(0, np.int64))

    def _segment_wise(self, record: Record) -> tuple[_Piece, npt.NDArray[np.bool_]]:
        """For a tokenizer without offsets: tokenize ever longer prefixes to find which tokens each segment adds."""
        texts = [text for text, _ in record.segments]
        longer = ["".join(texts[: number + 1]) for number in range(len(texts))]
        grown = [piece.ids for piece in self._pieces(longer, keeps_special=record.has_template)]
        ids, cuts, straddling = grown[-1], [0], []
        for shorter in grown[:-1]:
            shared = num_shared(shorter, ids)
            is_straddled = shared < min(len(shorter), len(ids))  # later text changes earlier tokens
            straddling += [shared] * is_straddled
            cuts.append(max(cuts[-1], shared + is_straddled))
        cuts.append(len(ids))
        starts = np.cumsum([0, *(len(text) for text in texts)])
        spans = list(zip(texts, starts[:-1], np.diff(cuts), strict=True))
        ends = np.concatenate([start + even_ends(text, int(count)) for text, start, count in spans])
        is_scored = np.repeat([flag for _, flag in record.segments], np.diff(cuts))
        is_scored[straddling] = False
        self.tally.counters["straddling_tokens"] += len(straddling)
        return _Piece(ids, ends, ends), is_scored

    def _finished(self, record: Record, piece: _Piece, is_scored: npt.NDArray[np.bool_]) -> TokenizedRecord:
        """Add the opening and the end mark, unless a template wrote them or there is no token.

        The opening has no bytes and is not scored; the end mark has no bytes and is scored.
        """
        if not piece.ids:
            return TokenizedRecord(record, np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.bool_))
        ids, end_mark = piece.ids, self.tokenizer.eos_token_id
        added = () if is_opened(ids, self.opening) else self.opening
        bos = getattr(self.tokenizer, "bos_token_id", None)
        num_opening = len(self.opening) or int(record.has_template and ids[0] == bos)
        is_ended = end_mark is None or (record.has_template and end_mark in ids[num_opening - len(added) :])
        ids = [*added, *ids] if is_ended else [*added, *ids, int(end_mark)]
        own = slice(len(added), len(added) + len(piece.ids))
        num_bytes, flags = np.zeros(len(ids), np.int32), np.ones(len(ids), np.bool_)
        ends = piece.ends.copy()
        ends[-1] = len(record.text)
        num_bytes[own], flags[own] = bytes_between(record.text, ends), is_scored
        num_bytes[:num_opening], flags[:num_opening] = 0, False
        places = (piece.starts, piece.ends) if self.keeps_places else None
        return TokenizedRecord(
            record, np.array(ids, np.int32), num_bytes, flags, places, len(added), has_end_mark=not is_ended
        )

    def _as_written(self, document: TokenizedRecord, tokens: WrittenTokens) -> TokenizedRecord:
        """The document in the tokens that a model wrote, if they are of this vocabulary and spell its text.

        Encoded again a text may be cut into other tokens, and one that was cut at a length would get an end mark.
        """
        record, ids = document.record, [*tokens.prompt, *tokens.answer]
        reason = "unread_ids" if self.keeps_places else ""
        reason = reason or ("ids_of_another_vocabulary" if tokens.vocabulary != self._vocabulary[0] else "")
        if not reason and max(ids) > self._vocabulary[1]:
            raise DataError(
                f"token id {max(ids):,} is not in the vocabulary, whose hash the record has",
                where=record.id,
                advice=["the file is damaged: write it again with stillroom write"],
            )
        with _tokenizing():
            spelled = str(self.tokenizer.decode(list(tokens.answer), skip_special_tokens=True)) if not reason else ""
        if not reason and spelled.strip() not in record.text:
            reason = "ids_of_another_text"
        self.tally.counters[reason or "kept_ids"] += 1
        if reason:
            return document
        num_same = num_shared(document.ids.tolist(), ids)
        with _tokenizing():
            rest = str(self.tokenizer.decode(ids[num_same:], skip_special_tokens=not record.has_template))
        num_bytes = np.zeros(len(ids), np.int32)
        num_bytes[:num_same] = document.num_bytes[:num_same]
        num_bytes[num_same:] = bytes_between(rest, even_ends(rest, len(ids) - num_same))
        is_scored = np.arange(len(ids)) >= len(tokens.prompt)
        if all(flag for _, flag in record.segments):  # data.train_on_prompt
            is_scored[document.num_opening :] = True
        return TokenizedRecord(record, np.array(ids, np.int32), num_bytes, is_scored, is_as_written=True)

    @cached_property
    def _vocabulary(self) -> tuple[str, int]:
        """The hash of the vocabulary, and its highest id."""
        vocabulary = cast(Any, self.tokenizer).get_vocab()
        return vocabulary_hash(self.tokenizer), int(max(vocabulary.values()))

    def _pieces(self, texts: list[str], *, keeps_special: bool = False) -> list[_Piece]:
        with _tokenizing():
            answer = self.tokenizer(
                texts,
                add_special_tokens=False,
                verbose=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                split_special_tokens=not keeps_special,
                **({"return_offsets_mapping": True} if self.tokenizer.is_fast else {}),
            )
        ids_of_texts = [list(ids) for ids in answer["input_ids"]]
        if not self.tokenizer.is_fast:
            shared = [even_ends(text, len(ids)) for text, ids in zip(texts, ids_of_texts, strict=True)]
            return [_Piece(ids, ends, ends) for ids, ends in zip(ids_of_texts, shared, strict=True)]
        offsets = answer["offset_mapping"]
        return [
            _Piece(ids, token_ends(text, where), np.array([start for start, _ in where], dtype=np.int64))
            for text, ids, where in zip(texts, ids_of_texts, offsets, strict=True)
        ]

    def _snapped(self, text: str, piece: _Piece, borders: Ints) -> tuple[_Piece, Ints]:
        """Allow borders inside the white space that a special token absorbs.

        Return the piece, with such a token ending at the first border there, and the borders that lie elsewhere.
        """
        ends, is_free = piece.ends.copy(), np.zeros(len(borders), np.bool_)
        for place in np.flatnonzero(np.isin(piece.ids, self._takes_space)) if len(self._takes_space) else ():
            start, end = int(piece.starts[place]), int(piece.ends[place])
            inside = (borders >= start + len(text[start:end].rstrip())) & (borders <= end)
            ends[place] = borders[inside][0] if inside.any() else end
            is_free |= inside
        return _Piece(piece.ids, ends, piece.starts), borders[~is_free]

    @cached_property
    def _takes_space(self) -> Ints:
        """Special tokens that absorb the white space after them, as those of Phi-3 do."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return np.array([number for number, token in added.items() if getattr(token, "rstrip", False)], dtype=np.int64)


def end_to_end(documents: Sequence[TokenizedRecord]) -> Encoded:
    """Tokenized records as flat arrays."""
    nothing = np.empty(0, np.int32)
    return Encoded(
        ids=np.concatenate([nothing, *(document.ids for document in documents)]),
        num_bytes=np.concatenate([nothing, *(document.num_bytes for document in documents)]),
        is_scored=np.concatenate([nothing.astype(np.bool_), *(document.is_scored for document in documents)]),
        bounds=np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64),
        names=tuple(document.record.id for document in documents),
        groups=tuple(document.record.group or document.record.id for document in documents),
        has_prompt=tuple(document.has_prompt for document in documents),
    )


def num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))


def _batches(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Batches of bounded text. Special tokens are parsed in all records of a batch or in none."""
    batch: list[Record] = []
    num_characters = 0
    for record in records:
        if batch and (num_characters >= _BATCH_CHARACTERS or record.has_template != batch[0].has_template):
            yield batch
            batch, num_characters = [], 0
        batch.append(record)
        num_characters += len(record.text)
    if batch:
        yield batch
