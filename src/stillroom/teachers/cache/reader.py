"""A cache on disk: which rows it answers, and their answers. Nothing here changes what is there.

Shards of a cache in a store are brought when a row of them is asked for (`in_store.py`).

Stateless by key: whoever asks for a row, in whatever order and how often, gets that row's answer or an error.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stillroom.core.errors import CacheDamaged, StillroomError
from stillroom.core.files import TEMPORARY, reason_of
from stillroom.core.types import Batch, Needs, Signal
from stillroom.teachers.base import SignalKind, Teacher, Window
from stillroom.teachers.cache.format import SUFFIX, Shard, damaged, unpack
from stillroom.teachers.cache.in_store import Origin
from stillroom.teachers.cache.manifest import SHARDS, Manifest, read_manifest
from stillroom.teachers.quantize import SUMMARY as QUANTISATION
from stillroom.teachers.signals import RowAnswer, label_metrics, signal_of
from stillroom.teachers.sparse import describe, each_tensor, kind_of_spec, to_device

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


# -- teacher ---------------------------------------------------------------------------------------
# A teacher whose answers were stored: no network is loaded, and rows are looked up by their content.


Rows = dict[str, RowAnswer]

_LEAST_MASS = 0.98  # of a renormalised distribution: below it the student learns that likely tokens cannot come


class CachedTeacher(Teacher):
    """Reads a window ahead in its own thread, so that a step does not wait for the disk.

    It keeps what it read for the present window and for the next one, and nothing else; what was not read ahead is read
    when it is asked for. A row that the cache does not know (the data was changed after the cache was checked) has an
    unusable answer: the student is scored on its labels, and the row is counted with those whose teacher is at fault.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        device: torch.device,
        window: Window | None = None,
        load_whole: Callable[[], Teacher] | None = None,
    ) -> None:
        spec = cache.manifest.signal
        self.cache, self.spec = cache, spec
        self.kind: SignalKind = kind_of_spec(spec)
        self.num_exact = spec.exact
        self.notes = _notes(cache, is_loaded_at_end=load_whole is not None)
        self._load_whole = load_whole
        self._whole: Teacher | None = None
        self._device = device
        self._window = window
        self._ahead: dict[str, Future[Rows]] = {}  # by the key of a row: the rows of its batch
        self._reader: ThreadPoolExecutor | None = None
        self._num_unknown = 0

    @property
    def original(self) -> Teacher:
        """The stored answers, or the teacher itself where it was asked for: it is loaded here, once."""
        if self._load_whole is None:
            return self
        if self._whole is None:
            self._whole = self._load_whole()
        return self._whole

    def close(self) -> None:
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        self.cache.close()

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal:
        """A batch may be part of one that was read ahead: rows are looked for one by one."""
        read = {key: self._ahead[key].result()[key] for key in batch.keys if key in self._ahead}
        if len(read) < len(set(batch.keys)):
            read |= self._read(batch)
        signal = signal_of(RowAnswer.join([read[key] for key in batch.keys]), self.spec)
        if self._device.type == "cuda":
            signal = each_tensor(signal, lambda one: one.pin_memory())
        return to_device(signal, self._device)

    def _read(self, batch: Batch) -> Rows:
        places = (batch.positions // batch.targets.shape[1]).cpu().numpy()
        counts = np.bincount(places, minlength=len(batch.keys))
        return {key: self._answer(key, int(count)) for key, count in zip(batch.keys, counts, strict=True)}

    def _answer(self, key: str, num_scored: int) -> RowAnswer:
        if num_scored == 0:
            return RowAnswer.unusable(0, self.spec)
        try:
            return self.cache.answer(key)
        except KeyError:
            self._num_unknown += num_scored
            return RowAnswer.unusable(num_scored, self.spec)

    # -- reading ahead -----------------------------------------------------------------------------------

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        if self._reader is None:
            self._num_unknown = 0  # trials before the first window may ask for rows of no data
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="stillroom-cache")
        upcoming = self._window(cursor + 1) if self._window is not None else ()
        batches = (*window, *upcoming)
        wanted = {key for batch in batches for key in batch.keys}
        for key in [known for known in self._ahead if known not in wanted]:
            self._ahead.pop(key)
        for batch in batches:
            if any(key not in self._ahead for key in batch.keys):
                self._ahead |= dict.fromkeys(batch.keys, self._reader.submit(self._read, batch))

    # -- what it knows of itself -------------------------------------------------------------------------

    def own_metrics(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Perplexity and bits per byte, from the stored log-probabilities of the targets."""
        if not self.cache.manifest.about.get("labels", True):
            return None
        known = [(batch.keys, self._read(batch)) for batch in batches]
        answers = [rows[key] for keys, rows in known for key in keys]
        parameters = self.cache.manifest.about.get("parameters")
        return label_metrics(answers, batches, parameters=parameters, source="stored answers")

    def summary(self) -> dict[str, Any]:
        about = self.cache.manifest.about
        return {
            **({QUANTISATION: about[QUANTISATION]} if QUANTISATION in about else {}),
            "teacher_signal": {
                **self.spec.to_dict(),
                "cache": str(self.cache.folder),
                "mean_mass": self.cache.mean_mass,
                "unknown_positions": self._num_unknown,
            },
        }


def _notes(cache: Cache, *, is_loaded_at_end: bool) -> tuple[str, ...]:
    spec = cache.manifest.signal
    told = [
        f"the teacher is not loaded: {cache.folder} holds {describe(spec)}, for {cache.num_rows:,} rows",
        "held-out KL per byte is taken from the stored probabilities of the targets, which are whole"
        if spec.is_paired
        else "held-out KL and agreement are taken from the stored answers, not from the whole vocabulary: "
        + _what_kl_means(spec.kind, spec.temperature),
    ]
    if is_loaded_at_end:
        told.append("the finished student is compared with the teacher itself, which is loaded for it at the end")
    if spec.kind == "renormalised":
        mass = cache.mean_mass or 0.0
        harm = "less than 0.98, and the student will be overconfident" if mass < _LEAST_MASS else "close enough to 1"
        told.append(f"renormalised answers: the stored tokens hold {mass:.4f} of the teacher's mass on average, {harm}")
    if unusable := int(cache.counters.get("unusable", 0)):
        told.append(f"{unusable:,} positions of the cache have no usable answer: they are scored on their labels")
    if floored := int(cache.counters.get("floored", 0)):
        told.append(f"{floored:,} stored log-probabilities are below -255 and are kept as -255")
    return tuple(told)


def _what_kl_means(kind: str, temperature: float) -> str:
    if temperature != 1.0:
        return f"none, because they are at temperature {temperature:g} and metrics are at 1"
    return {
        "top_k": "KL over kept tokens and tail, a lower bound",
        "sampled": "KL is an unbiased estimate, agreement is not known",
        "hybrid": "KL is an unbiased estimate",
        "renormalised": "KL to the renormalised tokens",
    }[kind]
