"""The interface between a run and its teacher. Every method is a no-op: `Teacher()` serves a run without a teacher.

A teacher answers batches. A run opens and closes each window of micro-batches with `begin_window` and `end_window`, and
calls `verify` before it saves anything. What a teacher does beyond answering while a student trains (several answers,
answers that depend on the student, own weights that learn) is in its `training`, which does nothing by default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from stillroom.core.types import (
    Batch,
    DenseSignal,
    Evidence,
    HeadWeights,
    Needs,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TopKSignal,
    Verdict,
)
from stillroom.models import Student
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, Precision

SignalKind = Literal["none", "dense", "top-k", "sampled", "paired"]
Window = Callable[[int], Sequence[Batch]]  # the batches of a window of the data order, by its number
Signals = Sequence[Signal | None]  # several are averaged; None: the student is scored on the labels alone


class Teacher:
    """No teacher: answers None and has nothing to release. A subclass overrides what differs.

    A run checks on its first batch that `observe` answers with a signal of the declared `kind`.
    """

    kind: SignalKind = "none"
    tokenizer: Any = None  # its own, where it reads the text in other tokens than the student
    notes: tuple[str, ...] = ()  # logged when the run begins
    num_exact: int = 0  # top tokens that lead each position of a sparse signal, in order; 0: not known
    answers_together: bool = False  # whether all processes have to ask it at the same time
    writes_text: bool = True  # whether `as_model` is fast enough to write a text token by token
    reads_other_rows: bool = False  # whether its rows are not the student's: other tokens, or a context
    answers_last: bool = True  # whether an answer may be kept: it is the same later, and its head stays where it is

    @property
    def gives_signals(self) -> bool:
        return self.kind != "none"

    @property
    def original(self) -> Teacher:
        """The teacher as it was given. A finished student is compared with it."""
        return self

    own_training: TeacherTraining | None = None  # of a teacher that does more in a training step than answer

    @property
    def training(self) -> TeacherTraining:
        """What it does in a training step beyond answering."""
        # Made each time: kept, it and the teacher would hold each other, and the weights would stay until a collection.
        return self.own_training or TeacherTraining(self)

    # -- answering ---------------------------------------------------------------------------------------

    def observe(self, batch: Batch, needs: Needs) -> Signal | None:
        """Answer a batch, without gradient and without randomness."""
        return None

    def whole_answer(self, batch: Batch, signal: Signal | None) -> Signal | None:
        """What a student is compared with after `observe` gave `signal`: the dense answer where it is available."""
        return signal

    def own_batch(self, batch: Batch) -> Batch:
        """The batch as its network reads it: another one where it has its own tokenizer."""
        return batch

    # -- windows -----------------------------------------------------------------------------------------

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        """Window `cursor` of the data order begins."""

    def end_window(self) -> None:
        """The backward passes of the window are done: its answers are not needed any more."""

    def verify(self) -> None:
        """Raise if answers given so far turned out wrong. Called between windows, before anything is saved."""

    # -- what is known of it -----------------------------------------------------------------------------

    def as_model(self) -> Student | None:
        """Its network, to be evaluated and to generate text; None where there is none on this machine."""
        return None

    def at_work(self) -> AbstractContextManager[None]:
        """Keep the network of `as_model` on the run's device in the body."""
        return nullcontext()

    def own_metrics(self, batches: Sequence[Batch]) -> dict[str, Any] | None:
        """Its own results on held-out batches where it has no network that could be scored; None: not known."""
        return None

    def comparable(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Its metrics without those that cannot be compared with a student's."""
        return metrics

    def summary(self) -> dict[str, Any]:
        """Entries for the run's summary."""
        return {}

    def close(self) -> None:
        """Release files, threads and connections when the run has ended. It is not asked again."""


class TeacherTraining:
    """A teacher's part in training steps: it answers each micro-batch once and learns nothing.

    A window calls it in this order:

        begin                                    before the window's first forward
        joint_graph                              around each micro-batch's forward and backward
            answers                              before the student's forward
            signals_after_student                after it; returns the signals that are scored
            extra_loss                           added to the student's loss, differentiated with it
        after_student                            after the backward; the teacher may learn
        end                                      with the verdict and the evidence of the step
        after_update                             after the student's update, where the step is kept

    The other methods are called between windows.
    """

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        """Window `cursor` of the data order begins; `step` student steps have been applied before it."""

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        """Wrap forward and backward of a micro-batch, for a teacher that the student's gradient flows into."""
        return nullcontext()

    def answers(self, batch: Batch, needs: Needs) -> Signals:
        return [self.teacher.observe(batch, needs)]

    def signals_after_student(self, answers: Signals, batch: Batch, view: StudentView, needs: Needs) -> Signals:
        """The signals to score: the answers, or what replaces them given the student's view."""
        return answers

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        """Added to the student's loss before its backward. `num_targets` are those of the whole window."""
        return 0.0

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        """Learn from a micro-batch after the student's backward."""

    def end(self, verdict: Verdict, evidence: Evidence, rate_factor: float) -> None:
        """Apply what was learned if the step is kept, else drop it. Called before the student's update."""

    def after_update(self) -> None:
        """Follow the student after the update of a kept step."""

    # -- between windows ---------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Called once, before the first step of a run that is not resumed."""

    def look_after(self, step: int, *, is_eval: bool) -> None:
        """Called before a snapshot, a checkpoint or an evaluation: repair what must not be saved."""

    # -- state -------------------------------------------------------------------------------------------

    def trained_weights(self) -> Mapping[str, Tensor]:
        """The weights that learn, not copies. Processes compare them."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        """Restore a saved state. With `keeps_history` (a rollback), counters stay."""

    def save(self, folder: Path) -> None:
        """Write what it trained into the run's folder, complete or not at all."""


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that a teacher may use."""

    student: Student
    optimizer: AdamW  # the student's
    precision: Precision
    learning_rate: float  # the student's, at its peak
    window: Window
    held_out: Callable[[], Sequence[Batch]]
    write: Callable[..., object]  # writes an event: its name, then its fields
    parallel: Parallel

    def tell(self, text: str) -> None:
        self.write("note", text=text)


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


class Placement:
    """On the device for good. A subclass overrides what differs."""

    is_shared = False  # whether all processes have to ask it at the same time
    tell: Callable[[str], object] = staticmethod(warnings.warn)  # hears what went otherwise than planned
    writes_text = True  # whether it answers fast enough to write a text token by token
    keeps_head = True  # whether the head of an answer is the model's own, on the device for good

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The network can be run on the device in the body."""
        yield

    def lasting(self, head: HeadWeights) -> HeadWeights:
        """The head as the objectives may use it after `at_work`."""
        return head

    def begin_window(self) -> None:
        """A window of micro-batches begins."""

    def end_window(self) -> None:
        """Its backward passes are done: nothing of its answers is needed any more."""

    def facts(self) -> dict[str, Any]:
        """Entries for the run's summary."""
        return {}
