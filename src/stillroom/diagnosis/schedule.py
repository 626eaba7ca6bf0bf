"""Causes in the learning rate and its schedule."""

from __future__ import annotations

from stillroom.diagnosis.case import Case, cited, log_of, mean, middle, numbers, span
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.reading import reading
from stillroom.telemetry.wording import as_number, format_count, format_lr, format_percent

_LONG_WARMUP = 0.5  # of the run
_SUSPECT_WARMUP = 0.3
_USUAL_WARMUP = (0.01, 0.2)
_TRIAL_STEPS = 10  # a shorter run says little about its rate
_HARDLY = 0.01  # nats
_HARDLY_SHARE = 0.002  # of the distance to the teacher
_ROOM = 0.2  # nats
_ROSE = 0.5  # nats of training loss above its best stretch
_STRETCH = 5


def schedule_in_micro_batches(case: Case) -> Finding | None:
    """Warm-up or length of the run counted in micro-batches: too long by the accumulation."""
    steps, micro = case.planned_steps, case.accumulation
    batches = as_number(case.schedule.get("total_batches")) or 0.0
    asked, warmup = case.number("train.max_steps"), case.number("train.warmup_steps")
    if micro < 2 or not steps:
        return None
    low, high = _USUAL_WARMUP
    share = warmup / steps
    if share >= _SUSPECT_WARMUP and low <= share / micro <= high:
        meant = max(1, round(warmup / micro))
        return Finding(
            "schedule_in_micro_batches",
            "problem",
            f"train.warmup_steps is {format_count(warmup)} of {format_count(steps)} optimizer steps "
            f"({format_percent(share)}); at {micro} micro-batches a step it would be {format_percent(share / micro)} "
            "of the micro-batches",
            f"count in optimizer steps: divide by train.gradient_accumulation_steps ({micro})",
            steps=span(case.steps),
            setting=f"train.warmup_steps={meant}",
            numbers={"warmup_steps": warmup, "optimizer_steps": steps, "accumulation": micro},
        )
    epochs = case.number("train.epochs", 1.0)
    if asked and batches and abs(asked - batches * epochs) <= 0.01 * asked:
        meant = max(1, round(asked / micro))
        return Finding(
            "schedule_in_micro_batches",
            "warning",
            f"train.max_steps is {format_count(asked)}, the number of micro-batches in {epochs:g} epochs; a step has "
            f"{micro}, so the run takes {micro} times as many passes over the data",
            "count in optimizer steps",
            steps=span(case.steps),
            setting=f"train.max_steps={meant}",
            numbers={"max_steps": asked, "total_batches": batches, "accumulation": micro},
        )
    return None


def never_out_of_warmup(case: Case) -> Finding | None:
    """The run spends most of its steps in warm-up, or ended inside it: the peak rate is hardly ever used."""
    steps, warmup = case.planned_steps, as_number(case.schedule.get("warmup_steps")) or 0.0
    if steps < _TRIAL_STEPS or not case.steps:
        return None
    share, last = warmup / steps, case.last_step
    is_inside = last <= warmup and case.record.is_finished
    if share < _LONG_WARMUP and not is_inside:
        return None
    asked = case.number("train.warmup_steps")  # overrides the ratio
    peak = as_number(case.schedule.get("learning_rate")) or case.number("train.learning_rate")
    reached, typical = max(numbers(case.steps, "lr"), default=0.0), middle(numbers(case.steps, "lr"))
    return Finding(
        "never_out_of_warmup",
        "problem" if share >= _LONG_WARMUP else "warning",
        f"warm-up takes {format_count(warmup)} of {format_count(steps)} steps ({format_percent(share)}); the rate was "
        f"{format_lr(typical)} in the median step and {format_lr(reached)} at most, of a peak of {format_lr(peak)}",
        "a tenth of the run is usual",
        steps=span(case.steps),
        setting=f"train.warmup_steps={max(1, steps // 10)}" if asked else "train.warmup_ratio=0.1",
        otherwise="train for longer: the run ended inside its warm-up",
        numbers={"warmup_steps": warmup, "steps": steps, "last_step": last, "peak": peak, "median_lr": typical},
    )


def rate_too_high(case: Case) -> Finding | None:
    """The student was driven away by its own updates: finite, and worse."""
    astray = [event for event in case.guards if "canary loss" in str(event.get("reason"))]
    before, last = case.nll_before, case.nll_last
    is_worse = before is not None and last is not None and last > before + _HARDLY and case.last_step >= _TRIAL_STEPS
    rise = _rise(case)
    if not astray and not (is_worse and not case.is_live) and rise is None:
        return None
    rate, bound = case.number("train.learning_rate"), case.number("train.max_grad_norm", 1.0)
    norms = numbers(case.attempts, "grad_norm")
    parts = []
    if astray:
        parts.append(f"{len(astray)} times the loss on a fixed batch ran away, first: {astray[0].get('reason')}")
    if is_worse:
        parts.append(f"held-out loss {last:.3g} after the last step, {before:.3g} before training")
    if rise is not None:
        parts.append(f"training loss rose from {rise[0]:.3g} to {rise[1]:.3g}")
    if norms:
        over = mean([float(norm > bound) for norm in norms])
        parts.append(f"gradients were clipped in {format_percent(over, 0)} of the steps")
    is_lost = is_worse or case.record.end.get("exit_code") == 22
    return Finding(
        "rate_too_high",
        "problem" if is_lost or rise is not None else "warning",
        f"at a peak rate of {format_lr(rate)}: " + "; ".join(parts),
        "lower the learning rate, or warm up for longer",
        steps=cited(astray) or span(case.steps),
        setting=f"train.learning_rate={rate / 10:.2g}",
        numbers={"learning_rate": rate, "runaways": len(astray), "nll_before": before, "nll_last": last},
    )


def _rise(case: Case) -> tuple[float, float] | None:
    """The best stretch of training loss and the last, where the last is far above, in the last phase."""
    if not case.steps:
        return None
    phase = case.steps[-1].get("phase")
    losses = numbers([step for step in case.steps if step.get("phase") == phase], "train_loss")
    stretches = [middle(losses[at : at + _STRETCH]) for at in range(0, len(losses) - _STRETCH + 1, _STRETCH)]
    if len(stretches) < 2:
        return None
    best, last = min(stretches), stretches[-1]
    return (best, last) if last > best + max(_ROSE, 0.25 * abs(best)) else None


def rate_too_low(case: Case) -> Finding | None:
    """The held-out loss hardly fell although there was room."""
    before, best, teacher = case.nll_before, case.nll_best, case.nll("teacher")
    if before is None or best is None or case.record.evals[-1]["step"] < _TRIAL_STEPS:
        return None
    room = before - (teacher if teacher is not None else 0.0)
    gain = before - best
    last = log_of(reading(case.record.evals[-1], "perplexity"))
    if room < _ROOM or gain >= max(_HARDLY, _HARDLY_SHARE * room) or last is None or last > before + _HARDLY:
        return None
    rate = case.number("train.learning_rate")
    travel = sum(numbers(case.steps, "lr"))
    whose = f"; the teacher's is {teacher:.3g}" if teacher is not None else ""
    return Finding(
        "rate_too_low",
        "problem",
        f"{case.last_step:,} steps lowered the held-out loss by {gain:.2g} nats, from {before:.4g}{whose}; the rates "
        f"of all steps add up to {travel:.2g}, which is about how far a weight can move",
        "raise the learning rate, or train for longer",
        steps=span(case.steps),
        setting=f"train.learning_rate={min(10 * rate, max(3e-3, rate)):.2g}",
        otherwise="train for longer",
        numbers={"learning_rate": rate, "gain": gain, "room": room, "travel": travel},
    )


def divergence(case: Case) -> Finding | None:
    """The state was lost and had to be given up: rollbacks, a reset, or the end of the run."""
    given_up = [event for event in case.guards if event.get("action") in ("rollback", "reset", "halt")]
    is_ended = case.record.end.get("exit_code") == 22 or case.record.summary.get("status") == "diverged"
    if not given_up and not is_ended:
        return None
    ended = case.record.end.get("reason") or case.record.summary.get("reason") or "the run ended as diverged"
    evidence = (
        f"{len(given_up)} times the state was given up; the last: {given_up[-1].get('reason')}" if given_up else ended
    )
    is_lost = is_ended or case.record.end.get("exit_code") in (21, 23)
    strict, mode = case.setting("guard.on_nonfinite") == "halt", str(case.effective("precision.mode"))
    rate = case.number("train.learning_rate", 1e-3)
    if strict:
        advice, setting = "let the guard skip and roll back", "guard.on_nonfinite=recover"
    elif mode == "fp32":
        advice = "lower the learning rate, and look at the batch: `stillroom replay RUN STEP`"
        setting = f"train.learning_rate={rate / 10:.2g}"
    else:
        advice = "train in a precision with more range, and look at the batch: `stillroom replay RUN STEP`"
        setting = "precision.mode=fp32"
    return Finding(
        "divergence",
        "problem" if is_lost else "warning",
        str(evidence),
        advice,
        steps=cited(given_up),
        setting=setting,
        numbers={"times": len(given_up), "rollbacks": case.record.summary.get("rollbacks")},
    )


_FOLLOWS = ("rate_too_low",)
CAUSES = (
    Cause(schedule_in_micro_batches, explains=("never_out_of_warmup", "data_exhausted", *_FOLLOWS)),
    Cause(never_out_of_warmup, explains=_FOLLOWS),
    Cause(rate_too_high, explains=("divergence", "overfitting", "refused_batches", "stopped_early")),
    Cause(rate_too_low, is_live=False),
    Cause(divergence, explains=("refused_batches", "stopped_early")),
)
