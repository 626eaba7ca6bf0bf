"""Rows: pack tokens into the sequences of a batch.

A row of n tokens has n - 1 inputs and n - 1 targets: its first token is not a target, because nothing precedes it.
Consecutive rows of one text overlap by one token, the last target of a row being the first input of the next, so
every token of the text but the first is a target exactly once.

"blocks" joins the documents end to end and cuts the result: rows are full, and attention crosses documents. "rows"
gives each document its own rows: a plain text longer than a row is cut into consecutive rows; a record with a prompt
keeps only its first row, and what does not fit is left out and counted.

# B rows of a batch, L positions, T tokens of all documents end to end, D documents
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from stillroom.data.encode import Encoded, Ints
from stillroom.data.records import Tally
from stillroom.errors import ConfigError, DataError
from stillroom.types import IGNORED, Batch


class Rows:
    """Rows over flat arrays. Row i is the tokens starts[i] to ends[i].

    Immutable: nothing changes after it is built, and a batch copies its tokens.
    """

    def __init__(self, encoded: Encoded, starts: Ints, ends: Ints, *, pad_id: int = 0, names_offsets: bool = False):
        if len(starts) != len(ends) or (starts < 0).any() or (ends <= starts).any() or (ends > len(encoded.ids)).any():
            raise DataError(f"{len(starts)} starts and {len(ends)} ends are not rows of {len(encoded.ids)} tokens")
        self._encoded = encoded
        self._starts = starts
        self._ends = ends
        self._pad_id = pad_id
        self._names_offsets = names_offsets
        self._documents = np.searchsorted(encoded.bounds, starts, side="right") - 1

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def is_used(self) -> npt.NDArray[np.bool_]:
        """[T] Which tokens are in a row."""
        return _is_covered(len(self._encoded.ids), self._starts, self._ends)

    @property
    def groups(self) -> tuple[str, ...]:
        """For each row, the group of the document it starts in: the unit of a bootstrap."""
        return tuple(self._encoded.groups[document] for document in self._documents)

    @property
    def num_documents(self) -> int:
        """Documents with at least one token in a row."""
        last = np.searchsorted(self._encoded.bounds, self._ends - 1, side="right") - 1
        return int(_is_covered(self._encoded.num_documents, self._documents, last + 1).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens in rows, each counted once, openings and end marks included."""
        return int(_is_covered(len(self._encoded.ids), self._starts, self._ends).sum())

    @property
    def num_targets(self) -> int:
        """Scored targets in one pass over all rows."""
        return int(_num_targets(self._encoded, self._starts, self._ends).sum())

    def row(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of one row, including its first token, which is not a target."""
        self._check([index])
        return self._encoded.ids[self._starts[index] : self._ends[index]]

    def question(self, index: int) -> tuple[list[int], list[int]]:
        """The tokens before the first scored target, and the run of scored tokens from there.

        Of a record with a prompt: the prompt and the first answer; of plain text: the first token and the rest.
        """
        ids = self.row(index).tolist()
        is_scored = self._encoded.is_scored[self._starts[index] : self._ends[index]].copy()
        is_scored[0] = False
        first = int(is_scored.argmax())
        num_answer = int(np.append(~is_scored[first:], np.True_).argmax())
        return ids[:first], ids[first : first + num_answer]

    def sample_id(self, index: int) -> str:
        """The document a row starts in, and the token offset if it may not be 0: "asyncio.base@1024"."""
        document = self._documents[index]
        name = self._encoded.names[document]
        offset = int(self._starts[index] - self._encoded.bounds[document])
        return f"{name}@{offset}" if self._names_offsets or offset else name

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        """These rows as tensors, padded on the right to the longest."""
        self._check(indices)
        width = int(max(self._ends[row] - self._starts[row] for row in indices)) - 1
        shape = (len(indices), width)
        inputs = np.full(shape, self._pad_id, np.int64)
        mask, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets = np.full(shape, IGNORED, np.int64)
        for line, row in enumerate(indices):
            start, end = int(self._starts[row]), int(self._ends[row])
            length = end - start - 1
            following = slice(start + 1, end)
            is_scored = self._encoded.is_scored[following]
            inputs[line, :length] = self._encoded.ids[start : end - 1]
            mask[line, :length] = 1
            targets[line, :length] = np.where(is_scored, self._encoded.ids[following], IGNORED)
            sizes[line, :length] = np.where(is_scored, self._encoded.num_bytes[following], 0)
        return Batch(
            input_ids=torch.from_numpy(inputs),
            attention_mask=torch.from_numpy(mask),
            targets=torch.from_numpy(targets),
            target_bytes=torch.from_numpy(sizes),
            sample_ids=tuple(self.sample_id(int(row)) for row in indices),
            index=index,
            documents=tuple(self._encoded.names[self._documents[int(row)]] for row in indices),
        )

    def _check(self, indices: Sequence[int] | Ints) -> None:
        if not len(indices) or min(indices) < 0 or max(indices) >= len(self):
            raise IndexError(
                f"rows {list(indices)[:8]}: there are {len(self)}, counted from 0, and a batch has at least 1"
            )


def pack(
    encoded: Encoded, packing: Literal["blocks", "rows"], max_length: int, tally: Tally, *, pad_id: int = 0
) -> Rows:
    """Pack the documents into rows of at most max_length inputs. Drop and count rows without a scored target."""
    if packing not in ("blocks", "rows") or max_length < 1:
        raise ConfigError(
            f"packing {packing!r} with rows of {max_length} tokens is not possible",
            where="data.packing, data.max_length",
            advice=["packing is 'blocks' or 'rows', and a row has at least one token"],
        )
    if packing == "blocks":
        starts, ends = _consecutive(np.array([0, len(encoded.ids)]), np.array([True]), max_length)
    else:
        has_prompt = np.array(encoded.has_prompt or [False] * encoded.num_documents, dtype=np.bool_)
        starts, ends = _consecutive(encoded.bounds, ~has_prompt, max_length)
        _count_truncated(encoded, has_prompt, max_length, tally)
    has_targets = _num_targets(encoded, starts, ends) > 0
    tally.counters["rows_without_targets"] += int((~has_targets).sum())
    return Rows(encoded, starts[has_targets], ends[has_targets], pad_id=pad_id, names_offsets=packing == "blocks")


def _consecutive(bounds: Ints, is_continued: npt.NDArray[np.bool_], max_length: int) -> tuple[Ints, Ints]:
    """Rows from each bound to the next: all of them where `is_continued`, otherwise the first alone.

    The last row of a text may be short, but of a text with two tokens or more it has an input and a target.
    """
    lengths = np.diff(bounds)
    num_rows = np.where(is_continued, np.maximum(-(-(lengths - 1) // max_length), 1), 1) * (lengths > 0)
    texts = np.repeat(np.arange(len(lengths)), num_rows)
    places = np.arange(len(texts)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    starts: Ints = bounds[texts] + places * max_length
    return starts, np.minimum(starts + max_length + 1, bounds[texts + 1])


def _count_truncated(encoded: Encoded, has_prompt: npt.NDArray[np.bool_], max_length: int, tally: Tally) -> None:
    """Count the tokens and targets of records with a prompt that do not fit into their row."""
    beyond = np.minimum(encoded.bounds[:-1] + max_length + 1, encoded.bounds[1:])
    num_lost = np.where(has_prompt, encoded.bounds[1:] - beyond, 0)
    scored_before = np.concatenate([[0], np.cumsum(encoded.is_scored, dtype=np.int64)])
    num_unscored = np.where(has_prompt, scored_before[encoded.bounds[1:]] - scored_before[beyond], 0)
    tally.counters["truncated_records"] += int((num_lost > 0).sum())
    tally.counters["truncated_tokens"] += int(num_lost.sum())
    tally.counters["truncated_targets"] += int(num_unscored.sum())


def _num_targets(encoded: Encoded, starts: Ints, ends: Ints) -> Ints:
    """Scored targets of each row. The first token is not a target."""
    before = np.concatenate([[0], np.cumsum(encoded.is_scored, dtype=np.int64)])
    counts: Ints = before[ends] - before[np.minimum(starts + 1, ends)]
    return counts


def _is_covered(size: int, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
    """[size] Which places lie in at least one range. The ranges need not be sorted."""
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, starts, 1)
    np.add.at(steps, ends, -1)
    covered: npt.NDArray[np.bool_] = np.cumsum(steps[:-1]) > 0
    return covered
