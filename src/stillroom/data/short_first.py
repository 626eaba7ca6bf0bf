"""Rows from short to long: what a run sees first if `data.order` is "short_first".

Of the first epoch, which is in random order, the first rows are sorted by length and cut into a few buckets, and the
rows of a bucket are put into random order again. So a bucket has no row that is shorter than one of the bucket before,
and its batches are not all of one length. The other rows, and all later epochs, stay in random order: an epoch has each
row once, and a run does not end with its longest rows.

A curriculum by difficulty, with length as the measure: Platanios et al., 2019.
"""

from __future__ import annotations

import numpy as np

from stillroom.data.encoded import Ints
from stillroom.data.grouping import grouped

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
