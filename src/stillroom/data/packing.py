"""Rows: pack tokens into the sequences of a batch.

A row of n tokens has n - 1 inputs and n - 1 targets: its first token is not a target, because nothing precedes it.
Consecutive rows of one text overlap by one token, the last target of a row being the first input of the next, so
every token of the text but the first is a target exactly once.

"blocks" joins the documents end to end and cuts the result: rows are full, and attention crosses documents. "rows"
gives each document its own rows: a plain text longer than a row is cut into consecutive rows; of a record with a prompt
`on_long` decides: its first row alone is kept ("cut"), nothing of it ("drop"), or it is cut as plain text is ("split").
What is left out is counted. "packed" puts several of those rows into one (`best_fit`); each is a separate piece, which
attention and positions do not leave.

# B rows of a batch, L positions, T tokens of all documents end to end, D documents, P pieces, R rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import IGNORED, Batch
from stillroom.data.records import Tally
from stillroom.data.tokenize import Encoded, Ints, Numbers
from stillroom.data.two_tokenizers.encode import span_flags, span_numbers

Packing = Literal["blocks", "rows", "packed"]
OnLong = Literal["cut", "drop", "split"]
_CHUNK = 1 << 22  # tokens hashed at a time


@dataclass(frozen=True)
class Counts:
    """What rows hold: documents and tokens, each counted once, and scored targets."""

    num_documents: int
    num_tokens: int
    num_targets: int


class Rows:
    """Rows over flat arrays. Piece p is the tokens starts[p] to ends[p]; row r the pieces firsts[r] to firsts[r + 1].

    Without `firsts` each piece is a row. Immutable: nothing changes after it is built, and a batch copies its tokens.
    """

    def __init__(
        self,
        encoded: Encoded,
        starts: Ints,
        ends: Ints,
        *,
        pad_id: int = 0,
        names_offsets: bool = False,
        firsts: Ints | None = None,
        counts: Counts | None = None,
    ) -> None:
        if len(starts) != len(ends) or (starts < 0).any() or (ends <= starts).any() or (ends > len(encoded.ids)).any():
            raise DataError(f"{len(starts)} starts and {len(ends)} ends are not rows of {len(encoded.ids)} tokens")
        self._encoded = encoded
        self._starts = starts
        self._ends = ends
        self._pad_id = pad_id
        self._names_offsets = names_offsets
        self._firsts = firsts
        self._known_counts = counts  # where it was counted already
        paired = encoded.paired
        self.beside = None if paired is None else paired.beside(encoded.bounds, starts, ends)

    def __len__(self) -> int:
        return len(self._starts) if self._firsts is None else len(self._firsts) - 1

    def in_blocks(self, max_length: int) -> Rows:
        """The same documents end to end, cut into blocks: attention crosses from one document to the next."""
        return pack(replace(self._encoded, contexts=None), "blocks", max_length, Tally(), pad_id=self._pad_id)

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several pieces that must not see each other."""
        return self._firsts is not None

    @property
    def lengths(self) -> Ints:
        """[R] Inputs of each row."""
        inputs: Ints = self._ends - self._starts - 1
        return inputs if self._firsts is None else np.add.reduceat(inputs, self._firsts[:-1])

    @cached_property
    def _tails(self) -> Ints:
        """[P] Where the tokens begin that the teacher reads of a piece after the context, which may replace some."""
        contexts = self._encoded.contexts
        assert contexts is not None
        documents = self._encoded.documents_at(self._starts)
        replaced = np.where(contexts.numbers >= 0, contexts.firsts, 0)[documents]
        return np.minimum(np.maximum(self._starts, self._encoded.bounds[documents] + replaced), self._ends)

    @property
    def other_lengths(self) -> Ints:
        """[R] Inputs of the teacher's row for each row; empty where it reads the student's."""
        if (contexts := self._encoded.contexts) is not None:
            inputs = contexts.lengths[self._encoded.documents_at(self._starts)] + self._ends - self._tails - 1
        elif self.beside is not None:
            inputs = self.beside.lengths
        else:
            return np.empty(0, np.int64)
        return inputs if self._firsts is None else np.add.reduceat(inputs, self._firsts[:-1])

    @property
    def longest(self) -> Ints:
        """[R] Inputs of the longest piece of each row: packed rows are all about full."""
        inputs: Ints = self._ends - self._starts - 1
        return inputs if self._firsts is None else np.maximum.reduceat(inputs, self._firsts[:-1])

    @property
    def is_used(self) -> npt.NDArray[np.bool_]:
        """[T] Which tokens are in a row."""
        used = np.zeros(len(self._encoded.ids), np.bool_)
        for start, end in zip(self._starts, self._ends, strict=True):
            used[start:end] = True
        return used

    @property
    def groups(self) -> tuple[str, ...]:
        """For each row, the group of the document it starts in: the unit of a bootstrap."""
        starts = self._starts if self._firsts is None else self._starts[self._firsts[:-1]]
        return tuple(self._encoded.groups[document] for document in self._encoded.documents_at(starts))

    @property
    def num_documents(self) -> int:
        """Documents with at least one token in a row."""
        return self._counts.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens in rows, each counted once, openings and end marks included."""
        return self._counts.num_tokens

    @property
    def num_targets(self) -> int:
        """Scored targets in one pass over all rows."""
        return self._counts.num_targets

    @cached_property
    def _counts(self) -> Counts:
        if self._known_counts is not None:
            return self._known_counts
        return _counted(self._encoded, self._starts, self._ends, _num_targets(self._encoded, self._starts, self._ends))

    def digest(self) -> str:
        """A hash of the tokens, of which of them are scored, and of the rows they are cut into: their order counts."""
        found = hashlib.sha256()
        paired = self._encoded.paired
        for encoded in (self._encoded, *([paired.encoded] if paired is not None else [])):
            for tokens, kind in ((encoded.ids, "<i4"), (encoded.is_scored, "?")):
                for start in range(0, len(tokens), _CHUNK):
                    found.update(np.ascontiguousarray(tokens[start : start + _CHUNK], kind).data)
        if (contexts := self._encoded.contexts) is not None:
            for places in (contexts.ids, contexts.bounds, contexts.numbers, contexts.firsts):
                found.update(np.ascontiguousarray(places, "<i8").data)
        for places in (self._starts, self._ends, *([self._firsts] if self._firsts is not None else [])):
            found.update(np.ascontiguousarray(places, "<i8").data)
        return found.hexdigest()[:32]

    def row(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of one row, including the first token of each piece, which is not a target."""
        self._check([index])
        return np.concatenate([self._encoded.ids[start:end] for start, end in self._pieces(index)])

    def _pieces(self, row: int) -> list[tuple[int, int]]:
        """The tokens of each piece of a row."""
        numbers = self._numbers(row)
        pieces = slice(numbers.start, numbers.stop)
        return list(zip(self._starts[pieces].tolist(), self._ends[pieces].tolist(), strict=True))

    def _numbers(self, row: int) -> range:
        """The numbers of a row's pieces."""
        return range(row, row + 1) if self._firsts is None else range(*self._firsts[row : row + 2].tolist())

    def question(self, index: int) -> tuple[list[int], list[int]]:
        """The tokens before the first scored target, and the run of scored tokens from there.

        Of a record with a prompt: the prompt and the first answer; of plain text: the first token and the rest.
        """
        self._check([index])
        start, end = self._pieces(index)[0]
        ids = self._encoded.ids[start:end].tolist()
        is_scored = self._encoded.is_scored[start:end].copy()
        is_scored[0] = False
        first = int(is_scored.argmax())
        num_answer = int(np.append(~is_scored[first:], np.True_).argmax())
        return ids[:first], ids[first : first + num_answer]

    def prompts(self, num_tokens: int) -> Iterator[tuple[str, list[int], int]]:
        """Of each piece its name, its prompt, which ends before its first scored token, and the tokens that follow.

        The prompt of plain text is its first `num_tokens` tokens, at most half of them, and no answer follows.
        """
        has_prompt = self._encoded.prompts
        documents = self._encoded.documents_at(self._starts)
        for start, end, document in zip(self._starts.tolist(), self._ends.tolist(), documents.tolist(), strict=True):
            if has_prompt[document] and start > self._encoded.bounds[document]:
                continue  # the prompt is in an earlier row
            size, num_answer = min(num_tokens, (end - start) // 2), 0
            if has_prompt[document]:
                is_scored = self._encoded.is_scored[start:end]
                size, num_answer = int(is_scored.argmax()) if is_scored.any() else 0, int(is_scored.sum())
            offset = start - int(self._encoded.bounds[document])
            name = self._encoded.names[document]
            yield f"{name}@{offset}" if offset else name, self._encoded.ids[start : start + size].tolist(), num_answer

    def other_prompt(self, index: int) -> list[int]:
        """The teacher's tokens before the first scored target of the teacher's row; empty where there is none."""
        paired, piece = self._encoded.paired, index if self._firsts is None else int(self._firsts[index])
        if paired is None or self.beside is None:
            return []
        start, end = int(self.beside.starts[piece]), int(self.beside.ends[piece])
        is_scored = paired.encoded.is_scored[start:end].copy()
        is_scored[:1] = False
        num_before = int(is_scored.argmax()) if is_scored.any() else 0
        return [int(token) for token in paired.encoded.ids[start : start + num_before]]

    def opens_document(self, index: int) -> bool:
        """Whether a row begins with its document."""
        start = self._pieces(index)[0][0]
        return bool(self._encoded.bounds[self._encoded.documents_at(np.array([start]))[0]] == start)

    def sample_id(self, index: int) -> str:
        """The document a row starts in, and the token offset if it may not be 0: "asyncio.base@1024".

        "train.jsonl:17+4" is a row of that record and four other pieces.
        """
        pieces = self._pieces(index)
        document = int(self._encoded.documents_at(np.array([pieces[0][0]]))[0])
        offset = pieces[0][0] - int(self._encoded.bounds[document])
        others = f"+{len(pieces) - 1}" if len(pieces) > 1 else ""
        name = self._encoded.names[document]
        return (f"{name}@{offset}" if self._names_offsets or offset else name) + others

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        """These rows as tensors, padded on the right to the longest."""
        self._check(indices)
        rows = [self._pieces(int(row)) for row in indices]
        documents = self._encoded.documents_at(np.array([pieces[0][0] for pieces in rows]))
        names = {
            "sample_ids": tuple(self.sample_id(int(row)) for row in indices),
            "documents": tuple(self._encoded.names[document] for document in documents.tolist()),
            "index": index,
        }
        batch = self._batch(self._encoded, [[(*piece, 0) for piece in row] for row in rows], self._pad_id, names)
        if self._encoded.contexts is not None:
            return replace(batch, other=self._in_context([int(row) for row in indices], names))
        return batch if self.beside is None else self._paired(batch, [int(row) for row in indices])

    def _in_context(self, rows: list[int], names: dict[str, Any]) -> Batch:
        """The rows as the teacher reads them: each piece after its context, with the very targets of the student."""
        encoded, contexts = self._encoded, self._encoded.contexts
        assert contexts is not None
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        ranges: list[list[tuple[int, int, int]]] = []
        place = 0
        for row in rows:
            ranges.append([])
            for piece in self._numbers(row):
                start, tail, end = (int(places[piece]) for places in (self._starts, self._tails, self._ends))
                context = contexts.of(int(encoded.documents_at(np.array([start]))[0]))
                is_scored = encoded.is_scored[tail:end].copy()
                is_scored[: int(tail == start)] = False  # the student's first token is not a target
                nothing = np.zeros_like(context)
                parts.append(
                    (
                        np.concatenate([context, encoded.ids[tail:end]]),
                        np.concatenate([nothing, encoded.num_bytes[tail:end]]),
                        np.concatenate([nothing != 0, is_scored]),
                    )
                )
                ranges[-1].append((place, place + len(parts[-1][0]), 0))
                place = ranges[-1][-1][1]
        ids, num_bytes, is_target = (np.concatenate(column) for column in zip(*parts, strict=True))
        read = Encoded(ids, num_bytes, is_target, bounds=np.array([0, place]), names=("",), groups=("",))
        return self._batch(read, ranges, self._pad_id, names)

    def in_context(self, index: int, prompt: list[int]) -> list[int]:
        """A prompt, the beginning of a row, as the teacher reads it."""
        if self._encoded.contexts is None:
            return prompt
        piece = self._numbers(index)[0]
        context = self._encoded.contexts.of(int(self._encoded.documents_at(self._starts[piece : piece + 1])[0]))
        return [*context.tolist(), *prompt[int(self._tails[piece] - self._starts[piece]) :]]

    def _batch(
        self, encoded: Encoded, rows: list[list[tuple[int, int, int]]], pad_id: int, names: dict[str, Any]
    ) -> Batch:
        """Rows of pieces (start, end, first token that may be a target), padded on the right to the longest."""
        width = max(1, *(sum(max(end - start - 1, 0) for start, end, _ in pieces) for pieces in rows))
        shape = (len(rows), width)
        inputs = np.full(shape, pad_id, np.int64)
        mask, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets, segments = np.full(shape, IGNORED, np.int64), np.full(shape, -1, np.int64)
        for line, pieces in enumerate(rows):
            place = 0
            for number, (start, end, first) in enumerate(pieces):
                if end - start < 2:
                    continue
                here, following = slice(place, place + end - start - 1), slice(start + 1, end)
                is_scored, ids = encoded.is_scored[following], encoded.ids[start:end]
                is_scored = is_scored if first <= start + 1 else is_scored & (np.arange(start + 1, end) >= first)
                inputs[line, here] = ids[:-1]
                mask[line, here] = 1
                targets[line, here] = np.where(is_scored, ids[1:], IGNORED)
                sizes[line, here] = np.where(is_scored, encoded.num_bytes[following], 0)
                segments[line, here] = number
                place = here.stop
        is_empty = ~mask.any(axis=1)  # a model still needs a token
        mask[is_empty, 0], segments[is_empty, 0] = 1, 0
        return Batch(
            input_ids=torch.from_numpy(inputs),
            attention_mask=torch.from_numpy(mask),
            targets=torch.from_numpy(targets),
            target_bytes=torch.from_numpy(sizes),
            segments=torch.from_numpy(segments) if self.is_packed else None,
            **names,
        )

    def _paired(self, batch: Batch, rows: list[int]) -> Batch:
        """The batch with the teacher's rows, and the spans of both."""
        paired, beside = self._encoded.paired, self.beside
        assert paired is not None and beside is not None
        pieces = [self._numbers(row) for row in rows]
        theirs = [[(int(beside.starts[p]), int(beside.ends[p]), int(beside.targets[p])) for p in own] for own in pieces]
        names = {"sample_ids": batch.sample_ids, "documents": batch.documents, "index": batch.index}
        other = self._batch(paired.encoded, theirs, paired.pad_id, names)
        own = [[(int(self._starts[p]), int(self._ends[p]), 0) for p in one] for one in pieces]
        limits = [[(int(beside.firsts[p]), int(beside.lasts[p])) for p in one] for one in pieces]
        spans = span_numbers(paired.student_spans, own, limits, batch.input_ids.shape[1])
        exact = span_flags(spans, paired.spans.is_exact, limits)
        other = replace(
            other,
            spans=torch.from_numpy(span_numbers(paired.teacher_spans, theirs, limits, other.input_ids.shape[1])),
        )
        return replace(batch, other=other, spans=torch.from_numpy(spans), is_exact=torch.from_numpy(exact))

    def _check(self, indices: Sequence[int] | Ints) -> None:
        if not len(indices) or min(indices) < 0 or max(indices) >= len(self):
            raise IndexError(
                f"rows {list(indices)[:8]}: there are {len(self)}, counted from 0, and a batch has at least 1"
            )


def pack(
    encoded: Encoded, packing: Packing, max_length: int, tally: Tally, *, pad_id: int = 0, on_long: OnLong = "cut"
) -> Rows:
    """Pack the documents into rows of at most max_length inputs. Drop and count rows without a scored target."""
    if packing not in ("blocks", "rows", "packed") or max_length < 1:
        raise ConfigError(
            f"packing {packing!r} with rows of {max_length} tokens is not possible",
            where="data.packing, data.max_length",
            advice=["packing is 'blocks', 'rows' or 'packed', and a row has at least one token"],
        )
    if packing == "blocks":
        starts, ends = _consecutive(np.array([0, len(encoded.ids)]), np.array([True]), max_length)
    else:
        is_long = encoded.prompts & (np.diff(encoded.bounds) > max_length + 1)
        is_split = ~encoded.prompts | (on_long == "split")
        starts, ends = _consecutive(encoded.bounds, is_split, max_length)
        if on_long == "drop" and is_long.any():
            tally.counters["dropped_records"] += int(is_long.sum())
            is_kept = ~is_long[encoded.documents_at(starts)]
            starts, ends = starts[is_kept], ends[is_kept]
        elif on_long == "cut":
            _count_truncated(encoded, is_long, max_length, tally)
    targets = _num_targets(encoded, starts, ends)
    if not (has_targets := targets > 0).all():
        tally.counters["rows_without_targets"] += int((~has_targets).sum())
        starts, ends, targets = starts[has_targets], ends[has_targets], targets[has_targets]
    counts = _counted(encoded, starts, ends, targets)
    del targets, has_targets
    if packing != "packed":
        rows = Rows(encoded, starts, ends, pad_id=pad_id, names_offsets=packing == "blocks", counts=counts)
    else:
        order, firsts = best_fit(ends - starts - 1, max_length)
        rows = Rows(encoded, starts[order], ends[order], pad_id=pad_id, firsts=firsts, counts=counts)
    if encoded.paired is not None and rows.beside is not None:
        num_kept = int((rows.beside.lasts - rows.beside.firsts).sum())
        tally.counters["spans_cut_by_rows"] += len(encoded.paired.spans) - num_kept
    return rows


def _consecutive(bounds: Ints, is_continued: npt.NDArray[np.bool_], max_length: int) -> tuple[Ints, Ints]:
    """Rows from each bound to the next: all of them where `is_continued`, otherwise the first alone.

    The last row of a text may be short, but of a text with two tokens or more it has an input and a target.
    """
    lengths = np.diff(bounds)
    if len(lengths) and 0 < lengths.min() <= lengths.max() <= max_length + 1:
        return bounds[:-1], bounds[1:]  # each text is a row, and nothing is copied
    num_rows = np.where(is_continued, np.maximum(-(-(lengths - 1) // max_length), 1), 1) * (lengths > 0)
    texts = np.repeat(np.arange(len(lengths)), num_rows)
    places = np.arange(len(texts)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    starts: Ints = bounds[texts] + places * max_length
    return starts, np.minimum(starts + max_length + 1, bounds[texts + 1])


def _count_truncated(encoded: Encoded, is_cut: npt.NDArray[np.bool_], max_length: int, tally: Tally) -> None:
    """Count the tokens and targets of records with a prompt that do not fit into their row."""
    begins, ends = encoded.bounds[:-1][is_cut] + max_length + 1, encoded.bounds[1:][is_cut]
    num_lost_targets = encoded.num_scored_between(begins, ends) if len(ends) else ends
    tally.counters["truncated_records"] += len(ends)
    tally.counters["truncated_tokens"] += int((ends - begins).sum())
    tally.counters["truncated_targets"] += int(num_lost_targets.sum())


def _num_targets(encoded: Encoded, starts: Ints, ends: Ints) -> Ints:
    """Scored targets of each piece. The first token is not a target."""
    return encoded.num_scored_between(np.minimum(starts + 1, ends), ends)


def _counted(encoded: Encoded, starts: Ints, ends: Ints, targets: Ints) -> Counts:
    return Counts(
        num_documents=_num_covered(encoded.documents_at(starts), encoded.documents_at(ends - 1) + 1),
        num_tokens=_num_covered(starts, ends),
        num_targets=int(targets.sum()),
    )


def _num_covered(starts: Ints, ends: Ints) -> int:
    """How many places lie in at least one range. The ranges need not be sorted."""
    if not len(starts):
        return 0
    if (starts[1:] < starts[:-1]).any():
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    if (ends[1:] < ends[:-1]).any():
        ends = np.maximum.accumulate(ends)
    begins = np.maximum(starts[1:], ends[:-1])
    return int(ends[0] - starts[0] + (ends[1:] - begins).sum())


# -- best-fit packing --------------------------------------------------------------------------------------------

# Each piece goes into the row with the least room that still takes it, or into a new one. The result needs at most
# 11/9 of the fewest possible rows (Johnson, 1973). Pieces of one length are placed together, so the work grows with
# the number of lengths and not of pieces.
#


def best_fit(lengths: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Pack pieces of 1 to `capacity` tokens: an order of the pieces [P], and where each row begins in it [R + 1].

    A function of the lengths alone. Rows are in the order of their first pieces, and so are the pieces of a row.
    """
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"pieces of {lengths.min()} to {lengths.max()} tokens do not fit into rows of {capacity}")
    by_length = stable_order(capacity - lengths)
    row_of: Numbers = np.empty(len(lengths), np.int32 if len(lengths) < 1 << 31 else np.int64)
    room: list[list[Ints]] = [[] for _ in range(capacity + 1)]  # rows with that much room, in stacks
    counts = np.zeros(capacity + 1, np.int64)
    num_rows = 0
    num_each = np.bincount(lengths, minlength=1)
    start = 0
    for length in np.flatnonzero(num_each)[::-1].tolist():
        count = int(num_each[length])
        waiting, start = by_length[start : start + count], start + count
        while len(waiting):
            fitting = np.flatnonzero(counts[length:])
            if len(fitting):
                left = int(fitting[0]) + length
                rows = room[left].pop()
                taken = min(len(rows), len(waiting))
                if taken < len(rows):
                    room[left].append(rows[taken:])
                rows = rows[:taken]
                counts[left] -= taken
            else:
                per_row = capacity // length
                taken, left = -(-len(waiting) // per_row), capacity
                rows = np.arange(num_rows, num_rows + taken)
                num_rows += taken
            row_of[waiting[:taken]] = rows
            waiting = waiting[taken:]
            room[left - length].append(rows)
            counts[left - length] += taken
    return _in_order(row_of, num_rows)


def _in_order(row_of: Numbers, num_rows: int) -> tuple[Ints, Ints]:
    """Pieces grouped by row; rows sorted by their first piece."""
    first_piece = np.full(num_rows, len(row_of), np.int64)
    np.minimum.at(first_piece, row_of, np.arange(len(row_of)))
    rank = np.empty(num_rows, row_of.dtype)
    rank[np.argsort(first_piece, kind="stable")] = np.arange(num_rows)
    ranks = rank[row_of]
    firsts: Ints = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(ranks, minlength=num_rows), out=firsts[1:])
    return stable_order(ranks), firsts


def stable_order(values: Numbers) -> Ints:
    """The stable order of numbers from 0 on, by 16 bits at a time: numpy sorts those by radix, in linear time."""
    order: Ints = np.argsort((values & 0xFFFF).astype(np.uint16), kind="stable")
    largest, shift = int(values.max()) if len(values) else 0, 16
    while largest >> shift:
        digits = ((values >> shift) & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
        shift += 16
    return order
