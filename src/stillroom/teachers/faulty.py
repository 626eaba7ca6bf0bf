"""Wrap any teacher and inject faults into its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from stillroom.teachers.base import Answers, Teacher
from stillroom.teachers.sparse import each_tensor
from stillroom.teachers.wrapped import WrappedTeacher
from stillroom.types import (
    Batch,
    DenseSignal,
    Needs,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
)


class FaultyTeacher(WrappedTeacher):
    """Pass everything on to `inner`. `strikes(name)` says whether that fault occurs now.

    Faults affect training signals only: `observe` is that of `inner`.
    """

    def __init__(self, inner: Teacher, strikes: Callable[[str], bool], tell: Callable[[str], object]) -> None:
        super().__init__(inner)
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


def _with_nan(signal: Signal) -> Signal:
    """The signal with NaN in place of its values."""
    match signal:
        case DenseSignal() | PairedSignal():
            return replace(signal, hidden=torch.full_like(signal.hidden, float("nan")))
        case TopKSignal():
            return replace(signal, log_probs=torch.full_like(signal.log_probs, float("nan")))
        case SampledSignal():
            return replace(signal, weights=torch.full_like(signal.weights, float("nan")))
        case PairedTokens():
            return each_tensor(
                signal, lambda one: torch.full_like(one, float("nan")) if one.is_floating_point() else one
            )


def _with_noise(signal: Signal, seed: int) -> Signal:
    """Finite noise for hidden states; in sparse signals, each position gets its neighbour's ids or whole answer."""
    match signal:
        case DenseSignal() | PairedSignal():
            generator = torch.Generator(device=signal.hidden.device).manual_seed(seed)
            noise = torch.randn(signal.hidden.shape, generator=generator, device=signal.hidden.device)
            return replace(signal, hidden=(noise * 10 * signal.hidden.float().std()).to(signal.hidden.dtype))
        case TopKSignal() | SampledSignal():
            return replace(signal, ids=signal.ids.roll(1, dims=0))
        case PairedTokens():
            return each_tensor(signal, lambda one: one.roll(1, dims=0))
