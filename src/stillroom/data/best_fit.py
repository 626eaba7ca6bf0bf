"""Best-fit packing of pieces into rows, with the longest first.

Each piece goes into the row with the least room that still takes it, or into a new one. The result needs at most 11/9
of the fewest possible rows (Johnson, 1973). Pieces of one length are placed together, so the work grows with the
number of lengths and not of pieces.

# P pieces, R rows
"""

from __future__ import annotations

import numpy as np

from stillroom.data.encoded import Ints, Numbers


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
