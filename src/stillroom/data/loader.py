"""The order of the training rows: seeded, and resumable from one integer.

An epoch is a permutation of the rows, cut into micro-batches and these into windows, one for each optimizer
step. Windows never cross epochs: the last window of an epoch may have fewer micro-batches, and the last
micro-batch fewer rows, but no row is left out. 9,353 rows with batch size 1 and accumulation 8 are 1,170
steps an epoch, the last with one micro-batch.

With `groups_lengths` the rows of a batch are of about equal length (`mixing.grouped`); after `short_first` the
first windows go from short rows to long ones (`mixing.ramp`).

Several processes share each window: process r of n takes every nth micro-batch from the rth on. Together they read in
the order of one process with n times the accumulation. `num_shares` is the number of processes that the run began
with: one that goes on with another number has the same windows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import Batch
from stillroom.data.mixing import MixedRows, arranged
from stillroom.data.packing import Rows
from stillroom.data.tokenize import Ints


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
        num_shares: int = 0,
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
            raise DataError("there is no row to train on", advice=["give data.train a spec with more text"])
        self._rows = rows
        self._batch_size = batch_size
        self._accumulation = accumulation * (num_shares or num_ranks)  # over all processes
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
