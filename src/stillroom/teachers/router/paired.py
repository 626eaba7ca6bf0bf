"""Training of a teacher's gates where the teacher has its own tokenizer.

The gates learn from the teacher's own rows: labels, anchor, balance and entropy are counted in its own tokens. What the
student has to do with it is compared on spans. In `sar-joint` the gradient of every objective on spans goes on into
the gates; in `sar` the student's term is the KL between "this span comes" and "another does" of teacher and student,
in place of the KL of their distributions over tokens, which they do not share.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from stillroom.data.teacher_rows import other_of
from stillroom.objectives.crosstok.head_values import head_values
from stillroom.objectives.crosstok.laws import binarised_kl, taken_log_probs
from stillroom.objectives.crosstok.slots import SpanSlots, num_spans
from stillroom.objectives.crosstok.span_terms import teacher_surprisals
from stillroom.teachers.base import Signals
from stillroom.teachers.paired import as_paired
from stillroom.teachers.router.teacher import RouterTraining
from stillroom.types import Batch, DenseSignal, Needs, PairedSignal, StudentView, Term


class PairedRouterTraining(RouterTraining):
    """Trains the gates on the teacher's rows of a run's batches."""

    _num_targets = _num_spans = 0  # of the window, in the teacher's rows

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        rows = [other_of(batch) for batch in window]
        own = {"targets": sum(batch.num_scored for batch in rows), "spans": num_spans(window)}
        counts = self.parallel.counts(own)
        self._num_targets, self._num_spans = counts["targets"], counts["spans"]
        self.begin_rows(rows, step, cursor)

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        return super().joint_graph(other_of(batch))

    def answers(self, batch: Batch, needs: Needs) -> Signals:
        return [as_paired(answer) for answer in super().answers(other_of(batch), needs)]

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        return super().extra_loss(other_of(batch), view, num_targets=self._num_targets)

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        def student_term(answer: DenseSignal) -> tuple[Tensor, Term]:
            term = span_divergence(answer, view, batch)
            return term.total / max(self._num_spans, 1), term

        with self.beside_student():
            self.learn(other_of(batch), None, num_targets=self._num_targets, student_term=student_term)


def span_divergence(answer: DenseSignal, view: StudentView, batch: Batch) -> Term:
    """The sum over spans of the KL between "this span comes" and "another does", with gradient to the teacher alone."""
    slots = SpanSlots.of(batch)
    assert batch.other is not None
    told = PairedSignal(answer.hidden, answer.head)
    theirs, is_bad = teacher_surprisals(told, batch.other, slots)
    with torch.no_grad():
        ours = slots.sum_student(-head_values(view.hidden, view.head, taken_log_probs(batch.scored_targets)))
    is_used = slots.is_span & ~is_bad & torch.isfinite(ours)
    values = binarised_kl(torch.where(is_used, theirs, 1.0), torch.where(is_used, ours, 1.0).to(theirs.dtype), 1.0)
    return Term(torch.where(is_used, values, torch.zeros_like(values)).sum(), is_used.sum().to(values.dtype))
