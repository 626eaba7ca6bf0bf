"""Rows: which tokens stand together in one line of a batch.

A row of n tokens has n - 1 inputs and n - 1 targets: its first token is only ever an input, because
nothing in the row stands before it to predict it. Blocks therefore overlap by one token, the last target
of a row being the first input of the next, so that over all rows each token of the stream but the very
first is a target exactly once. With one record a row, the first token of each record is never a target.

# B rows of a batch, L positions, T tokens of all documents end to end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from stillroom.data.encode import Encoded, Ints
from stillroom.data.records import Tally
from stillroom.types import IGNORED, Batch


class Rows:
    """Rows of at most max_length + 1 tokens over flat arrays. Row i is the tokens starts[i] to ends[i].

    Frozen in effect: nothing here changes after it is built, and a batch copies what it takes.
    """

    def __init__(self, encoded: Encoded, starts: Ints, ends: Ints, *, pad_id: int = 0, names_offsets: bool = False):
        self._encoded = encoded
        self._starts = starts
        self._ends = ends
        self._pad_id = pad_id
        self._names_offsets = names_offsets
        self._documents = np.searchsorted(encoded.bounds, starts, side="right") - 1

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def encoded(self) -> Encoded:
        """The documents that the rows are cut from."""
        return self._encoded

    @property
    def groups(self) -> tuple[str, ...]:
        """For each row, the group of the document that it starts in: what a bootstrap draws as a whole."""
        return tuple(self._encoded.groups[document] for document in self._documents)

    @property
    def num_documents(self) -> int:
        return self._encoded.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, end marks included, before any truncation."""
        return len(self._encoded.ids)

    @property
    def num_targets(self) -> int:
        """Targets that one pass over all rows scores."""
        return int(_num_targets(self._encoded, self._starts, self._ends).sum())

    def row(self, index: int) -> npt.NDArray[np.int32]:
        """The ids of one row, its first token (which is no target) included."""
        return self._encoded.ids[self._starts[index] : self._ends[index]]

    def sample_id(self, index: int) -> str:
        """The document a row starts in, and in blocks the token of it: "asyncio.base_events@1024"."""
        document = self._documents[index]
        name = self._encoded.names[document]
        return f"{name}@{self._starts[index] - self._encoded.bounds[document]}" if self._names_offsets else name

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        """The named rows as tensors, padded on the right to the longest of them."""
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


def pack(
    encoded: Encoded, packing: Literal["blocks", "rows"], max_length: int, tally: Tally, *, pad_id: int = 0
) -> Rows:
    """Rows over the documents; those in which no target is scored are dropped and counted."""
    if packing == "blocks":
        starts, ends = _blocks(len(encoded.ids), max_length)
    else:
        starts, ends = _records(encoded.bounds, max_length)
        tally.counters["truncated_tokens"] += int((encoded.bounds[1:] - ends).sum())
    has_targets = _num_targets(encoded, starts, ends) > 0
    tally.counters["rows_without_targets"] += int((~has_targets).sum())
    return Rows(encoded, starts[has_targets], ends[has_targets], pad_id=pad_id, names_offsets=packing == "blocks")


def _blocks(num_tokens: int, max_length: int) -> tuple[Ints, Ints]:
    """Cuts every max_length tokens. The last row may be short, but has an input and a target."""
    starts = np.arange(0, max(num_tokens - 1, 0), max_length, dtype=np.int64)
    return starts, np.minimum(starts + max_length + 1, num_tokens)


def _records(bounds: Ints, max_length: int) -> tuple[Ints, Ints]:
    return bounds[:-1], np.minimum(bounds[:-1] + max_length + 1, bounds[1:])


def _num_targets(encoded: Encoded, starts: Ints, ends: Ints) -> Ints:
    """Scored targets of each row: its tokens but the first."""
    before = np.concatenate([[0], np.cumsum(encoded.is_scored, dtype=np.int64)])
    counts: Ints = before[ends] - before[np.minimum(starts + 1, ends)]
    return counts
