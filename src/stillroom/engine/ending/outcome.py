"""Warn before the first step if the student will hardly move; say after the last whether training helped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stillroom.engine.state import RunState
from stillroom.precision.storage import local
from stillroom.telemetry.wording import format_lr, format_result

if TYPE_CHECKING:
    from stillroom.engine.run import Run
    from stillroom.evaluation import Evaluation

DONE = "done"
DIVERGED = "diverged"
FINISHED = (DONE, DIVERGED)

_WORSE = 1.005  # times the perplexity before training; a smaller rise is noise
_TRIAL_STEPS = 10  # a shorter run may make a student worse without a fault
_HARDLY = 0.01  # nats of held-out loss


def how_it_ended(state: RunState, kept: float, before: float) -> dict[str, Any]:
    """Status, reason and advice. `kept` is the perplexity of the student that is written.

    The student before training is a candidate, so the one kept is never worse. A run without a better student whose
    last student is worse has diverged.
    """
    last = state.last_perplexity
    if state.best_step and kept < before:
        gain = math.log(before / kept)
        advice = [] if gain >= _HARDLY else [_hardly_moved(state, gain)]
        return {"status": DONE, "reason": "", "advice": advice}
    is_lost = last is None or (last > _WORSE * before and state.applied >= _TRIAL_STEPS)
    ended = "cannot be scored" if last is None else f"has a held-out perplexity of {format_result(last)}"
    reason = f"after {state.applied:,} steps the student {ended}, before training {format_result(before)}"
    outcome = "no evaluation found a better student than the one before training, which is the one kept"
    advice = [
        "lower the learning rate, or warm up for longer: --set train.learning_rate=...",
        "compare the teacher with the student before training: one that knows this text less cannot teach it",
    ]
    if is_lost:
        return {"status": DIVERGED, "reason": f"{reason}: {outcome}", "advice": advice}
    return {"status": DONE, "reason": "", "advice": [f"{outcome}: train for longer, or at another learning rate"]}


def _hardly_moved(state: RunState, gain: float) -> str:
    return (
        f"the student hardly moved: {state.applied:,} steps lowered its held-out loss by {gain:.2g} nats. Raise "
        "train.learning_rate, or train for longer"
    )


# -- before the first step -------------------------------------------------------------------------------

_KNOWS_NOTHING = 0.5  # of the vocabulary's size, which is the perplexity of a guess
_LEAST_TRAVEL = 1.0  # in standard deviations of the weights


def doubts(run: Run, student: Evaluation) -> list[str]:
    """Reasons why this configuration is unlikely to work, measured on the student before training."""
    return [*_stands_still(run, student.perplexity), *_hardly_taught(run), *_is_its_teacher(student)]


_SAME_KL = 1e-5  # nats; the same weights in half precision are below it


def _is_its_teacher(student: Evaluation) -> list[str]:
    """Warn if the student answers as its teacher does before it has learned anything."""
    if student.kl is None or student.agreement is None or student.kl > _SAME_KL or student.agreement < 1.0:
        return []
    return [
        "teacher and student give the same answers before any training: they seem to have the same weights, and there "
        "is nothing to learn. Name another teacher, a smaller student, or cut one: --set student.init=shrink"
    ]


_HARDLY_TAUGHT = 0.02  # of all weights


def _hardly_taught(run: Run) -> list[str]:
    """Warn if the teacher's terms never weigh more than a few percent: its forward passes are wasted."""
    if not run.teacher.gives_signals:
        return []
    share = max(_teachers_share(run.curriculum.at(progress).weights) for progress in (0.0, 0.25, 0.5, 0.75, 1.0))
    if share > _HARDLY_TAUGHT:
        return []
    return [
        f"the teacher's terms have {share:.1%} of the weights: this is plain training with hardly any distillation. "
        "Raise objectives.kd.weight, or leave the teacher out and save its forward passes: objectives.kd.weight=0"
    ]


def _teachers_share(weights: Mapping[str, float]) -> float:
    total = sum(weights.values())
    return sum(weight for name, weight in weights.items() if name != "ce") / total if total else 1.0


def _stands_still(run: Run, perplexity: float) -> list[str]:
    """Warn if an untrained student cannot move its weights by about their own size.

    AdamW moves a weight by at most about the learning rate in a step.
    """
    if perplexity < _KNOWS_NOTHING * run.student.vocab_size:
        return []
    rate = run.config.train.learning_rate
    factors = sum(run.schedule.factor(step) for step in range(run.schedule.num_steps))
    spread = _spread(run)
    if rate * factors >= _LEAST_TRAVEL * spread:
        return []
    steps = f"{run.schedule.num_steps:,} steps at learning rate {format_lr(rate)}"
    return [
        f"the student knows nothing yet, and {steps} move a weight by at most about {rate * factors:.2g}, while its "
        f"weights scatter by {spread:.2g}: it will hardly learn. A small student from scratch wants 1e-3 to 1e-2 "
        "(--set train.learning_rate=...), more steps, or pretrained weights"
    ]


@torch.no_grad()
def _spread(run: Run) -> float:
    """Root mean square of all matrices of the student."""
    matrices = [parameter for parameter in run.student.model.parameters() if parameter.ndim >= 2]
    squares = torch.stack([local(matrix.detach()).float().square().sum() for matrix in matrices]).sum()
    if run.parallel.is_sharded:
        run.parallel.sum_(squares)
        squares = squares / run.parallel.num_copies
    return math.sqrt(float(squares) / sum(matrix.numel() for matrix in matrices))
