"""Faults on purpose, so that survival can be seen and not only claimed.

    --inject nan_weight@40,teacher_nan@60x5

Each fault strikes at an optimizer step (the one that would be applied next), once or for the next N attempts,
and never again after a rollback to before it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from stillroom.config.faults import FAULTS, parse
from stillroom.types import IGNORED, Batch, DenseSignal, Signal

if TYPE_CHECKING:
    from stillroom.engine.run import Run


class Injector:
    """Strikes when asked at each place where a fault can occur. With no faults it does nothing."""

    def __init__(self, spec: str = "", *, tell: Callable[[str], object] | None = None) -> None:
        self.faults = parse(spec)
        self.tell = tell or (lambda _text: None)
        self.step = 0  # the optimizer step being attempted, set by the engine
        self._first_step: int | None = None

    def _strikes(self, name: str) -> bool:
        for fault in self.faults:
            # A run resumed beyond a fault's step has had it already.
            is_due = (self._first_step or 0) <= fault.step <= self.step
            if fault.name == name and fault.left > 0 and is_due:
                fault.left -= 1
                self.tell(f"injected {name} at step {self.step}: {FAULTS[name]}")
                return True
        return False

    def disarm(self, step: int) -> None:
        """A rollback goes back to before what struck up to this step: it does not strike again.

        A kill that has not struck yet waits for its place, which the rollback itself may be.
        """
        for fault in self.faults:
            if fault.step <= step and not fault.name.startswith("kill"):
                fault.left = 0

    # -- places ------------------------------------------------------------------------------------------

    def before_step(self, run: Run, step: int) -> None:
        self.step = step
        if self._first_step is None:
            self._first_step = step
            self._tell_what_is_out_of_range(run.schedule.num_steps)
        if not self.faults:
            return
        if self._strikes("kill"):
            _die()
        embedding = run.student.model.get_input_embeddings().weight
        head = run.student.model.get_output_embeddings().weight
        matrices = [p for p in run.student.model.parameters() if p.ndim >= 2]
        inner = [p for p in matrices if p is not embedding and p is not head][-1]
        with torch.no_grad():
            if self._strikes("nan_weight"):
                inner.view(-1)[inner.numel() // 2] = float("nan")
            if self._strikes("nan_embedding"):
                embedding.view(-1)[-1] = float("nan")
            if self._strikes("huge_weight"):
                inner.view(-1)[:8] = 3e4
            if self._strikes("router_nan"):
                self._spoil_gate(run)
            if self._strikes("nan_moment"):
                next(run.optimizer.moments()).view(-1)[0] = float("nan")

    def _tell_what_is_out_of_range(self, num_steps: int) -> None:
        for fault in self.faults:
            if fault.left > 0 and not (self._first_step or 0) <= fault.step <= num_steps:
                steps = f"steps {self._first_step} to {num_steps}"
                self.tell(f"{fault.name}@{fault.step} will not strike: this start of the run takes {steps}")

    def _spoil_gate(self, run: Run) -> None:
        if run.router is None:
            self.tell("router_nan did nothing: no gate is trained in this run")
            return
        next(iter(run.router.gates.weights.values())).view(-1)[0] = float("nan")

    def window(self, batches: list[Batch], vocab_size: int) -> list[Batch]:
        if self._strikes("all_masked"):
            batches = [batch.without_targets() for batch in batches]
        if self._strikes("bad_batch"):
            generator = torch.Generator().manual_seed(self.step)
            noisy = []
            for batch in batches:
                ids = torch.randint(0, vocab_size, batch.input_ids.shape, generator=generator)
                targets = torch.where(batch.targets == IGNORED, IGNORED, ids.roll(-1, dims=1))
                noisy.append(replace(batch, input_ids=ids, targets=targets))
            batches = noisy
        return batches

    def hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.faults and hidden.numel() and self._strikes("inf_logit"):
            hidden = hidden.clone()
            hidden[0, 0] = float("inf")
        return hidden

    def signal(self, signal: Signal) -> Signal:
        if not self.faults or not isinstance(signal, DenseSignal):
            return signal
        if self._strikes("teacher_nan"):
            signal = replace(signal, hidden=torch.full_like(signal.hidden, float("nan")))
        if self._strikes("teacher_garbage"):
            generator = torch.Generator(device=signal.hidden.device).manual_seed(self.step)
            noise = torch.randn(signal.hidden.shape, generator=generator, device=signal.hidden.device)
            signal = replace(signal, hidden=(noise * 10 * signal.hidden.float().std()).to(signal.hidden.dtype))
        return signal

    def gradients(self, run: Run) -> None:
        if not self.faults:
            return
        for name, value in (("inf_grad", float("inf")), ("nan_grad", float("nan"))):
            if self._strikes(name):
                _name, gradient = next(run.optimizer.named_gradients(), ("", None))
                if gradient is None:
                    self.tell(f"{name} did nothing: no token was scored, so there is no gradient")
                else:
                    gradient.view(-1)[0] = value

    def rate_factor(self, factor: float) -> float:
        return factor * 1000.0 if self.faults and self._strikes("lr_spike") else factor

    def mid_update(self) -> None:
        if self.faults and self._strikes("kill_mid_update"):
            _die()

    def in_eval(self) -> None:
        if self.faults and self._strikes("kill_in_eval"):
            _die()

    def checkpoint_point(self, point: str) -> None:
        """Called by the checkpoint store between the stages of a save."""
        if not self.faults:
            return
        if point == "while_writing" and self._strikes("disk_full"):
            raise OSError(28, os.strerror(28))
        if self._strikes(f"kill_{point}"):
            _die()


def _die() -> Any:
    """The hardest end there is: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
