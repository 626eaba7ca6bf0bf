"""Wrap any teacher and inject faults into its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillroom.models import Student
from stillroom.teachers.base import Answers, SignalKind, Teacher
from stillroom.types import (
    Batch,
    DenseSignal,
    Evidence,
    Needs,
    PairedSignal,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
    Verdict,
)


class FaultyTeacher(Teacher):
    """Pass everything on to `inner`. `strikes(name)` says whether that fault occurs now.

    Faults affect training signals only: `observe` is that of `inner`.
    """

    def __init__(self, inner: Teacher, strikes: Callable[[str], bool], tell: Callable[[str], object]) -> None:
        self.inner = inner
        self.kind: SignalKind = inner.kind
        self.notes = inner.notes
        self._strikes, self._tell = strikes, tell
        self._step = 0

    # -- where faults strike -----------------------------------------------------------------------------

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        self._step = step + 1
        if self._strikes("router_nan"):
            self._set_gate_nan()
        self.inner.begin(window, step, cursor)

    def signals_after_student(self, answers: Answers, batch: Batch, view: StudentView, needs: Needs) -> Answers:
        """Every training signal passes here, given before the student's view or after."""
        signals = self.inner.signals_after_student(answers, batch, view, needs)
        return [signal if signal is None else self._with_faults(signal) for signal in signals]

    @torch.no_grad()
    def _set_gate_nan(self) -> None:
        weight = next(iter(self.inner.trained_weights().values()), None)
        if weight is None:
            self._tell("router_nan did nothing: no gate is trained in this run")
        else:
            weight.view(-1)[0] = float("nan")

    def _with_faults(self, signal: Signal) -> Signal:
        if self._strikes("teacher_nan"):
            signal = _with_nan(signal)
        if self._strikes("teacher_garbage"):
            signal = _with_noise(signal, self._step)
        return signal

    # -- passed on ---------------------------------------------------------------------------------------

    @property
    def writes_text(self) -> bool:  # type: ignore[override]
        return self.inner.writes_text

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


def _with_nan(signal: Signal) -> Signal:
    """The signal with NaN in place of its values."""
    match signal:
        case DenseSignal() | PairedSignal():
            return replace(signal, hidden=torch.full_like(signal.hidden, float("nan")))
        case TopKSignal():
            return replace(signal, log_probs=torch.full_like(signal.log_probs, float("nan")))
        case SampledSignal():
            return replace(signal, weights=torch.full_like(signal.weights, float("nan")))


def _with_noise(signal: Signal, seed: int) -> Signal:
    """Finite noise for hidden states; in sparse signals, each position gets its neighbour's ids."""
    match signal:
        case DenseSignal() | PairedSignal():
            generator = torch.Generator(device=signal.hidden.device).manual_seed(seed)
            noise = torch.randn(signal.hidden.shape, generator=generator, device=signal.hidden.device)
            return replace(signal, hidden=(noise * 10 * signal.hidden.float().std()).to(signal.hidden.dtype))
        case TopKSignal() | SampledSignal():
            return replace(signal, ids=signal.ids.roll(1, dims=0))
