"""What a run asks of its teacher. Every method here does nothing, so `Teacher()` is the teacher of a run without one.

A window goes through a teacher in this order:

    begin                                        a window begins: prefetch, look ahead
    joint_graph                                  around each micro-batch's forward and backward
        answers                                  before the student's forward
        signals_after_student                    after it: the signals that are scored
        extra_loss                               added to the student's loss, differentiated with it
    after_student                                the teacher's own learning, with the student's view
    end_window                                   with the verdict and the evidence of the step

Between windows `look_after` is called before anything is kept. `observe` is the teacher as it stands, for everything
that is not a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from stillroom.models import Student
from stillroom.types import Batch, Evidence, Needs, Signal, StudentView, Verdict

SignalKind = Literal["none", "dense", "top-k", "sampled"]
Answers = Sequence[Signal | None]  # several are averaged; None: the student is scored on the labels alone


class Teacher:
    """No teacher: it answers None, learns nothing and keeps nothing. Every other teacher overrides what it does."""

    kind: SignalKind = "none"
    notes: tuple[str, ...] = ()  # what the user is told when the run begins
    num_exact: int = 0  # its likeliest tokens that lead each position of a sparse signal, in order; 0: not known

    @property
    def gives_signals(self) -> bool:
        return self.kind != "none"

    @property
    def needs_student_first(self) -> bool:
        """Whether its signals depend on the student's view: `answers` is then empty."""
        return False

    @property
    def original(self) -> Teacher:
        """The teacher as it was given: what a finished student is compared with."""
        return self

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        """The answer to a batch, without a gradient and without chance."""
        return None

    def answers(self, batch: Batch, needs: Needs) -> Answers:
        """The answers to a training batch, given before the student's forward."""
        return [self.observe(batch, needs)]

    def signals_after_student(self, answers: Answers, batch: Batch, view: StudentView, needs: Needs) -> Answers:
        """The signals that are scored: the answers, or what replaces them now that the student's view is known."""
        return answers

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        """What a student is compared with after `observe` gave `signal`: the dense answer where it is at hand."""
        return signal

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Its own results on held-out batches where it has no network that could be scored; None: not known."""
        return None

    # -- learning ----------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        """Window `cursor` of the data order begins; `step` student steps have been applied before it."""

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch, for a teacher that the student's backward goes through."""
        return nullcontext()

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        """Added to the student's loss before its backward. `num_targets` are those of the whole window."""
        return 0.0

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        """Learn from a micro-batch after the student's backward."""

    def end_window(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        """Apply what was learned in a window that is kept; drop it in any other. The student is updated after this."""

    # -- between windows ---------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Once, before the first step of a run that is not resumed."""

    def look_after(self, step: int, *, is_eval: bool) -> None:
        """Before a snapshot, a checkpoint or an evaluation: leave nothing in it that must not be kept."""

    def as_model(self) -> Student | None:
        """Its network as something that is scored and writes text; None where it has none on this machine."""
        return None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The network of `as_model` is on the run's device in the body."""
        yield

    # -- state -------------------------------------------------------------------------------------------

    def trained_weights(self) -> Mapping[str, Tensor]:
        """The living weights that it trains."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        """Put a saved state back. After a rollback, what is counted stays counted."""

    def summary(self) -> dict[str, Any]:
        """What the run's summary says of it."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what it trained into the folder of the run, whole or not at all."""


NO_TEACHER = Teacher()
