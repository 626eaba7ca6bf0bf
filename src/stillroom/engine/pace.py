"""Intervals of evaluations and checkpoints, and the time needed to stop.

Without a configured interval, evaluations take at most a tenth of a run and checkpoints at most a twentieth.
Evaluations choose the student that is kept, so their steps must not depend on the speed of a machine: they are planned
from counted rows. Checkpoints do not affect training, so they are spaced by the clock.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

_EVALUATIONS = 10
_EVALUATION_SHARE = 0.10
_SAVING_SHARE = 0.05
_MARGIN = 1.5  # on the time the last save took


@dataclass
class Pace:
    """Intervals in applied steps, and the measured times of the last step and the last save."""

    eval_steps: int = 1
    save_steps: int = 1
    is_save_fixed: bool = True  # the configuration says when, or a rollback depends on it
    step_seconds: float = 0.0
    save_seconds: float = 0.0
    _saved_at: float = field(default_factory=time.monotonic)

    def saved(self, seconds: float) -> None:
        self.save_seconds = seconds
        self._saved_at = time.monotonic()

    def is_save_worth_it(self, *, is_saving: bool = False) -> bool:
        """Whether another save would take no more than its share of the time since the last one.

        Not while one is in flight, which it would have to wait for.
        """
        spent = time.monotonic() - self._saved_at
        is_affordable = self.save_seconds <= _SAVING_SHARE * (spent + self.save_seconds)
        return self.is_save_fixed or (is_affordable and not is_saving)

    def seconds_to_stop(self, *, is_saving: bool = False) -> float:
        """Seconds for one more step, the save in flight, a checkpoint and the student's folder."""
        return self.step_seconds + _MARGIN * (3 if is_saving else 2) * self.save_seconds


def plan_evaluations(num_steps: int, eval_rows: int, step_rows: int) -> tuple[int, str]:
    """(steps between evaluations, the reason). Assumes that a held-out row costs as much as a training row.

    Round up, so a run has at most ten evaluations; fewer where ten would take more than their share. The last step is
    always evaluated.
    """
    tenth = math.ceil(num_steps / _EVALUATIONS)
    ratio = eval_rows / max(step_rows, 1)
    affordable = math.ceil(ratio * (1 - _EVALUATION_SHARE) / _EVALUATION_SHARE)
    chosen = min(affordable, num_steps)
    if chosen <= tenth:
        return max(tenth, 1), ""
    reason = (
        f"an evaluation reads as many rows as {ratio:,.1f} steps: evaluated every {chosen:,} steps instead of every "
        f"{tenth:,}, so that it takes about a tenth of the run. eval.max_batches makes an evaluation cheaper, "
        "train.eval_steps sets the interval"
    )
    return chosen, reason
