"""A cache on disk: which rows it answers, and their answers. Nothing here changes what is there.

Shards of a cache in a store are brought when a row of them is asked for (`in_store.py`).

Stateless by key: whoever asks for a row, in whatever order and how often, gets that row's answer or an error.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stillroom.errors import CacheDamaged, StillroomError
from stillroom.files import TEMPORARY, reason_of
from stillroom.teachers.cache.format import SUFFIX, Shard, damaged, unpack
from stillroom.teachers.cache.in_store import Origin
from stillroom.teachers.cache.manifest import SHARDS, Manifest, read_manifest
from stillroom.teachers.signals import RowAnswer

_OPEN_FILES = 64

Keys = npt.NDArray[np.uint64]


class Cache:
    """The shards of a folder that were there when it was opened, with their headers and indexes checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.shards = [Shard(path, self.manifest.store) for path in shard_paths(folder)]
        self._keys, self._places = _sorted(self.shards)
        self._lock = threading.Lock()
        self._handles: OrderedDict[int, int] = OrderedDict()
        self._origin = Origin.of(folder)

    def close(self) -> None:
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_handles"):  # of a cache that was opened and not closed, as after an error
            self.close()

    # -- what it holds -----------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return len(self._keys)

    @property
    def num_positions(self) -> int:
        return sum(int(shard.header["positions"]) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def counters(self) -> dict[str, float]:
        """What was counted while it was written, over all shards."""
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(shard.header["counters"])
        return dict(total)

    @property
    def mean_mass(self) -> float | None:
        """What the stored top tokens hold of the teacher's distribution, on average."""
        positions = self.num_positions
        return self.counters.get("mass", 0.0) / positions if positions and self.manifest.signal.exact else None

    def has(self, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """For each key, whether its row is answered."""
        found: npt.NDArray[np.bool_] = self._find(keys) >= 0
        return found

    # -- answers -----------------------------------------------------------------------------------------

    def answer(self, key: str) -> RowAnswer:
        """The answer to a row. KeyError where there is none; CacheDamaged where it is not what was written."""
        place = int(self._find([key])[0])
        if place < 0:
            raise KeyError(key)
        number, row = (int(value) for value in self._places[place])
        return self._read(number, row)

    def _read(self, number: int, row: int) -> RowAnswer:
        shard = self.shards[number]
        packed, num_positions = self._block(number, row)
        try:
            return unpack(packed, num_positions, self.manifest.signal, self.manifest.id_bytes)
        except ValueError as error:  # written wrong, because what was read is what was written
            raise damaged(shard.path, f"row {row} cannot be unpacked: {error}") from error

    def _block(self, number: int, row: int) -> tuple[bytes, int]:
        with self._lock:
            handle = self._handles.get(number)
            if handle is None:
                handle = self._open(number)
            self._handles[number] = handle
            self._handles.move_to_end(number)
            return self.shards[number].block(handle, row)

    def _open(self, number: int) -> int:
        if len(self._handles) >= _OPEN_FILES:
            os.close(self._handles.popitem(last=False)[1])
        path = self.shards[number].path
        if self._origin is not None:
            self._origin.fetch(path)
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CacheDamaged(
                f"{path} is gone: {reason_of(error)}", advice=["leave a cache alone while it is used"]
            ) from error

    def _find(self, keys: Sequence[str]) -> npt.NDArray[np.int64]:
        """Places of keys in the sorted table, -1 where they are not."""
        wanted = np.frombuffer(bytes.fromhex("".join(keys)), ">u8").reshape(-1, 2).astype(np.uint64)
        if not len(self._keys):
            return np.full(len(wanted), -1, np.int64)
        places = np.searchsorted(self._keys[:, 0], wanted[:, 0])
        last = np.searchsorted(self._keys[:, 0], wanted[:, 0], side="right")
        found = np.full(len(wanted), -1, np.int64)
        for number, (place, end) in enumerate(zip(places, last, strict=True)):
            same = np.flatnonzero(self._keys[place:end, 1] == wanted[number, 1])
            if len(same):
                found[number] = place + int(same[0])
        return found

    # -- looking at all of it ----------------------------------------------------------------------------

    def faults(self) -> Iterator[StillroomError]:
        """Every row that is not what was written."""
        for number, shard in enumerate(self.shards):
            for row in range(shard.num_rows):
                try:
                    self._read(number, row)
                except CacheDamaged as error:
                    yield error


def shard_paths(folder: Path) -> list[Path]:
    place = folder / SHARDS
    return sorted(path for path in place.glob(f"*{SUFFIX}") if not path.name.startswith(TEMPORARY))


def damaged_shards(folder: Path) -> Iterator[StillroomError]:
    """Shards whose header, index or size is wrong: with one of them a cache does not open at all."""
    store = read_manifest(folder).store
    for path in shard_paths(folder):
        try:
            Shard(path, store)
        except CacheDamaged as error:
            yield error


def _sorted(shards: Iterable[Shard]) -> tuple[Keys, npt.NDArray[np.int64]]:
    """Keys as two big-endian numbers [R, 2], ascending and each once, and (shard, row) of each [R, 2]."""
    keys = [shard.keys for shard in shards]
    if not keys:
        return np.zeros((0, 2), np.uint64), np.zeros((0, 2), np.int64)
    numbers = np.concatenate(keys).view(">u8").astype(np.uint64)
    places = np.concatenate(
        [np.stack([np.full(len(part), number), np.arange(len(part))], axis=1) for number, part in enumerate(keys)]
    )
    order = np.lexsort((numbers[:, 1], numbers[:, 0]))
    numbers, places = numbers[order], places[order]
    is_new = np.ones(len(numbers), np.bool_)
    is_new[1:] = (numbers[1:] != numbers[:-1]).any(axis=1)
    return numbers[is_new], places[is_new].astype(np.int64)
