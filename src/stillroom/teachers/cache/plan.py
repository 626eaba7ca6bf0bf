"""Which rows a cache needs, and which of them share a shard.

The plan follows from the rows that are missing and from nothing else: neither from who asks, nor from what was tried
before. Rows are ordered by length, then by key, and cut where a shard is full; a shard that is already there takes
whole stretches out of that order, and the others stay as they were. So a writer that was killed goes on with the same
shards, several writers plan the same ones, and rows that were added later make shards of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stillroom.data import Rows
from stillroom.types import IGNORED, Batch

_KEYED = 64  # rows that are looked at together


@dataclass(frozen=True)
class NeededRow:
    """A row of some data, by the key under which its answer is kept."""

    key: str
    num_tokens: int
    rows: Rows
    index: int
    name: str


@dataclass(frozen=True)
class ShardPlan:
    """Rows that are written together."""

    rows: tuple[NeededRow, ...]

    @property
    def name(self) -> str:
        """From the keys: whoever plans the same rows gives the same name."""
        keys = "".join(sorted(row.key for row in self.rows))
        return hashlib.blake2b(keys.encode("ascii"), digest_size=12).hexdigest()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def batches(self, max_tokens: int) -> Iterator[Batch]:
        """The rows as batches of at most so many tokens, padding included; one row at least."""
        start = 0
        for end in range(1, len(self.rows) + 1):
            is_last = end == len(self.rows)
            # Ascending lengths: the last row of a batch is its longest.
            if is_last or self.rows[end].num_tokens * (end + 1 - start) > max_tokens or not self._continues(end):
                yield self.rows[start].rows.batch([row.index for row in self.rows[start:end]])
                start = end

    def _continues(self, end: int) -> bool:
        """Whether the row at `end` comes from the same rows as the one before: a batch is made from one source."""
        return self.rows[end].rows is self.rows[end - 1].rows


def needed_rows(sides: Iterable[tuple[Rows, Sequence[int]]]) -> list[NeededRow]:
    """The rows that are named, each content once. A row without targets asks for nothing."""
    found: dict[str, NeededRow] = {}
    for rows, indices in sides:
        for start in range(0, len(indices), _KEYED):
            chosen = [int(index) for index in indices[start : start + _KEYED]]
            batch = rows.batch(chosen)
            sizes, is_asked = batch.attention_mask.sum(1).tolist(), (batch.targets != IGNORED).any(1).tolist()
            for number, (index, key) in enumerate(zip(chosen, batch.keys, strict=True)):
                if is_asked[number]:
                    found.setdefault(key, NeededRow(key, sizes[number], rows, index, batch.sample_ids[number]))
    return list(found.values())


def plan_shards(missing: Sequence[NeededRow], shard_tokens: int) -> list[ShardPlan]:
    """The missing rows in shards, the shortest rows first."""
    plans: list[ShardPlan] = []
    chosen: list[NeededRow] = []
    size = 0
    for row in sorted(missing, key=lambda row: (row.num_tokens, row.key)):
        chosen.append(row)
        size += row.num_tokens
        if size >= shard_tokens:
            plans.append(ShardPlan(tuple(chosen)))
            chosen, size = [], 0
    return [*plans, ShardPlan(tuple(chosen))] if chosen else plans
