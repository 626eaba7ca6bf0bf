"""A teacher that reads the text in its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stillroom.data.spans.common import Coverage
from stillroom.errors import ConfigError
from stillroom.models import Student
from stillroom.teachers.base import SignalKind, Teacher
from stillroom.teachers.live import LiveTeacher
from stillroom.types import Batch, Needs, PairedSignal

# What a model's results on its own tokens say of the text, and not of how it is cut into tokens.
_PER_BYTE = ("bits_per_byte", "parameters", "documents")


class PairedTeacher(Teacher):
    """A live teacher of another tokenizer. It answers a batch on the rows that stand beside the student's."""

    kind: SignalKind = "paired"

    def __init__(self, inner: LiveTeacher, tokenizer: Any, coverage: Coverage) -> None:
        self._inner = inner
        self.notes = inner.notes
        self.writes_text = inner.writes_text
        self.tokenizer = tokenizer
        self._coverage = coverage

    def observe(self, batch: Batch, needs: Needs) -> PairedSignal:
        signal = self._inner.observe(self.own_batch(batch), needs)
        return PairedSignal(signal.hidden, signal.head, signal.taps)

    def own_batch(self, batch: Batch) -> Batch:
        if batch.other is None:
            raise ConfigError(
                "the teacher has a tokenizer of its own, and a batch has no rows for it",
                where="data.train",
                advice=["open the data with both tokenizers"],
            )
        return batch.other

    def comparable(self, yardsticks: dict[str, Any]) -> dict[str, Any]:
        """Perplexity and the like are means over tokens, and its tokens are others."""
        intervals = {name: ends for name, ends in yardsticks["intervals"].items() if name in _PER_BYTE}
        kept = {name: value if name in _PER_BYTE else None for name, value in yardsticks.items()}
        return {**kept, "intervals": intervals}

    def as_model(self) -> Student:
        return self._inner.as_model()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._inner.at_work():
            yield

    def summary(self) -> dict[str, Any]:
        return {"two_tokenizers": self._coverage.to_dict()}
