"""Warn before the first step if the student will hardly move; say after the last whether training helped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from stillroom.doctor.checks import Start
from stillroom.doctor.checks import doubts as doubts_about
from stillroom.doctor.log_rules import LITTLE_GAIN
from stillroom.doctor.rules import TRIAL_STEPS, Settings
from stillroom.engine.state import RunState
from stillroom.precision.storage import local
from stillroom.telemetry.wording import format_result

if TYPE_CHECKING:
    from stillroom.engine.run import Run
    from stillroom.evaluation import Evaluation

DONE = "done"
DIVERGED = "diverged"
FINISHED = (DONE, DIVERGED)

_WORSE = 1.005  # times the perplexity before training; a smaller rise is noise


def how_it_ended(state: RunState, kept: float, before: float) -> dict[str, Any]:
    """Status, reason and advice. `kept` is the perplexity of the student that is written.

    The student before training is a candidate, so the one kept is never worse. A run without a better student whose
    last student is worse has diverged.
    """
    last = state.last_perplexity
    if state.best_step and kept < before:
        gain = math.log(before / kept)
        advice = [] if gain >= LITTLE_GAIN else [_hardly_moved(state, gain)]
        return {"status": DONE, "reason": "", "advice": advice}
    is_lost = last is None or (last > _WORSE * before and state.applied >= TRIAL_STEPS)
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


def doubts(run: Run, student: Evaluation) -> list[str]:
    """Reasons why this configuration is unlikely to work, measured on the student before training."""
    rate, schedule = run.config.train.learning_rate, run.schedule
    start = Start(
        perplexity=student.perplexity,
        vocab_size=run.student.vocab_size,
        kl=student.kl,
        agreement=student.agreement,
        num_steps=schedule.num_steps,
        learning_rate=rate,
        travel=lambda: rate * sum(schedule.factor(step) for step in range(schedule.num_steps)),
        spread=lambda: _spread(run),
    )
    return doubts_about(start, Settings(run.config.to_dict()))


@torch.no_grad()
def _spread(run: Run) -> float:
    """Root mean square of all matrices of the student."""
    matrices = [parameter for parameter in run.student.model.parameters() if parameter.ndim >= 2]
    squares = torch.stack([local(matrix.detach()).float().square().sum() for matrix in matrices]).sum()
    if run.parallel.is_sharded:
        run.parallel.sum_(squares)
        squares = squares / run.parallel.num_copies
    return math.sqrt(float(squares) / sum(matrix.numel() for matrix in matrices))
