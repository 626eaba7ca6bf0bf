"""Batches of rows of about equal length.

The order of an epoch is cut into stretches of many batches, each stretch is sorted by length and cut into batches, and
the batches are put into random order. So a window still has short and long rows, and only batches are alike inside.
"""

from __future__ import annotations

import numpy as np

from stillroom.data.encoded import Ints

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
