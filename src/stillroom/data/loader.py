"""The order of the training rows: seeded, and resumable from one integer.

An epoch is a permutation of the rows, cut into micro-batches and these into windows, one for each optimizer
step. Windows never cross epochs: the last window of an epoch may have fewer micro-batches, and the last
micro-batch fewer rows, but no row is left out. 9,353 rows with batch size 1 and accumulation 8 are 1,170
steps an epoch, the last with one micro-batch.

With `groups_lengths` the rows of a batch are of about equal length; after `short_first` the first windows go from short
rows to long ones.

Several processes share each window: process r of n takes every nth micro-batch from the rth on. Together they read in
the order of one process with n times the accumulation. `initial_world_size` is the number of processes that the run
began with: one that continues with another number has the same windows.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import IGNORED, Batch
from stillroom.data.packing import Rows
from stillroom.data.tokenize import Ints

# -- mixing ----------------------------------------------------------------------------------------
# Rows of several sources, each seen as often as its weight says.
#
# Each source is an endless sequence of permutations of its rows; an epoch of the run takes the next round(weight *
# rows) of it. So a source of weight 2 is seen twice in an epoch, and of one of weight 0.5 each half in turn. What an
# epoch holds is a pure function of the seed and the number of the epoch.
#
# A micro-batch holds rows of one source, so that its terms are those of the source and a teacher need not be asked
# about a source that is learned from the labels alone. The micro-batches of an epoch are shuffled; a step of several
# mixes sources.


_OTHER_PADS = {"targets": IGNORED, "segments": -1, "spans": -1}  # token 0 is in every vocabulary


@dataclass(frozen=True)
class Part:
    """The rows of one source."""

    name: str
    rows: Rows
    weight: float = 1.0

    @property
    def rows_per_epoch(self) -> int:
        """At least one: a source that was named is seen."""
        return max(1, round(self.weight * len(self.rows)))

    def num_batches(self, batch_size: int) -> int:
        return -(-self.rows_per_epoch // batch_size)

    def epoch(self, seed: int, number: int, epoch: int) -> Ints:
        """The rows of an epoch, in order. `number` tells the source from the others."""
        size = self.rows_per_epoch
        first, last = epoch * size, (epoch + 1) * size
        passes = range(first // len(self.rows), -(-last // len(self.rows)))
        drawn = [np.random.default_rng([seed, number, turn]).permutation(len(self.rows)) for turn in passes]
        start = first - passes.start * len(self.rows)
        return np.concatenate(drawn)[start : start + size]


class MixedRows(Rows):
    """The rows of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Part], *, pad_id: int = 0) -> None:
        self.parts = tuple(parts)
        self._pads = {"input_ids": pad_id, "targets": IGNORED, "segments": -1, "spans": -1}
        self._part_firsts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self._kept: tuple[tuple[int, int, int, bool, float], list[Ints]] | None = None

    def __len__(self) -> int:
        return int(self._part_firsts[-1])

    def in_blocks(self, max_length: int) -> Rows:
        """The documents of each source end to end, cut into blocks; no block holds text of two sources."""
        parts = [replace(part, rows=part.rows.in_blocks(max_length)) for part in self.parts]
        return MixedRows(parts, pad_id=self._pads["input_ids"])

    @property
    def is_packed(self) -> bool:
        return any(part.rows.is_packed for part in self.parts)

    @cached_property
    def lengths(self) -> Ints:
        return np.concatenate([part.rows.lengths for part in self.parts])

    @cached_property
    def other_lengths(self) -> Ints:
        theirs = [part.rows.other_lengths for part in self.parts]
        if not any(len(own) for own in theirs):
            return theirs[0]
        pairs = zip(theirs, self.parts, strict=True)
        return np.concatenate([own if len(own) else part.rows.lengths for own, part in pairs])

    @cached_property
    def longest(self) -> Ints:
        return np.concatenate([part.rows.longest for part in self.parts])

    @property
    def is_used(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([part.rows.is_used for part in self.parts])

    @cached_property
    def groups(self) -> tuple[str, ...]:
        return tuple(group for part in self.parts for group in part.rows.groups)

    @property
    def num_documents(self) -> int:
        return sum(part.rows.num_documents for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return sum(part.rows.num_tokens for part in self.parts)

    @property
    def num_targets(self) -> int:
        return sum(part.rows.num_targets for part in self.parts)

    def digest(self) -> str:
        return hashlib.sha256(" ".join(part.rows.digest() for part in self.parts).encode()).hexdigest()[:32]

    def row(self, index: int) -> npt.NDArray[np.int32]:
        part, place = self._place(index)
        return part.rows.row(place)

    def question(self, index: int) -> tuple[list[int], list[int]]:
        part, place = self._place(index)
        return part.rows.question(place)

    def prompts(self, num_tokens: int) -> Iterator[tuple[str, list[int], int]]:
        for part in self.parts:
            yield from part.rows.prompts(num_tokens)

    def other_prompt(self, index: int) -> list[int]:
        part, place = self._place(index)
        return part.rows.other_prompt(place)

    def in_context(self, index: int, prompt: list[int]) -> list[int]:
        part, place = self._place(index)
        return part.rows.in_context(place, prompt)

    def opens_document(self, index: int) -> bool:
        part, place = self._place(index)
        return part.rows.opens_document(place)

    def sample_id(self, index: int) -> str:
        part, place = self._place(index)
        return part.rows.sample_id(place)

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        """These rows, in this order, each with the name of its source."""
        self._check(indices)
        owners = np.searchsorted(self._part_firsts, np.asarray(indices), side="right") - 1
        runs = np.split(np.asarray(indices), np.flatnonzero(np.diff(owners)) + 1)
        batches = []
        for run in runs:
            owner = int(np.searchsorted(self._part_firsts, run[0], side="right")) - 1
            part = self.parts[owner]
            batch = part.rows.batch(run - self._part_firsts[owner], index=index)
            batches.append(replace(batch, sources=(part.name,) * len(run)))
        return batches[0] if len(batches) == 1 else _stacked(batches, self._pads)

    def num_batches(self, batch_size: int) -> int:
        """Micro-batches in one epoch."""
        return sum(part.num_batches(batch_size) for part in self.parts)

    def epoch(
        self, seed: int, epoch: int, batch_size: int, *, groups_lengths: bool = False, share_short_first: float = 0.0
    ) -> list[Ints]:
        """The micro-batches of an epoch, each of one source. Those of the last epoch asked for are kept.

        Of epoch 0 the share `share_short_first` of each source comes first, from short to long.
        """
        asked = (seed, epoch, batch_size, groups_lengths, 0.0 if epoch else share_short_first)
        kept = self._kept
        if kept is None or kept[0] != asked:
            self._kept = kept = (asked, self._drawn(*asked))
        return kept[1]

    def _drawn(self, seed: int, epoch: int, batch_size: int, groups_lengths: bool, share: float) -> list[Ints]:
        first: list[Ints] = []
        others: list[Ints] = []
        lengths, longest = self.lengths if groups_lengths else None, self.longest if share else None
        for number, part in enumerate(self.parts):
            rows = part.epoch(seed, number, epoch) + self._part_firsts[number]
            num_first = round(share * part.num_batches(batch_size))
            rng = np.random.default_rng([seed, len(self.parts) + 1 + number, epoch])
            rows = arranged(rows, lengths, longest, num_first=num_first * batch_size, batch_size=batch_size, rng=rng)
            batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
            first += batches[:num_first]
            others += batches[num_first:]
        rng = np.random.default_rng([seed, len(self.parts), epoch])
        order = [others[place] for place in rng.permutation(len(others))]
        if longest is None:
            return order
        by_length = np.argsort([float(longest[batch].mean()) for batch in first], kind="stable")
        ramp = [first[place] for bucket in buckets(by_length, 1) for place in rng.permutation(bucket)]
        return [*ramp, *order]

    def _place(self, index: int) -> tuple[Part, int]:
        self._check([index])
        owner = int(np.searchsorted(self._part_firsts, index, side="right")) - 1
        return self.parts[owner], index - int(self._part_firsts[owner])


def _stacked(batches: Sequence[Batch], pads: dict[str, int]) -> Batch:
    """Batches as one, padded on the right to the longest."""
    is_packed = any(batch.segments is not None for batch in batches)
    if is_packed:  # a row without segments is one piece, number 0; its padding is -1
        batches = [
            replace(batch, segments=batch.attention_mask - 1) if batch.segments is None else batch for batch in batches
        ]
    width = max(batch.input_ids.shape[1] for batch in batches)

    def padded(name: str) -> Tensor:
        tensors: list[Tensor] = [getattr(batch, name) for batch in batches]
        return torch.cat(
            [torch.nn.functional.pad(one, (0, width - one.shape[1]), value=pads.get(name, 0)) for one in tensors]
        )

    return Batch(
        input_ids=padded("input_ids"),
        attention_mask=padded("attention_mask"),
        targets=padded("targets"),
        target_bytes=padded("target_bytes"),
        sample_ids=tuple(name for batch in batches for name in batch.sample_ids),
        index=batches[0].index,
        documents=tuple(name for batch in batches for name in batch.documents),
        segments=padded("segments") if is_packed else None,
        sources=tuple(name for batch in batches for name in batch.sources),
        **_stacked_pair(batches, padded),
    )


def _stacked_pair(batches: Sequence[Batch], padded: Callable[[str], Tensor]) -> dict[str, Any]:
    """The teacher's rows of all batches as one, and the spans; nothing where it reads the student's."""
    has_others = any(batch.other is not None for batch in batches)
    others = [batch.other or batch for batch in batches] if has_others else []
    found: dict[str, Any] = {"other": _stacked(others, _OTHER_PADS)} if others else {}
    names = [name for name in ("spans", "is_exact") if getattr(batches[0], name) is not None]
    return found | {name: padded(name) for name in names}


# -- order of the rows in an epoch -------------------------------------------------------------------------------

# Batches of rows of about equal length.
#
# The order of an epoch is cut into stretches of many batches, each stretch is sorted by length and cut into batches,
# and the batches are put into random order. So a window still has short and long rows, and only batches are alike
# inside.

_BATCHES_SORTED = 64  # batches of a stretch: more leave less padding and less chance


def grouped(order: Ints, lengths: Ints, batch_size: int, rng: np.random.Generator) -> Ints:
    """The same rows, those of a batch of about equal length. The last batch, if partial, stays the last.

    `lengths` has the length of each row that `order` may name.
    """
    result = order.copy()
    for start in range(0, len(order), batch_size * _BATCHES_SORTED):
        stretch = order[start : start + batch_size * _BATCHES_SORTED]
        in_order = stretch[np.argsort(lengths[stretch], kind="stable")]
        num_whole = len(in_order) // batch_size * batch_size
        batches = in_order[:num_whole].reshape(-1, batch_size)
        result[start : start + num_whole] = batches[rng.permutation(len(batches))].reshape(-1)
        result[start + num_whole : start + len(in_order)] = in_order[num_whole:]
    return result


# Rows from short to long: what a run sees first if `data.order` is "short_first".
#
# Of the first epoch, which is in random order, the first rows are sorted by length and cut into a few buckets, and
# the rows of a bucket are put into random order again. So a bucket has no row that is shorter than one of the bucket
# before, and its batches are not all of one length. The other rows, and all later epochs, stay in random order: an
# epoch has each row once, and a run does not end with its longest rows.
#
# A curriculum by difficulty, with length as the measure: Platanios et al., 2019.

_NUM_BUCKETS = 20


def buckets(in_order: Ints, batch_size: int) -> list[Ints]:
    """Cut an order into at most 20 stretches of whole batches, of about equal size."""
    num_batches = -(-len(in_order) // batch_size)
    size = batch_size * max(1, -(-num_batches // _NUM_BUCKETS))
    return [in_order[start : start + size] for start in range(0, len(in_order), size)]


def ramp(order: Ints, longest: Ints, batch_size: int, rng: np.random.Generator) -> list[Ints]:
    """The same rows from short to long, in buckets, in random order inside of each.

    `longest` is the length that each row goes by. Rows of one length are in the order in which they came.
    """
    in_order: Ints = order[np.argsort(longest[order], kind="stable")]
    return [rng.permutation(bucket) for bucket in buckets(in_order, batch_size)]


def arranged(
    order: Ints,
    lengths: Ints | None,
    longest: Ints | None,
    *,
    num_first: int,
    batch_size: int,
    rng: np.random.Generator,
) -> Ints:
    """The order of an epoch: `num_first` rows from short to long by `longest`, then the others.

    With `lengths`, the rows of a batch are of about equal length too.
    """
    stretches = [order[num_first:]]
    if num_first:
        assert longest is not None
        stretches = [*ramp(order[:num_first], longest, batch_size, rng), *stretches]
    if lengths is not None:
        stretches = [grouped(stretch, lengths, batch_size, rng) for stretch in stretches]
    return np.concatenate(stretches)


class Loader:
    """`window(index)` is a pure function of the rows, the sizes, the seed and the index.

    The permutation of one epoch is cached; it is not state. Threads may share a loader.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        initial_world_size: int = 0,
        groups_lengths: bool = False,
    ) -> None:
        if batch_size < 1 or accumulation < 1 or seed < 0:
            raise ConfigError(
                f"batch_size {batch_size}, accumulation {accumulation} and seed {seed} do not make a loader",
                advice=["batch size and accumulation start at 1, the seed at 0"],
            )
        if not 0 <= rank < num_ranks:
            raise ConfigError(
                f"process {rank} of {num_ranks} does not make a loader",
                advice=["processes are counted from 0, as RANK and WORLD_SIZE of torchrun are"],
            )
        if not len(rows):
            raise DataError("there is no row to train on", where="data.train", advice=["give a spec with more text"])
        self._rows = rows
        self._batch_size = batch_size
        self._accumulation = accumulation * (initial_world_size or num_ranks)  # over all processes
        self._rank = rank
        self._num_ranks = num_ranks
        self._seed = seed
        self._groups_lengths = groups_lengths
        self._kept: tuple[int, Ints] | None = None
        self._num_short_first = 0  # micro-batches

    def short_first(self, num_windows: int) -> Loader:
        """The same loader with the rows of the first windows from short to long; at most those of the first epoch."""
        _check_lengths_differ(self._rows)
        other = copy.copy(self)
        other._kept = None
        other._num_short_first = min(num_windows * self._accumulation, self.num_batches)
        return other

    @property
    def num_batches(self) -> int:
        """Micro-batches in one epoch."""
        if isinstance(self._rows, MixedRows):
            return self._rows.num_batches(self._batch_size)
        return -(-len(self._rows) // self._batch_size)

    @property
    def num_windows(self) -> int:
        """Optimizer steps in one epoch."""
        return -(-self.num_batches // self._accumulation)

    def window(self, index: int) -> list[Batch]:
        """This process's micro-batches of optimizer step `index`.

        If a partial window has none for it, one with nothing to score, so that the process takes part in the step.
        """
        if self._num_ranks == 1:
            return self.whole_window(index)
        whole = self.whole_window(index)
        return whole[self._rank :: self._num_ranks] or [whole[0].without_targets()]

    def whole_window(self, index: int) -> list[Batch]:
        """The micro-batches of all processes for optimizer step `index`, counted from 0 over all epochs."""
        if index < 0:
            raise IndexError(f"window {index}: windows are counted from 0")
        epoch, place = divmod(index, self.num_windows)
        first = place * self._accumulation
        last = min(first + self._accumulation, self.num_batches)
        return [self._batch(epoch, number) for number in range(first, last)]

    def known(self, index: int) -> bool:
        """Whether everything that window `index` is made of is there. Who reads ahead asks first."""
        return True

    def upcoming(self, index: int) -> list[Batch]:
        """The window, or nothing while it is not known."""
        return self.window(index) if self.known(index) else []

    def first_window(self) -> list[Batch]:
        """A window to try models on before the run begins."""
        return self.window(0)

    def epochs(self, cursor: int) -> float:
        """How often the data was seen after `cursor` windows."""
        return cursor / self.num_windows

    def _batch(self, epoch: int, number: int) -> Batch:
        start = number * self._batch_size
        if isinstance(self._rows, MixedRows):
            share = self._num_short_first / self.num_batches
            chosen = self._rows.epoch(
                self._seed,
                epoch,
                self._batch_size,
                groups_lengths=self._groups_lengths,
                share_short_first=share,
            )[number]
        else:
            chosen = self._order(epoch)[start : start + self._batch_size]
        return self._rows.batch(chosen, index=epoch * self.num_batches + number)

    def _order(self, epoch: int) -> Ints:
        kept = self._kept  # read once: another thread may replace it by another epoch's
        if kept is None or kept[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            num_first = 0 if epoch else self._num_short_first * self._batch_size
            order = arranged(
                rng.permutation(len(self._rows)),
                self._rows.lengths if self._groups_lengths else None,
                self._rows.longest if num_first else None,
                num_first=num_first,
                batch_size=self._batch_size,
                rng=rng,
            )
            self._kept = kept = (epoch, order)
        return kept[1]


def _check_lengths_differ(rows: Rows) -> None:
    if int(rows.longest.min()) == int(rows.longest.max()):
        raise ConfigError(
            f"data.order is short_first, and all {len(rows):,} rows have the same length",
            where="data.order",
            advice=["set data.order = 'shuffled'", "data.packing = 'rows' keeps records of different lengths apart"],
        )


def fixed_rows(rows: Rows, batch_size: int, max_batches: int = 0) -> list[int]:
    """The rows that `fixed_batches` takes."""
    if batch_size < 1 or max_batches < 0:
        raise ConfigError(
            f"batch size {batch_size} with at most {max_batches} batches is not possible",
            advice=["a batch has at least one row; 0 batches means all"],
        )
    num_rows = min(len(rows), max_batches * batch_size) if max_batches else len(rows)
    return [number * len(rows) // num_rows for number in range(num_rows)]


def fixed_batches(rows: Rows, batch_size: int, max_batches: int = 0) -> Iterator[Batch]:
    """The rows in order, for evaluation: the same batches every time.

    `max_batches` 0 means all. A limit takes rows evenly spread over the whole, because the first ones may all
    come from one document.
    """
    chosen = fixed_rows(rows, batch_size, max_batches)
    for number in range(-(-len(chosen) // batch_size)):
        yield rows.batch(chosen[number * batch_size : (number + 1) * batch_size], index=number)
