"""A teacher with trained gates and a tokenizer of its own.

The gates learn from the teacher's own rows: labels, anchor, balance and entropy are counted in its own tokens. What the
student has to do with it is compared on spans. In `sar-joint` the gradient of every objective on spans goes on into
the gates; in `sar` the student's term is the KL between "this span comes" and "another does" of teacher and student,
in place of the KL of their distributions over tokens, which they do not share.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from stillroom.data.spans.common import Coverage
from stillroom.objectives.crosstok.head_values import head_values
from stillroom.objectives.crosstok.laws import binarised_kl, taken_log_probs
from stillroom.objectives.crosstok.slots import SpanSlots, num_spans
from stillroom.objectives.crosstok.span_terms import teacher_surprisals
from stillroom.teachers.paired import PairedTeacher
from stillroom.teachers.router.teacher import RouterTeacher
from stillroom.types import Batch, DenseSignal, PairedSignal, StudentView, Term

# Modes that need the student's distribution over the very tokens of the teacher.
SAME_TOKENS_ONLY = ("sar-transient", "sar-meta")


class PairedRouter(PairedTeacher):
    """Passes a run's rows on to a router teacher as the teacher reads them."""

    def __init__(self, inner: RouterTeacher, tokenizer: Any, coverage: Coverage) -> None:
        super().__init__(inner, tokenizer, coverage)
        self._router = inner
        self._num_targets = self._num_spans = 0  # of the window, in the teacher's rows

    def begin(self, window: Sequence[Batch], step: int, cursor: int = 0) -> None:
        own = {
            "targets": sum(self.own_batch(batch).num_scored for batch in window),
            "spans": num_spans(window),
        }
        counts = self._router.peers.counts(own)
        self._num_targets, self._num_spans = counts["targets"], counts["spans"]
        super().begin(window, step, cursor)

    def joint_graph(self, batch: Batch) -> AbstractContextManager[None]:
        return self._router.joint_graph(self.own_batch(batch))

    def extra_loss(self, batch: Batch, view: StudentView, *, num_targets: int) -> Tensor | float:
        return self._router.extra_loss(self.own_batch(batch), view, num_targets=self._num_targets)

    def after_student(self, batch: Batch, view: StudentView, *, num_targets: int) -> None:
        def student_term(answer: DenseSignal) -> tuple[Tensor, Term]:
            term = span_divergence(answer, view, batch)
            return term.total / max(self._num_spans, 1), term

        own = self.own_batch(batch)
        with self._router.beside_student():
            self._router.learn(own, None, num_targets=self._num_targets, student_term=student_term)


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
