"""Hooks at fixed places of a run. All are no-ops; `engine/inject.py` overrides them to inject faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stillroom.precision import AdamW
from stillroom.types import Batch, Signal, StudentView

if TYPE_CHECKING:
    from stillroom.engine.run import Run


class Hooks:
    """No-ops, in the order in which a run calls them."""

    last_strike: tuple[str, int] | None = None  # the fault that was injected last, and at which step

    def before_step(self, run: Run, step: int) -> None:
        """`step` is the optimizer step that is attempted."""

    def window(self, window: Sequence[Batch], vocab_size: int) -> Sequence[Batch]:
        return window

    def view(self, view: StudentView) -> StudentView:
        return view

    def signal(self, signal: Signal | None) -> Signal | None:
        """Each training signal of the teacher; None where there is none."""
        return signal

    def gradients(self, optimizer: AdamW) -> None:
        """After the last backward of a window, before gradients are summed over processes."""

    def rate_factor(self, factor: float) -> float:
        return factor

    def mid_update(self) -> None:
        """After the student's weights were written, before the step is counted."""

    def in_eval(self) -> None:
        """Before an evaluation."""

    def before_save(self) -> None:
        """Before a save, or the mark of a rollback."""

    def checkpoint_point(self, point: str) -> None:
        """Between the stages of a save, maybe in another thread while later steps are attempted."""

    def after_return(self, step: int) -> None:
        """After a rollback or a reset from `step` to an earlier one."""
