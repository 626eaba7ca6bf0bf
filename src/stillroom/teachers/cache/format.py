"""A shard: the answers to some rows in one file that says what it holds and notices when it was changed.

    magic                      24 bytes
    length of the header       8 bytes, little endian
    header                     JSON: which cache it belongs to, how many rows, positions and bytes, what was counted
    index                      40 bytes a row, by key: key, place and length of its block, positions, checksum
    checksum of all the above  16 bytes
    blocks                     one a row

A block's checksum is taken over the row's key and the bytes, so a block under another row's key is noticed as well as a
changed one. Blocks are read by their place and not mapped: a mapped file that is cut short would end the process.

A block is the answer to one row, without loss. What is alike stands together: all first ranks, then all second ranks;
all high bytes, then all low ones. Log-probs of a position only fall from rank to rank, so their differences are stored;
drawn ids only rise, so are theirs, and an id that was drawn more often stands once, with its count. FP32 surprisals
stand at the end, where they are kept, byte by byte as well. Then zlib takes out what repeats.

Legend: N scored positions, M exact tokens, U different tokens that were drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.core.errors import CacheDamaged
from stillroom.core.files import reason_of
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


# -- files of shards ---------------------------------------------------------------------------------------


MAGIC = b"stillroom cache shard 1\n"
SUFFIX = ".shard"
_INDEX = np.dtype([("key", "u1", 16), ("place", "<u8"), ("length", "<u4"), ("positions", "<u4"), ("sum", "u1", 8)])
_HEAD_SUM = 16
_MAX_HEADER = 1 << 20
_COUNTS = ("rows", "positions", "blocks_bytes")

REPAIR = "delete that file; `stillroom cache CONFIG --out DIR` then writes its rows again and keeps all others"


@dataclass(frozen=True)
class Block:
    """A row's answer as it is stored."""

    key: bytes  # 16 bytes
    num_positions: int
    packed: bytes


def block_sum(key: bytes, packed: bytes | memoryview) -> bytes:
    return hashlib.blake2b(packed, digest_size=8, key=key).digest()


def shard_bytes(store: str, blocks: Sequence[Block], counters: Mapping[str, float]) -> bytes:
    """The whole file. The same blocks give the same bytes, in whatever order they are given."""
    blocks = sorted(blocks, key=lambda block: block.key)
    index = np.zeros(len(blocks), _INDEX)
    place = 0
    for row, block in enumerate(blocks):
        index[row]["key"] = np.frombuffer(block.key, np.uint8)
        index[row]["sum"] = np.frombuffer(block_sum(block.key, block.packed), np.uint8)
        index[row]["place"], index[row]["length"] = place, len(block.packed)
        index[row]["positions"] = block.num_positions
        place += len(block.packed)
    header = {
        "store": store,
        "rows": len(blocks),
        "positions": sum(block.num_positions for block in blocks),
        "blocks_bytes": place,
        "counters": dict(sorted(counters.items())),
    }
    told = json.dumps(header, sort_keys=True, allow_nan=False).encode("ascii")
    head = MAGIC + len(told).to_bytes(8, "little") + told + index.tobytes()
    checksum = hashlib.blake2b(head, digest_size=_HEAD_SUM).digest()
    return b"".join([head, checksum, *(block.packed for block in blocks)])


def head_length(begin: bytes) -> int:
    """How many bytes the head has of a shard that begins so; 0 where it is none."""
    place = len(MAGIC) + 8
    length = int.from_bytes(begin[len(MAGIC) : place], "little")
    if not begin.startswith(MAGIC) or length > _MAX_HEADER:
        return 0
    if len(begin) < place + length:
        return place + length  # asked for again with so many, it tells
    try:
        rows = int(json.loads(begin[place : place + length])["rows"])
    except (ValueError, KeyError, TypeError):
        return 0
    return place + length + rows * _INDEX.itemsize + _HEAD_SUM


class Shard:
    """A shard on disk whose header and index were checked. Blocks are read one at a time, and checked then."""

    def __init__(self, path: Path, store: str | None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.header, self.index, self._start = _read_head(path, file, size)
        except OSError as error:
            raise CacheDamaged(f"{path} cannot be read: {reason_of(error)}", advice=["check the disk"]) from error
        end = self._start + int(self.header["blocks_bytes"])
        if size != end:
            raise damaged(path, f"has {size:,} bytes instead of {end:,}: it was cut short or written over")
        if store is not None and self.header["store"] != store:
            raise CacheDamaged(
                f"{path} belongs to another cache: it was made with other settings or by another teacher",
                advice=[REPAIR, "shards of different caches cannot be put together"],
            )
        self.keys = np.ascontiguousarray(self.index["key"]).reshape(-1, 16)

    @property
    def num_rows(self) -> int:
        return len(self.index)

    @property
    def num_bytes(self) -> int:
        return self._start + int(self.header["blocks_bytes"])

    def block(self, handle: int, row: int) -> tuple[bytes, int]:
        """The bytes of a row and how many positions they answer. `handle` is the open file."""
        entry = self.index[row]
        length = int(entry["length"])
        try:
            packed = os.pread(handle, length, self._start + int(entry["place"]))
        except OSError as error:
            raise damaged(self.path, f"row {row} cannot be read: {reason_of(error)}") from error
        key = entry["key"].tobytes()
        if len(packed) != length or block_sum(key, packed) != entry["sum"].tobytes():
            raise damaged(self.path, f"row {row} ({key.hex()}) is not what was written: its checksum does not hold")
        return packed, int(entry["positions"])


def damaged(path: Path, what: str) -> CacheDamaged:
    return CacheDamaged(f"shard {path.name}: {what}", where=str(path), advice=[REPAIR, "or restore it from a copy"])


def _read_head(path: Path, file: Any, size: int) -> tuple[dict[str, Any], npt.NDArray[Any], int]:
    """(header, index, where the blocks begin), once their checksum holds."""
    begin = file.read(len(MAGIC) + 8)
    if not begin.startswith(MAGIC) or len(begin) < len(MAGIC) + 8:
        raise damaged(path, "is not a shard of a teacher cache, or its first bytes were changed")
    length = int.from_bytes(begin[len(MAGIC) :], "little")
    told = file.read(length) if length <= min(size, _MAX_HEADER) else b""
    try:
        header = json.loads(told)
        rows = int(header["rows"])
        if not all(int(header[name]) >= 0 for name in _COUNTS) or rows * _INDEX.itemsize > size:
            raise ValueError
        index_bytes = file.read(rows * _INDEX.itemsize)
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "has a header that was changed") from None
    head = begin + told + index_bytes
    if file.read(_HEAD_SUM) != hashlib.blake2b(head, digest_size=_HEAD_SUM).digest():
        raise damaged(path, "has a header or an index that was changed, or was cut short")
    return header, np.frombuffer(index_bytes, _INDEX), len(head) + _HEAD_SUM
