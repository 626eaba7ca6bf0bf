"""The answer to one row as bytes, and back, without loss.

What is alike stands together: all first ranks, then all second ranks; all high bytes, then all low ones. Log-probs of a
position only fall from rank to rank, so their differences are stored; drawn ids only rise, so are theirs, and an id
that was drawn more often stands once, with its count. FP32 surprisals stand at the end, where they are kept, byte by
byte as well. Then zlib takes out what repeats.

Legend: N scored positions, M exact tokens, U different tokens that were drawn.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.teachers.signals import Ids, RowAnswer, SignalSpec

_LEVEL = 6

Bytes = npt.NDArray[np.uint8]


def id_bytes(vocab_size: int) -> int:
    """Bytes that hold every id of a vocabulary."""
    return max(1, ((vocab_size - 1).bit_length() + 7) // 8)


def pack(answer: RowAnswer, size: int) -> bytes:
    """`size` is the bytes of an id."""
    unique, counts, numbers = _without_repeats(answer.drawn)
    falls: npt.NDArray[Any] = np.diff(answer.log_probs.astype(np.int32), axis=1, prepend=0)
    planes = [
        *_planes(answer.ids.T, size),
        *_planes(falls.T, 2),
        *(plane for column in (answer.tail, answer.entropy, answer.label) for plane in _planes(column, 2)),
        numbers,
        *_planes(unique, size),
        counts,
        *_planes(answer.surprisals.view(np.uint32), 4),
    ]
    return zlib.compress(b"".join(plane.astype(np.uint8).tobytes() for plane in planes), _LEVEL)


def unpack(packed: bytes | memoryview, num_positions: int, spec: SignalSpec, size: int) -> RowAnswer:
    """The answer that `pack` was given. Raises ValueError where the bytes cannot be one."""
    try:
        raw = np.frombuffer(zlib.decompress(packed), np.uint8)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    reader = _Reader(raw)
    exact = num_positions * spec.exact
    ids = reader.numbers(exact, size).reshape(spec.exact, num_positions).T
    falls = reader.numbers(exact, 2).reshape(spec.exact, num_positions).T
    tail, entropy, label = (reader.numbers(num_positions, 2).astype(np.uint16) for _ in range(3))
    numbers = reader.numbers(num_positions if spec.draws else 0, 1)
    num_unique = int(numbers.sum())
    unique, counts = reader.numbers(num_unique, size), reader.numbers(num_unique, 1)
    surprisals = reader.numbers(num_positions if spec.is_paired else 0, 4)
    if reader.place != len(raw):
        raise ValueError(f"{len(raw):,} bytes where {reader.place:,} belong")
    return RowAnswer(
        ids=np.ascontiguousarray(ids, np.int32),
        log_probs=(np.cumsum(falls, axis=1) & 0xFFFF).astype(np.uint16),
        tail=tail,
        entropy=entropy,
        label=label,
        drawn=_with_repeats(unique, counts, numbers, num_positions, spec.draws),
        surprisals=surprisals.view(np.float32),
    )


def _planes(numbers: npt.NDArray[Any], size: int) -> Sequence[npt.NDArray[Any]]:
    """Numbers byte by byte, the highest first."""
    return [(numbers >> (8 * place)) & 0xFF for place in reversed(range(size))]


class _Reader:
    """Takes planes from the front."""

    def __init__(self, raw: Bytes) -> None:
        self._raw = raw
        self.place = 0

    def numbers(self, count: int, size: int) -> npt.NDArray[np.int32]:
        end = self.place + count * size
        if end > len(self._raw):
            raise ValueError(f"{len(self._raw):,} bytes, and more belong to it")
        planes = self._raw[self.place : end].reshape(size, count).astype(np.int32)
        self.place = end
        found: npt.NDArray[np.int32] = planes[0]
        for plane in planes[1:]:
            found = (found << 8) | plane
        return found


def _without_repeats(drawn: Ids) -> tuple[npt.NDArray[Any], Bytes, Bytes]:
    """(rises from one different id to the next [U], how often each was drawn [U], how many each position has [N])."""
    if not drawn.shape[1]:
        nothing = np.zeros(0, np.uint8)
        return np.zeros(0, np.int32), nothing, nothing
    is_first = np.ones(drawn.shape, np.bool_)
    is_first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    places = np.flatnonzero(is_first)
    counts = np.diff(np.append(places, drawn.size))
    unique = drawn.reshape(-1)[places]
    begins = is_first.cumsum(axis=None).reshape(drawn.shape)[:, 0] - 1
    rises = np.diff(unique, prepend=0)
    rises[begins] = unique[begins]
    return rises, counts.astype(np.uint8), is_first.sum(axis=1).astype(np.uint8)


def _with_repeats(
    rises: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    numbers: npt.NDArray[np.int32],
    num_positions: int,
    num_draws: int,
) -> Ids:
    if not num_draws:
        return np.zeros((num_positions, 0), np.int32)
    if counts.sum() != num_positions * num_draws or (num_positions and numbers.min() < 1):
        raise ValueError("the drawn tokens are not as many as were drawn")
    sums = np.cumsum(rises, dtype=np.int64)
    begins = np.cumsum(numbers) - numbers
    before = np.repeat(sums[begins] - rises[begins], numbers)
    drawn: Ids = np.repeat(sums - before, counts).astype(np.int32).reshape(num_positions, num_draws)
    return drawn
