"""Examine the state of a run and carry out the verdict on a refused step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stillroom.checkpoint import Saved
from stillroom.engine.background_save import settle
from stillroom.engine.recovery.locate_nonfinite import locate
from stillroom.engine.recovery.quarantine import keep_window
from stillroom.engine.recovery.reach import weight_peaks
from stillroom.engine.run import Run
from stillroom.engine.state import RunState, capture, restore
from stillroom.errors import BrokenAtStart, Diverged, LossScaleAtFloor, StillroomError, TooManySkips
from stillroom.evaluation import evaluate
from stillroom.guard import is_astray, is_within_band
from stillroom.models.load.loaded import not_finite_advice
from stillroom.snapshots import SnapshotRing
from stillroom.teachers.spec import teacher_dtype
from stillroom.types import Batch, Evidence, Examination, Verdict

_PATIENCE = 2
_AFTERMATH = 8  # steps after an injected fault that it may still be the cause of
_LEAST_TOKEN_SHARE = 0.1  # of all weights, for cross-entropy and distillation together


@torch.no_grad()
def examine(run: Run, state: RunState) -> Examination:
    """Check weights, moments and the canary. Slow: used only for a suspicious step."""
    # Repair FP16 copies from their FP32 masters.
    run.optimizer.refresh()
    weights = run.parallel.all_of(_weights_are_finite(run))
    moments = run.parallel.all_of(all(_is_finite(t) for t in run.optimizer.tensors().values()))
    loss = canary_loss(run) if weights else float("nan")
    is_reached = run.parallel.all_of(state.reach.holds(run))
    return Examination(weights, moments, loss, *_canary_bounds(run, state), is_reached)


@torch.no_grad()
def is_sound(run: Run) -> bool:
    """Whether every weight and moment is finite. Checked before anything is kept or saved."""
    return run.parallel.all_of(
        _weights_are_finite(run) and all(_is_finite(t) for t in run.optimizer.tensors().values())
    )


def _weights_are_finite(run: Run) -> bool:
    return _is_finite(weight_peaks(run))


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def check_state(run: Run, state: RunState, evidence: Evidence) -> Examination | None:
    """Examine the state after a step; None if it was bad and was rolled back.

    The state is good if it is finite, no weight is larger than updates can have made it, and the canary is not far
    worse than its best. Called before anything is kept, and after the first steps, when the guard has no statistics.
    """
    exam = _examine_finite(run, state) if is_sound(run) else examine(run, state)
    if _passes(exam):
        state.reach.begin(run)
        if exam.canary_best == float("inf"):
            state.canary_reference = state.canary_best = exam.canary_loss
        return exam
    verdict = run.guard.diagnose(evidence, f"checked after step {state.applied}", exam)
    state.undone += 1
    carry_out(run, state, [], evidence, verdict)
    return None


def is_good(run: Run, state: RunState) -> bool:
    """Whether the present state passes what `check_state` asks. Changes nothing."""
    return is_sound(run) and _passes(_examine_finite(run, state))


def _passes(exam: Examination) -> bool:
    return exam.weights_finite and exam.moments_finite and exam.weights_reached and not is_astray(exam)


def _examine_finite(run: Run, state: RunState) -> Examination:
    """Examine a state that is known to be finite."""
    is_reached = run.parallel.all_of(state.reach.holds(run))
    return Examination(True, True, canary_loss(run), *_canary_bounds(run, state), is_reached)


def _canary_bounds(run: Run, state: RunState) -> tuple[float, float]:
    """The canary losses to compare with: at the last snapshot, and the best.

    Infinite while kd and ce have almost no weight: training hidden states alone may raise the loss on tokens without a
    fault.
    """
    weights = run.lesson(state).weights
    if sum(weights.get(term, 0.0) for term in ("kd", "ce")) >= _LEAST_TOKEN_SHARE * sum(weights.values()):
        return state.canary_reference, state.canary_best
    return float("inf"), float("inf")


def canary_loss(run: Run) -> float:
    """Plain cross-entropy on the canary batch; positions that cannot be scored count as infinite."""
    # Dropout is off in evaluation, so the random state does not change.
    with run.parallel.gathered():
        result = evaluate(run.student, [run.canary()], precision=run.precision)
    return run.parallel.worst(result.nll if result.unscored_tokens == 0 else float("inf"))


def take_snapshot(run: Run, state: RunState, exam: Examination | None = None) -> bool:
    """Keep the present state for a rollback, unless the canary got worse. Return whether it was kept.

    The caller has checked that weights and moments are finite. A canary worse than at the last snapshot may be the
    first sign of a divergence, so the state is not kept; after two such refusals in a row the higher loss is accepted,
    unless it is far above the best.
    """
    exam = exam or _examine_finite(run, state)
    if not math.isfinite(exam.canary_loss) or is_astray(exam):
        return False
    if not is_within_band(exam) and state.snapshots_refused < _PATIENCE:
        state.snapshots_refused += 1
        return False
    state.snapshots_refused = 0
    state.canary_reference = exam.canary_loss
    state.canary_best = min(exam.canary_best, exam.canary_loss)
    keep_snapshot(run, state)
    return True


def keep_snapshot(run: Run, state: RunState) -> None:
    """Keep the present state without a check: that of a resumed run comes from a sealed checkpoint."""
    run.ring.keep(state_to_return_to(run, state))


def state_to_return_to(run: Run, state: RunState) -> Saved:
    """The present state without the best student, which a rollback does not restore."""
    saved = capture(run, state)
    without_best = {name: group for name, group in saved.tensors.items() if name != "best"}
    return Saved(saved.step, without_best, saved.scalars)


def carry_out(run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict) -> None:
    """Carry out any verdict but keep, and log it."""
    state.is_changing = True
    is_finite = math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
    # Do not locate a retry: the overflow is in the scaled gradients.
    located = "" if is_finite or verdict.action == "retry" else _located(run, state, window)
    run.log.write(
        "guard",
        step=evidence.step,
        action=verdict.action,
        reason=verdict.reason,
        located=located,
        sample_ids=[name for batch in window for name in batch.sample_ids],
        evidence={
            "loss": evidence.loss,
            "grad_norm": evidence.grad_norm,
            "terms": dict(evidence.terms),
            "loss_scale": evidence.loss_scale,
            "bad_teacher_rows": evidence.bad_teacher_rows,
        },
    )
    match verdict.action:
        case "retry":
            run.precision.back_off()
            state.retried += 1
            state.attempt += 1
        case "skip":
            _skip_window(run, state, window, evidence, verdict, located)
        case "fallback":
            _skip_window(run, state, window, evidence, verdict, located)
            state.fallback_until = state.applied + run.config.guard.fallback_steps
        case "rollback":
            settle(run, state)  # it may be what is returned to, and nothing of this line is saved after the mark
            state.rollbacks += 1
            roll_back(run, state, verdict)
        case "reset":
            settle(run, state)
            state.rollbacks += 1
            _reset(run, state)
        case _:
            keep_window(run, state, window, evidence, verdict, located)
            raise _halted(run, verdict, evidence, located)
    state.is_changing = False


def _located(run: Run, state: RunState, window: Sequence[Batch]) -> str:
    if run.parallel.is_sharded:  # the search would end at another place in each process
        return "not looked for in a sharded student"
    if run.teacher.answers_together:
        return "not looked for where the teacher is sharded"
    return locate(run, window, run.lesson(state))


def _skip_window(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> None:
    keep_window(run, state, window, evidence, verdict, located)
    state.skipped += 1
    state.quarantined.append(state.cursor)
    state.cursor += 1
    state.attempt = 0


def roll_back(run: Run, state: RunState, verdict: Verdict) -> None:
    """Return to the last good state, data cursor included. Quarantined windows stay skipped."""
    newest = run.ring.newest()
    if newest is None:
        raise Diverged(
            f"step {state.applied + 1}: {verdict.reason}, and there is no good state to return to",
            where=f"optimizer step {state.applied + 1}",
            advice=_advice(run, state.applied + 1),
        )
    failed_at = state.applied
    # The first rollback to a snapshot repeats the steps unchanged: the fault may not repeat. At the second, go back
    # one snapshot further, and after a divergence lower the learning rate.
    is_second = newest.step == state.rolled_back_to
    if is_second and len(run.ring) > 1:
        run.ring.drop_newest()
        newest = run.ring.newest() or newest
    restore(run, state, newest, keeps_history=True)
    state.rolled_back_to = newest.step
    if verdict.backs_off and is_second:
        state.backoff_at = state.applied
    run.hooks.after_return(failed_at + 1)
    run.log.write("note", text=f"rolled back from step {failed_at} to step {state.applied}")


def _reset(run: Run, state: RunState) -> None:
    if state.initial is None:
        raise Diverged(
            "the initial state was not kept, so the run cannot begin again", advice=_advice(run, state.applied + 1)
        )
    failed_at = state.applied
    restore(run, state, state.initial, keeps_history=True)
    state.rolled_back_to = -1
    state.canary_reference = state.canary_best = canary_loss(run)  # no canary loss was measured for the initial state
    if isinstance(run.ring, SnapshotRing):  # its snapshots are of the training that was dropped
        while len(run.ring):
            run.ring.drop_newest()
        keep_snapshot(run, state)
    run.hooks.after_return(failed_at + 1)
    run.log.write("note", text="began again from the initial weights: all training so far is lost")


def _halted(run: Run, verdict: Verdict, evidence: Evidence, located: str) -> StillroomError:
    kinds: dict[int, type[StillroomError]] = {20: BrokenAtStart, 21: TooManySkips, 22: Diverged, 23: LossScaleAtFloor}
    kind = kinds.get(verdict.exit_code, Diverged)
    what = f"{verdict.reason}: {located}" if located else verdict.reason
    return kind(what, where=f"optimizer step {evidence.step}", advice=_advice(run, evidence.step, evidence))


def _advice(run: Run, step: int, evidence: Evidence | None = None) -> list[str]:
    """Advice for the cause of the halt, most promising first."""
    if run.hooks.last_strike is not None and step - run.hooks.last_strike[1] <= _AFTERMATH:
        name, at = run.hooks.last_strike
        return [f"nothing to change: --inject struck {name} at step {at}; the same run without it may be sound"]
    advice = []
    if evidence is not None and evidence.bad_teacher_rows:
        told = not_finite_advice(teacher_dtype(run.config, run.device))
        advice += [f"the teacher's answers are not finite: {text}" for text in told]
    if evidence is not None and evidence.is_scale_at_floor:
        advice.append("FP16 overflows in the student itself: --precision fp32, or bf16-mixed where the card has it")
    if evidence is not None and not math.isfinite(evidence.terms.get("ce", 0.0)):
        advice.append("the student's own logits are not finite: lower train.learning_rate by a factor of ten")
    return [
        *advice,
        "lower the learning rate: --set train.learning_rate=...",
        "look at the batches that were set aside, in quarantine/",
    ]
