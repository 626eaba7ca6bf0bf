"""The interface between a run and its teacher. Every method is a no-op: `Teacher()` serves a run without a teacher.

A window goes through a teacher in this order:

    begin                                        before the window's first forward
    joint_graph                                  around each micro-batch's forward and backward
        answers                                  before the student's forward
        signals_after_student                    after it; returns the signals that are scored
        extra_loss                               added to the student's loss, differentiated with it
    after_student                                after the backward; the teacher may learn
    end_window                                   with the verdict and the evidence of the step

`look_after` is called between windows, before anything is kept. `observe` is for everything but training steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from stillroom.models import Student
from stillroom.types import (
    Batch,
    DenseSignal,
    Evidence,
    Needs,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
    Verdict,
)

SignalKind = Literal["none", "dense", "top-k", "sampled", "paired"]
Answers = Sequence[Signal | None]  # several are averaged; None: the student is scored on the labels alone


class Teacher:
    """No teacher: answers None, learns nothing, has no state. A subclass overrides what differs.

    A run checks on its first batch that `observe` answers with a signal of the declared `kind`.
    """

    kind: SignalKind = "none"
    tokenizer: Any = None  # its own, where it reads the text in other tokens than the student
    notes: tuple[str, ...] = ()  # logged when the run begins
    num_exact: int = 0  # its likeliest tokens that lead each position of a sparse signal, in order; 0: not known

    answers_together: bool = False  # whether all processes have to ask it at the same time
    writes_text: bool = True  # whether `as_model` is fast enough to write a text token by token

    @property
    def gives_signals(self) -> bool:
        return self.kind != "none"

    @property
    def needs_student_first(self) -> bool:
        """Whether its signals depend on the student's view: `answers` is then empty."""
        return False

    @property
    def original(self) -> Teacher:
        """The teacher as it was given. A finished student is compared with it."""
        return self

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        """The answer to a batch, without gradient and without randomness."""
        return None

    def answers(self, batch: Batch, needs: Needs) -> Answers:
        """The answers to a training batch, given before the student's forward."""
        return [self.observe(batch, needs)]

    def signals_after_student(self, answers: Answers, batch: Batch, view: StudentView, needs: Needs) -> Answers:
        """The signals to score: the answers, or what replaces them given the student's view."""
        return answers

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        """What a student is compared with after `observe` gave `signal`: the dense answer where it is at hand."""
        return signal

    def own_batch(self, batch: Batch) -> Batch:
        """The batch as its network reads it: another one where it has a tokenizer of its own."""
        return batch

    def comparable(self, yardsticks: dict[str, Any]) -> dict[str, Any]:
        """Its yardsticks without those that cannot be compared with a student's."""
        return yardsticks

    def own_yardsticks(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Its own results on held-out batches where it has no network that could be scored; None: not known."""
        return None

    # -- learning ----------------------------------------------------------------------------------------

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        """Window `cursor` of the data order begins; `step` student steps have been applied before it."""

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        """Wraps forward and backward of a micro-batch, for a teacher that the student's gradient flows into."""
        return nullcontext()

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        """Added to the student's loss before its backward. `num_targets` are those of the whole window."""
        return 0.0

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        """Learn from a micro-batch after the student's backward."""

    def end_window(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        """Apply what was learned if the step is kept, else drop it. Called before the student's update."""

    # -- between windows ---------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Called once, before the first step of a run that is not resumed."""

    def look_after(self, step: int, *, is_eval: bool) -> None:
        """Called before a snapshot, a checkpoint or an evaluation: repair what must not be saved."""

    def as_model(self) -> Student | None:
        """Its network, to be evaluated and to generate text; None where there is none on this machine."""
        return None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep the network of `as_model` on the run's device in the body."""
        yield

    # -- state -------------------------------------------------------------------------------------------

    def trained_weights(self) -> Mapping[str, Tensor]:
        """The weights that it trains, not copies."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        """Restore a saved state. With `keeps_history` (a rollback), counters stay."""

    def summary(self) -> dict[str, Any]:
        """Entries for the run's summary."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what it trained into the run's folder, complete or not at all."""

    def close(self) -> None:
        """Release files, threads and connections when the run has ended. It is not asked again."""


NO_TEACHER = Teacher()


def kind_of(signal: Signal | None) -> SignalKind:
    match signal:
        case None:
            return "none"
        case DenseSignal():
            return "dense"
        case TopKSignal():
            return "top-k"
        case SampledSignal():
            return "sampled"
        case PairedSignal() | PairedTokens():
            return "paired"
