"""A teacher that reads the text in its own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stillroom.data.spans.common import Coverage
from stillroom.data.teacher_rows import other_of
from stillroom.errors import ConfigError
from stillroom.models import Student
from stillroom.teachers.base import SignalKind, Teacher, TeacherTraining
from stillroom.types import Batch, DenseSignal, Needs, PairedSignal, PairedTokens, Signal

# What a model's results on its own tokens say of the text, and not of how it is cut into tokens.
_PER_BYTE = ("bits_per_byte", "parameters", "documents", "source")


class PairedTeacher(Teacher):
    """A teacher of another tokenizer. It answers a batch on the rows that stand next to the student's.

    `inner` reads those rows as any teacher reads rows: live, live with a few tokens, or from a cache. `training` is for
    one that learns.
    """

    kind: SignalKind = "paired"

    def __init__(
        self, inner: Teacher, tokenizer: Any, coverage: Coverage, training: TeacherTraining | None = None
    ) -> None:
        self.inner, self.tokenizer = inner, tokenizer
        self.notes, self.num_exact = inner.notes, inner.num_exact
        self.answers_together, self.writes_text = inner.answers_together, inner.writes_text
        self._coverage = coverage
        if training is not None:
            self.training = training

    @property
    def original(self) -> Teacher:
        inner = self.inner.original
        return self if inner is self.inner else PairedTeacher(inner, self.tokenizer, self._coverage)

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        return as_paired(self.inner.observe(other_of(batch), needs))

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        return as_paired(self.inner.whole_answer(other_of(batch), signal))

    def own_batch(self, batch: Batch) -> Batch:
        return other_of(batch)

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        self.inner.begin_window([other_of(batch) for batch in window], cursor)

    def end_window(self) -> None:
        self.inner.end_window()

    def verify(self) -> None:
        self.inner.verify()

    def as_model(self) -> Student | None:
        return self.inner.as_model()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self.inner.at_work():
            yield

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        found = self.inner.own_yardsticks([other_of(batch) for batch in batches])
        return None if found is None else self.comparable(found)

    def comparable(self, yardsticks: dict[str, Any]) -> dict[str, Any]:
        """Perplexity and the like are means over tokens, and its tokens are others."""
        intervals = {name: ends for name, ends in yardsticks.get("intervals", {}).items() if name in _PER_BYTE}
        kept = {name: value if name in _PER_BYTE else None for name, value in yardsticks.items()}
        return {**kept, "intervals": intervals}

    def summary(self) -> dict[str, Any]:
        return {**self.inner.summary(), "two_tokenizers": self._coverage.to_dict()}

    def close(self) -> None:
        self.inner.close()


def as_paired(signal: Signal | None) -> Signal | None:
    """An answer on the teacher's own rows, marked as one."""
    match signal:
        case None | PairedSignal() | PairedTokens():
            return signal
        case DenseSignal():
            return PairedSignal(signal.hidden, signal.head, signal.taps)
    raise ConfigError(
        f"a teacher of another tokenizer answers with {type(signal).__name__}, whose tokens are not told",
        where="teacher.signal.kind",
        advice=["set it to 'dense', 'hybrid', 'top_k' or 'target'"],
    )
