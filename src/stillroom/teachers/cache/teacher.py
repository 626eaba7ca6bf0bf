"""A teacher whose answers were stored: no network is loaded, and rows are looked up by their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from stillroom.teachers.base import SignalKind, Teacher
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.quantised import SUMMARY as QUANTISATION
from stillroom.teachers.signals import RowAnswer, label_yardsticks, signal_of
from stillroom.teachers.sparse import describe, each_tensor, kind_of_spec, to_device
from stillroom.types import Batch, Needs, Signal

Rows = dict[str, RowAnswer]
Window = Callable[[int], Sequence[Batch]]

_LEAST_MASS = 0.98  # of a renormalised distribution: below it the student learns that likely tokens cannot come


class CachedTeacher(Teacher):
    """Reads a window ahead in a thread of its own, so that a step does not wait for the disk.

    It keeps what it read for the window at hand and for the next one, and nothing else; what was not read ahead is read
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

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Perplexity and bits per byte, from the stored log-probabilities of the targets."""
        if not self.cache.manifest.about.get("labels", True):
            return None
        known = [(batch.keys, self._read(batch)) for batch in batches]
        answers = [rows[key] for keys, rows in known for key in keys]
        parameters = self.cache.manifest.about.get("parameters")
        return label_yardsticks(answers, batches, parameters=parameters, source="stored answers")

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
        return f"none, because they are at temperature {temperature:g} and yardsticks are at 1"
    return {
        "top_k": "KL over kept tokens and tail, a lower bound",
        "sampled": "KL is an unbiased estimate, agreement is not known",
        "hybrid": "KL is an unbiased estimate",
        "renormalised": "KL to the renormalised tokens",
    }[kind]
