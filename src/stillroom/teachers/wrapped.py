"""A teacher around another one: everything is passed on, and a subclass changes what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from stillroom.models import Student
from stillroom.teachers.base import Answers, SignalKind, Teacher
from stillroom.types import Batch, Evidence, Needs, Signal, StudentView, Verdict


class WrappedTeacher(Teacher):
    """Passes everything on to `inner`."""

    def __init__(self, inner: Teacher) -> None:
        self.inner = inner
        self.kind: SignalKind = inner.kind
        self.notes = inner.notes

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        self.inner.begin(window, step, cursor)

    def signals_after_student(self, answers: Answers, batch: Batch, view: StudentView, needs: Needs) -> Answers:
        return self.inner.signals_after_student(answers, batch, view, needs)

    @property
    def writes_text(self) -> bool:  # type: ignore[override]
        return self.inner.writes_text

    @property
    def answers_together(self) -> bool:  # type: ignore[override]
        return self.inner.answers_together

    @property
    def tokenizer(self) -> Any:
        return self.inner.tokenizer

    @property
    def num_exact(self) -> int:  # type: ignore[override]
        return self.inner.num_exact

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        return self.inner.whole_answer(batch, signal)

    def comparable(self, yardsticks: dict[str, Any]) -> dict[str, Any]:
        return self.inner.comparable(yardsticks)

    def own_batch(self, batch: Batch) -> Batch:
        return self.inner.own_batch(batch)

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        return self.inner.own_yardsticks(batches)

    @property
    def needs_student_first(self) -> bool:
        return self.inner.needs_student_first

    @property
    def original(self) -> Teacher:
        return self if self.inner.original is self.inner else self.inner.original

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        return self.inner.observe(batch, needs)

    def answers(self, batch: Batch, needs: Needs) -> Answers:
        return self.inner.answers(batch, needs)

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        return self.inner.joint_graph(batch)

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        return self.inner.extra_loss(batch, view, num_targets=num_targets)

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        self.inner.after_student(batch, view, num_targets=num_targets)

    def end_window(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        self.inner.end_window(verdict, evidence, rate_factor)

    def begin_run(self) -> None:
        self.inner.begin_run()

    def look_after(self, step: int, *, is_eval: bool) -> None:
        self.inner.look_after(step, is_eval=is_eval)

    def as_model(self) -> Student | None:
        return self.inner.as_model()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self.inner.at_work():
            yield

    def trained_weights(self) -> Mapping[str, Tensor]:
        return self.inner.trained_weights()

    def tensors(self) -> dict[str, Tensor]:
        return self.inner.tensors()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        self.inner.load(tensors, state, keeps_history=keeps_history)

    def summary(self) -> dict[str, Any]:
        return self.inner.summary()

    def save(self, folder: Path) -> None:
        self.inner.save(folder)

    def close(self) -> None:
        self.inner.close()
