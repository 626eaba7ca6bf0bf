"""How often a run is evaluated and saved, and how long it takes to stop.

Where the configuration gives no interval, evaluations take at most a tenth of a run and checkpoints at most a
twentieth. Evaluations choose the student that is kept, so their steps must not depend on the speed of a machine: they
are planned from counted rows. Checkpoints change nothing that is trained, so they are spaced by the clock.
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

    def is_save_worth_it(self) -> bool:
        """Whether enough was trained since the last save for another to take no more than its share."""
        spent = time.monotonic() - self._saved_at
        return self.is_save_fixed or self.save_seconds <= _SAVING_SHARE * (spent + self.save_seconds)

    def seconds_to_stop(self) -> float:
        """What one more step, a checkpoint and the student's folder will take."""
        return self.step_seconds + _MARGIN * 2 * self.save_seconds


def plan_evaluations(num_steps: int, eval_rows: int, step_rows: int) -> tuple[int, str]:
    """(steps between evaluations, the reason). A held-out row costs about what a row of training does.

    Up to ten evaluations, rounded so that a short run has fewer, and fewer still where ten would take more than their
    share of the run; the last step is always evaluated.
    """
    even = math.ceil(num_steps / _EVALUATIONS)
    ratio = eval_rows / max(step_rows, 1)
    affordable = math.ceil(ratio * (1 - _EVALUATION_SHARE) / _EVALUATION_SHARE)
    chosen = min(affordable, num_steps)
    if chosen <= even:
        return max(even, 1), ""
    reason = (
        f"an evaluation reads as many rows as {ratio:,.1f} steps: evaluated every {chosen:,} steps instead of every "
        f"{even:,}, so that it takes about a tenth of the run. eval.max_batches makes an evaluation cheaper, "
        "train.eval_steps sets the interval"
    )
    return chosen, reason
