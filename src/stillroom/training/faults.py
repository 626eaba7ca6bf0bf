"""Inject faults, to test recovery.

    --inject nan_weight@40,teacher_nan@60x5

Each fault strikes at an optimizer step (the one that would be applied next), once or for the next N attempts. It does
not strike again after a rollback to an earlier step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from stillroom.config.schema import FAULTS, parse
from stillroom.core.types import (
    IGNORED,
    Batch,
    DenseSignal,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
)
from stillroom.precision import AdamW
from stillroom.precision.storage import local
from stillroom.teachers import Teacher
from stillroom.teachers.sparse import each_tensor
from stillroom.training.run import Hooks

if TYPE_CHECKING:
    from stillroom.training.run import Run


def make_hooks(spec: str, *, tell: Callable[[str], object]) -> Hooks:
    """Hooks for the faults of `--inject`; hooks that do nothing where there are none."""
    return Injector(spec, tell=tell) if parse(spec) else Hooks()


class Injector(Hooks):
    """Strike at each hook whose fault is due."""

    def __init__(self, spec: str, *, tell: Callable[[str], object] | None = None) -> None:
        self.faults = parse(spec)
        self.tell = tell or (lambda _text: None)
        self.step = 0  # the optimizer step being attempted, set by the engine
        self._saved_after = 0  # the same when the present save began
        self._first_step: int | None = None

    def strikes(self, name: str, step: int | None = None) -> bool:
        """Whether a fault strikes now, at the step being attempted or the one that is given."""
        step = self.step if step is None else step
        for fault in self.faults:
            # A run resumed beyond a fault's step had it before.
            is_due = (self._first_step or 0) <= fault.step <= step
            if fault.name == name and fault.left > 0 and is_due:
                fault.left -= 1
                self.last_strike = (name, step)
                self.tell(f"injected {name} at step {step}: {FAULTS[name]}")
                return True
        return False

    def after_return(self, step: int) -> None:
        """Drop the faults of the steps that a rollback undid.

        Keep a kill that has not struck: its place may be in the rollback itself.
        """
        for fault in self.faults:
            if fault.step <= step and not fault.name.startswith("kill"):
                fault.left = 0

    # -- hooks ------------------------------------------------------------------------------------------

    def before_step(self, run: Run, step: int) -> None:
        self.step = step
        if self._first_step is None:
            self._first_step = step
            self._warn_out_of_range(run.schedule.num_steps)
            self.warn_without_teacher(run.teacher)
        if self.strikes("kill"):
            run.saves.wait()  # which checkpoint is the newest must not depend on the speed of a disk
            _die()
        if self.strikes("freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        embedding = run.student.model.get_input_embeddings().weight
        head = run.student.model.get_output_embeddings().weight
        matrices = [p for p in run.student.model.parameters() if p.ndim >= 2 and p.requires_grad]
        matrix = [p for p in matrices if p is not embedding and p is not head][-1]
        with torch.no_grad():
            if self.strikes("nan_weight"):
                local(matrix.data).view(-1)[local(matrix.data).numel() // 2] = float("nan")
            if self.strikes("nan_embedding"):
                if embedding.requires_grad:
                    local(embedding.data).view(-1)[-1] = float("nan")
                else:
                    self.tell("nan_embedding did nothing: the embedding is frozen under an adapter")
            if self.strikes("huge_weight"):
                local(matrix.data).view(-1)[:8] = 3e4
            if self.strikes("nan_moment"):
                next(run.optimizer.moments()).view(-1)[0] = float("nan")
            if self.strikes("router_nan"):
                gate = next(iter(run.teacher.training.trained_weights().values()), None)
                if gate is None:
                    self.tell("router_nan did nothing: no gate is trained in this run")
                else:
                    gate.view(-1)[0] = float("nan")

    def _warn_out_of_range(self, num_steps: int) -> None:
        for fault in self.faults:
            if fault.left > 0 and not (self._first_step or 0) <= fault.step <= num_steps:
                steps = f"steps {self._first_step} to {num_steps}"
                self.tell(f"{fault.name}@{fault.step} will not strike: this start of the run takes {steps}")

    def warn_without_teacher(self, teacher: Teacher) -> None:
        for fault in self.faults:
            if fault.name.startswith("teacher_") and not teacher.gives_signals:
                self.tell(f"{fault.name}@{fault.step} will not strike: no objective asks a teacher")

    def window(self, window: Sequence[Batch], vocab_size: int) -> Sequence[Batch]:
        batches = list(window)
        if self.strikes("all_masked"):
            batches = [batch.without_targets() for batch in batches]
        if self.strikes("bad_batch"):
            generator = torch.Generator().manual_seed(self.step)
            noisy = []
            for batch in batches:
                ids = torch.randint(0, vocab_size, batch.input_ids.shape, generator=generator)
                targets = torch.where(batch.targets == IGNORED, IGNORED, ids.roll(-1, dims=1))
                noisy.append(replace(batch, input_ids=ids, targets=targets))
            batches = noisy
        return batches

    def view(self, view: StudentView) -> StudentView:
        if self.strikes("oom"):
            raise torch.OutOfMemoryError("out of memory, as injected. Tried to allocate 2.00 GiB, 1.50 GiB is free")
        if not (view.hidden.numel() and self.strikes("inf_logit")):
            return view
        hidden = view.hidden.clone()
        hidden[0, 0] = float("inf")
        return replace(view, hidden=hidden)

    def signal(self, signal: Signal | None) -> Signal | None:
        if signal is None:
            return None
        if self.strikes("teacher_nan"):
            signal = _with_nan(signal)
        if self.strikes("teacher_garbage"):
            signal = _with_noise(signal, self.step)
        return signal

    def gradients(self, optimizer: AdamW) -> None:
        for name, value in (("inf_grad", float("inf")), ("nan_grad", float("nan"))):
            if self.strikes(name):
                _name, gradient = next(optimizer.named_gradients(), ("", None))
                if gradient is None:
                    self.tell(f"{name} did nothing: no token was scored, so there is no gradient")
                else:
                    gradient.view(-1)[0] = value

    def rate_factor(self, factor: float) -> float:
        return factor * 1000.0 if self.strikes("lr_spike") else factor

    def mid_update(self) -> None:
        if self.strikes("kill_mid_update"):
            _die()

    def in_eval(self) -> None:
        if self.strikes("kill_in_eval"):
            _die()

    def before_save(self) -> None:
        self._saved_after = self.step

    def checkpoint_point(self, point: str) -> None:
        if point == "while_writing" and self.strikes("disk_full", self._saved_after):
            raise OSError(28, os.strerror(28))
        if self.strikes(f"kill_{point}", self._saved_after):
            _die()


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


def _die() -> Any:
    """End without any handler or flush."""
    os.kill(os.getpid(), signal.SIGKILL)
