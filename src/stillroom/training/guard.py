"""Judge steps: evidence in, verdict out. Plain numbers: no tensors, no clock, no randomness.

Verdicts, mildest first: keep; retry with a smaller loss scale; skip the batch; roll back to the last good state; train
on labels alone for a while; begin again; halt with advice. The loss on a fixed canary batch tells a bad batch from a
bad state: if it is still good, the batch is at fault.

Statistics are medians over accepted steps, so refused steps do not affect them, and a loss is compared with those of
windows of the same sources. The best canary loss so far, that of the student before training included, bounds how far
losses may drift.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from stillroom.config.schema import GuardConfig
from stillroom.core.types import Evidence, Examination, Verdict

_BUDGET_STEPS = 200
# Medians are over the last 50 accepted steps: long enough to be steady, short enough to follow the run. With fewer than
# ten values the spread is not known.
WINDOW_STEPS = 50
_WARMUP_STEPS = 10
_LEVEL_STEPS = 15
_JUMP_TO_SIGMA = 1.0 / 0.9539  # median |x - y| of two normal draws, in standard deviations
# A spike must also be large in itself: in a steady run the spread is so small that any change is many sigmas.
_LEAST_LOSS_RISE = 0.25
# The median jump does not describe the tail: most steps of prompt and answer rows have a low loss, and a few have some
# hard tokens. The loss of one token has a spread of about 2 nats with an exponential tail; Bernstein's inequality
# bounds the mean of n of them.
_TOKEN_SPREAD = 2.0
_IN_NATS = frozenset({"loss", "ce", "kd", "labels"})
# A step learned from the teacher alone is watched by the labels' loss too: teacher and student may agree on nonsense.
# It must also reach that of a guess. On random tokens no model is below that on average, and on text a student is.
_LABELS = "labels"
# Before there are statistics, a loss is a spike when it is three times the largest so far and 3 nats above it: warm-up
# and the first steps of a pretrained student at a high learning rate stay far below that.
_EARLY_FACTOR = 3.0
_EARLY_RISE = 3.0
_LEAST_NORM_RISE = math.log(10.0)  # clipping makes a large norm harmless; only a tenfold one counts
# One or two spikes in a row with a sound student are bad batches; more are ordinary ones at too high a learning rate.
# After eight the statistics are outdated: drop them.
SUSPICIOUS_AFTER = 3
_RELEARN_AFTER = 8
_RATE = "train.learning_rate is probably too high"
_CANARY_RISE = 0.10
# A canary loss this far above its best means a diverged student, even if no step was a spike. A pretrained student at a
# high learning rate loses a few tenths of a nat at first; it does not recover from half its loss and at least 1 nat.
_ASTRAY_SHARE = 0.5
_ASTRAY_RISE = 1.0


class History:
    """Recent accepted values of one quantity, and the threshold for a spike."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        self.values.append(value)

    def threshold(self, z: float, least_rise: float) -> float:
        """Recent median plus z robust standard deviations.

        The spread is that of differences between successive values: while a loss falls, its distance from the median is
        progress, and the difference between successive steps is noise.
        """
        jumps = [abs(after - before) for before, after in pairwise(self.values)]
        spread = median(jumps) * _JUMP_TO_SIGMA if jumps else 0.0
        return self.level() + max(z * spread, least_rise)

    def early_threshold(self, least_rise: float) -> float:
        """The threshold while there are too few values for a spread."""
        largest = max(self.values)
        return largest + max(_EARLY_RISE, (_EARLY_FACTOR - 1.0) * abs(largest), least_rise)

    def level(self) -> float:
        return median(list(self.values)[-_LEVEL_STEPS:])

    def __len__(self) -> int:
        return len(self.values)


class Guard:
    """Judge attempted steps. `judge` uses the evidence alone; `diagnose` decides after an examination of the state."""

    def __init__(self, config: GuardConfig, *, vocab_size: int = 0) -> None:
        self.config = config
        self._guess = math.log(vocab_size) if vocab_size else math.inf  # loss of a guess among all tokens
        self._losses: dict[str, History] = {}  # the weighted sum and each term, by the sources of the window
        self._norms = History(WINDOW_STEPS)
        self._phase = ""
        self._recent: deque[bool] = deque(maxlen=_BUDGET_STEPS)  # True: refused
        self.consecutive = 0
        self.consecutive_teacher = 0
        self.consecutive_spikes = 0  # finite steps refused while the student was sound
        self.consecutive_floor = 0  # overflows at the smallest loss scale
        self.num_kept = 0
        self.num_rollbacks = 0
        self.has_reset = False

    # -- verdicts ----------------------------------------------------------------------------------------

    def judge(self, evidence: Evidence) -> Verdict:
        """keep, retry, skip, examine or halt."""
        self._enter(evidence.phase)
        if evidence.num_targets == 0:
            return self._refuse("no scored target in the batch", evidence)
        finite = math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
        if finite and 0.0 < self.config.skip_grad_norm < evidence.grad_norm:
            bound = f"guard.skip_grad_norm = {self.config.skip_grad_norm:g}"
            return self._refuse(f"gradient norm {evidence.grad_norm:.4g} stands above {bound}", evidence)
        if finite and evidence.bad_teacher_rows:
            return self._without_teacher(evidence)
        if finite:
            spike = self._spike(evidence)
            return Verdict("examine", spike) if spike else Verdict("keep")
        what = _name_nonfinite(evidence)
        if math.isfinite(evidence.loss) and evidence.is_scaled and self._may_retry(evidence):
            if not evidence.is_scale_at_floor:
                return Verdict("retry", f"{what} at loss scale {evidence.loss_scale:g}")
            # One batch may overflow at any scale; several in a row mean that the student does.
            self.consecutive_floor += 1
            if self.consecutive_floor > self.config.max_retries:
                return Verdict("halt", f"{what} at the smallest loss scale {evidence.loss_scale:g}", exit_code=23)
        if self.config.on_nonfinite == "halt":
            return Verdict("halt", what, exit_code=22)
        return Verdict("examine", what)

    def diagnose(self, evidence: Evidence, reason: str, exam: Examination) -> Verdict:
        """The verdict on an examined step: the state is at fault, or the data is."""
        if not (exam.weights_finite and exam.moments_finite):
            part = "weights" if not exam.weights_finite else "optimizer moments"
            return self._roll_back(f"{reason}; {part} not finite", backs_off=False)
        if not exam.weights_reached:
            return self._roll_back(f"{reason}; a weight is larger than updates can have made it", backs_off=False)
        if is_astray(exam) or not is_within_band(exam):
            against = min(exam.canary_reference, exam.canary_best)
            return self._roll_back(
                f"{reason}; canary loss {exam.canary_loss:.4g} against {against:.4g}", backs_off=True
            )
        if math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm):
            if self.consecutive_spikes >= _RELEARN_AFTER:
                self.forget()
                finding = f"{self.consecutive_spikes} batches in a row were refused and the student is sound"
                return Verdict("keep", f"{reason}; {finding}: {_RATE}, and the statistics begin again")
            if not self._loss_spike(evidence):  # a steep place on ordinary text; clipping bounds the step
                return Verdict("keep", f"{reason}; the student is sound and the losses are ordinary: it is clipped")
            self.consecutive_spikes += 1
            if self.consecutive_spikes >= SUSPICIOUS_AFTER:
                in_a_row = f"the student is sound and this is refused batch {self.consecutive_spikes} in a row"
                return self._refuse(f"{reason}; {in_a_row}: {_RATE}", evidence)
        return self._refuse(f"{reason}; the student is sound, so the batch is at fault", evidence)

    def accept(self, evidence: Evidence) -> None:
        """Add the numbers of an applied step to the statistics."""
        if not evidence.bad_teacher_rows:
            for name, value in _values(evidence).items():
                if math.isfinite(value):  # one NaN would make every later threshold NaN
                    self._losses.setdefault(_history_of(evidence, name), History(WINDOW_STEPS)).add(value)
            if math.isfinite(evidence.grad_norm):
                self._norms.add(math.log(max(evidence.grad_norm, 1e-30)))
            self.consecutive_teacher = 0
        self._recent.append(False)
        self.consecutive = self.consecutive_spikes = self.consecutive_floor = 0
        self.num_kept += 1

    # -- parts of a verdict ------------------------------------------------------------------------------

    def _spike(self, evidence: Evidence) -> str:
        if spike := self._loss_spike(evidence):
            return spike
        if len(self._norms) < _WARMUP_STEPS:
            return ""
        bound = self._norms.threshold(self.config.spike_z, _LEAST_NORM_RISE)
        if math.log(max(evidence.grad_norm, 1e-30)) > bound:
            return f"gradient norm {evidence.grad_norm:.4g} stands above {math.exp(bound):.4g}"
        return ""

    def _loss_spike(self, evidence: Evidence) -> str:
        for name, value in _values(evidence).items():
            history = self._losses.get(_history_of(evidence, name))
            bound = self._loss_bound(name, history, evidence.num_targets) if history else math.inf
            if name == _LABELS:
                bound = max(bound, self._guess)
            if history and value > bound:
                what = "the labels' loss" if name == _LABELS else name
                return f"{what} {value:.4g} stands above {bound:.4g}, far outside the last {len(history)} steps"
        return ""

    def _loss_bound(self, name: str, history: History, num_targets: int) -> float:
        """The threshold of a loss. A mean over few targets varies more, so its bound is higher."""
        level = abs(history.level())
        spread = _TOKEN_SPREAD if name in _IN_NATS else level
        sigmas = self.config.spike_z / math.sqrt(max(num_targets, 1))
        least = spread * (sigmas + sigmas * sigmas / 2.0)
        if len(history) >= _WARMUP_STEPS:
            return history.threshold(self.config.spike_z, max(_LEAST_LOSS_RISE * max(level, 0.1), least))
        # Only the weighted sum: a single term may be 0 at first and then begin.
        return history.early_threshold(least) if name == "loss" else math.inf

    def _without_teacher(self, evidence: Evidence) -> Verdict:
        """Rows with a bad teacher were scored on their labels: sound, but not comparable with other steps."""
        self.consecutive_teacher += 1
        if self.consecutive_teacher < self.config.fallback_after:
            return Verdict("keep", f"{evidence.bad_teacher_rows} rows without a usable teacher")
        self.consecutive_teacher = 0
        return Verdict("fallback", f"{self.config.fallback_after} steps in a row without a usable teacher")

    def _may_retry(self, evidence: Evidence) -> bool:
        # Before the first accepted step the scale is still too large; later, a batch that overflows at several scales
        # has another fault.
        return self.num_kept == 0 or evidence.attempt < self.config.max_retries

    def _refuse(self, reason: str, evidence: Evidence) -> Verdict:
        self._recent.append(True)
        self.consecutive += 1
        kd = evidence.terms.get("kd", 0.0)
        is_teachers = evidence.bad_teacher_rows > 0 or not math.isfinite(kd)
        self.consecutive_teacher = self.consecutive_teacher + 1 if is_teachers else 0
        if self.consecutive >= self.config.max_consecutive:
            return Verdict("halt", f"{self.consecutive} refused steps in a row, the last: {reason}", exit_code=21)
        refused = sum(self._recent)
        if len(self._recent) == _BUDGET_STEPS and refused > self.config.max_skip_share * _BUDGET_STEPS:
            return Verdict("halt", f"{refused} of the last {_BUDGET_STEPS} steps refused: {reason}", exit_code=21)
        if self.consecutive_teacher >= self.config.fallback_after:
            self.consecutive_teacher = 0
            return Verdict("fallback", f"the teacher is at fault: {reason}")
        return Verdict("skip", reason)

    def _roll_back(self, reason: str, *, backs_off: bool) -> Verdict:
        self.consecutive += 1  # a rollback itself is limited by max_rollbacks
        self.consecutive_spikes = self.consecutive_floor = 0  # they belong to undone steps
        if self.num_rollbacks < self.config.max_rollbacks:
            self.num_rollbacks += 1
            return Verdict("rollback", reason, backs_off=backs_off)
        if self.config.on_exhausted == "reset" and not self.has_reset:
            self.has_reset = True
            self.num_rollbacks = 0
            return Verdict("reset", f"{reason}; rollbacks spent")
        return Verdict("halt", f"{reason}; {self.num_rollbacks} rollbacks spent", exit_code=22)

    def _enter(self, phase: str) -> None:
        """Drop the statistics at a new phase: it weighs the terms differently."""
        if phase != self._phase:
            self._phase = phase
            self.forget()

    def forget(self) -> None:
        """Drop the statistics: what is learned from now on has other losses."""
        self._losses.clear()
        self._norms.values.clear()

    # -- state -------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """The part of the state that a rollback restores; the budgets stay."""
        losses = {name: list(history.values) for name, history in self._losses.items()}
        return {"losses": losses, "norms": list(self._norms.values), "phase": self._phase}

    def restore_statistics(self, state: Mapping[str, Any]) -> None:
        self._losses = {name: History(WINDOW_STEPS) for name in state["losses"]}
        for name, values in state["losses"].items():
            self._losses[name].values.extend(values)
        self._norms.values = deque(state["norms"], maxlen=WINDOW_STEPS)
        self._phase = str(state["phase"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "windows": self.statistics(),
            "recent": list(self._recent),
            "consecutive": self.consecutive,
            "consecutive_teacher": self.consecutive_teacher,
            "consecutive_spikes": self.consecutive_spikes,
            "consecutive_floor": self.consecutive_floor,
            "num_kept": self.num_kept,
            "num_rollbacks": self.num_rollbacks,
            "has_reset": self.has_reset,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restore_statistics(state["windows"])
        self._recent = deque((bool(value) for value in state["recent"]), maxlen=_BUDGET_STEPS)
        self.consecutive = int(state["consecutive"])
        self.consecutive_teacher = int(state["consecutive_teacher"])
        self.consecutive_spikes = int(state.get("consecutive_spikes", 0))  # not in older checkpoints
        self.consecutive_floor = int(state.get("consecutive_floor", 0))
        self.num_kept = int(state["num_kept"])
        self.num_rollbacks = int(state["num_rollbacks"])
        self.has_reset = bool(state["has_reset"])


def _values(evidence: Evidence) -> dict[str, float]:
    """The values checked for spikes. A bad batch may move one term and hardly the weighted sum."""
    labels = evidence.label_loss
    watched = {} if labels is None or not math.isfinite(labels) else {_LABELS: labels}
    return {"loss": evidence.loss, **evidence.terms, **watched}


def _history_of(evidence: Evidence, name: str) -> str:
    """The name of the values that a value is compared with.

    They are of windows of the same sources. Chats have other losses than documents: compared with all windows, those of
    a small source were refused whenever their turn came.
    """
    return "\n".join((*sorted(evidence.sources), name))


def is_within_band(exam: Examination) -> bool:
    """Whether the canary loss is about that of the last good snapshot. NaN is not."""
    return exam.canary_loss <= exam.canary_reference + _CANARY_RISE * max(abs(exam.canary_reference), 1.0)


def is_astray(exam: Examination) -> bool:
    """Whether the canary loss is far above its best, that of the student before training included. NaN is."""
    best = exam.canary_best
    return not exam.canary_loss <= best + max(_ASTRAY_RISE, _ASTRAY_SHARE * abs(best))


def _name_nonfinite(evidence: Evidence) -> str:
    """The first non-finite value, in the order of computation."""
    for name, value in evidence.terms.items():
        if not math.isfinite(value):
            return f"the {name} term is {value}"
    if not math.isfinite(evidence.loss):
        return f"the loss is {evidence.loss}"
    for name, value in evidence.group_norms.items():
        if not math.isfinite(value):
            return f"the {name} gradient norm is {value}"
    return f"the gradient norm is {evidence.grad_norm}"
