"""sar-meta: train the gates so that the student's next step lowers its loss on another batch, the lookahead batch.

The gradient of forward KL is linear in the teacher's probabilities p. So the change of the lookahead batch's loss
after one student step is, to first order, sum_v p(v) d log q(v) along that batch's own preconditioned step u, and its
gradient for the gates needs no second derivative. The derivative along u is a central difference: the teacher's
divergences from two students, one step along u and one step against it.

Experimental. A single step improves the student, a run of steps does not: it overfits the lookahead batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, Needs, StudentView
from stillroom.losses.head.loss import score_head
from stillroom.models import Student
from stillroom.precision import AdamW, Precision

Direction = Mapping[str, Tensor]


def check_precision(precision: Precision) -> None:
    """Raise for FP16 weights: they cannot hold steps this small."""
    if precision.keeps_half_weights:
        raise ConfigError(
            f"sar-meta moves the student's weights by less than {precision.mode} can hold",
            where="teacher.router.mode",
            advice=["--precision fp32", "--precision fp16-mixed", "--set teacher.router.mode=sar"],
        )


def lookahead_direction(
    student: Student, optimizer: AdamW, precision: Precision, lookahead_batch: Batch, rate: float
) -> Direction:
    """The gradient of the batch's cross-entropy, preconditioned by AdamW's second moments, times the rate.

    Called between windows: the student has no gradient before and after. Empty before the first update, when there
    are no second moments.
    """
    if not optimizer.num_updates or not lookahead_batch.num_scored:
        return {}
    batch = lookahead_batch.to(precision.device)
    with _eval_mode(student):
        with precision.autocast():
            view = student.observe(batch, Needs())
        ce_weight = 1.0 / max(batch.num_scored, 1)
        scored = score_head(view, None, batch.scored_targets, kd_weight=0.0, ce_weight=ce_weight, divergence=None)
        precision.backward(scored.loss)
    direction = {}
    for cell in optimizer.cells["student"]:
        if cell.gradient is not None:
            # A parameter without an update has no second moment: its direction is 0.
            count = cell.num_updates.double()
            correction = 1.0 - optimizer.betas[1] ** count.clamp_min(1.0)
            spread = (cell.second.read() / correction).sqrt() + optimizer.epsilon
            direction[cell.name] = (count > 0) * rate * (cell.gradient.float() / precision.loss_scale) / spread
    optimizer.zero_grad()
    return direction


@torch.no_grad()
def both_ways(
    student: Student, precision: Precision, batch: Batch, direction: Direction
) -> tuple[StudentView, StudentView]:
    """The student's views of a batch, one step along the direction and one step against it.

    The weights are restored to the last bit.
    """
    views = []
    for sign in (1.0, -1.0):
        with _moved(student, direction, sign), _eval_mode(student), precision.autocast():
            view = student.observe(batch, Needs())
            # Copy the head's weight: it is restored when the body ends.
            views.append(StudentView(view.hidden, replace(view.head, weight=view.head.weight.clone())))
    return views[0], views[1]


@contextmanager
def _eval_mode(student: Student) -> Iterator[None]:
    """Evaluation mode in the body: without dropout the random state does not change."""
    was_training = student.model.training
    student.eval()
    try:
        yield
    finally:
        student.model.train(was_training)


@contextmanager
def _moved(student: Student, direction: Direction, sign: float) -> Iterator[None]:
    own = {name: parameter for name, parameter in student.model.named_parameters() if name in direction}
    kept = {name: parameter.detach().clone() for name, parameter in own.items()}
    for name, parameter in own.items():
        parameter.add_(direction[name], alpha=sign)
    try:
        yield
    finally:
        for name, parameter in own.items():
            parameter.copy_(kept[name])
