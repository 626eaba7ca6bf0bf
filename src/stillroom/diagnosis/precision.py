"""Causes in the number format: a collapsed loss scale, updates that are lost, gradients that are zero."""

from __future__ import annotations

from stillroom.diagnosis.case import Case, cited, mean, numbers, span
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.run_record import mapping
from stillroom.telemetry.wording import as_number, format_lr, format_percent

_COLLAPSED = 1 / 256  # of the first loss scale
_MOSTLY = 0.5
_NEARLY_ALL = 0.9


def loss_scale_collapsed(case: Case) -> Finding | None:
    """FP16 gradients overflow at ever smaller loss scales."""
    scaled = [step for step in case.attempts if (as_number(step.get("loss_scale")) or 1.0) != 1.0]
    at_floor = case.record.end.get("exit_code") == 23
    if not at_floor and not scaled:
        return None
    scales = numbers(case.attempts, "loss_scale")
    retried = [step for step in case.attempts if step.get("verdict") == "retry"]
    if not at_floor and not scales[-1] <= _COLLAPSED * scales[0]:
        return None
    return Finding(
        "loss_scale_collapsed",
        "problem",
        f"the loss scale fell from {scales[0]:g} to {min(scales):g} in {len(retried)} retries"
        + ("; it is at its floor and the run stopped" if at_floor else ""),
        "bf16-mixed where the card has it, else fp32: gradients that overflow at every scale are too large for FP16",
        steps=cited(retried),
        setting="precision.mode=fp32",
        numbers={"first_scale": scales[0], "least_scale": min(scales), "retries": len(retried)},
    )


def zero_gradients(case: Case) -> Finding | None:
    """Most steps have no gradient: the objective does not depend on the weights."""
    dead = [step for step in case.steps if as_number(step.get("grad_norm")) == 0.0]
    sampled = numbers(case.steps, "zero_gradient_fraction")
    share = len(dead) / max(len(case.steps), 1)
    # One sample says little: half of a fresh adapter has no gradient in the first step.
    is_sampled_dead = len(sampled) > 1 and mean(sampled) >= _NEARLY_ALL
    if share < _MOSTLY and not is_sampled_dead:
        return None
    clamped = [key for key in ("clamped_losses", "clamped_fraction") if any(numbers(case.steps, key))]
    parts = [f"the gradient is exactly 0 in {len(dead)} of {len(case.steps)} steps"]
    if sampled:
        parts.append(f"{format_percent(mean(sampled))} of the gradients of a sampled matrix are 0")
    setting, advice = "objectives.kd.weight=1", "give a term with a gradient a weight"
    if clamped:
        clamp = "guard.loss_clamp" if "clamped_losses" in clamped else "guard.logit_clamp"
        parts.append(f"{clamp} is {case.number(clamp):g}, and what is clamped has no gradient")
        setting, advice = f"{clamp}=0", "turn the clamp off"
    return Finding(
        "zero_gradients",
        "problem",
        "; ".join(parts),
        advice,
        steps=cited(dead) or span(case.steps),
        setting=setting,
        otherwise="see which terms have a weight in the steps' records, and whether they depend on the student",
        numbers={"steps": len(dead), "share": share, "zero_gradient_fraction": mean(sampled) if sampled else None},
    )


def noop_updates(case: Case) -> Finding | None:
    """Updates that are smaller than the spacing of the stored numbers are lost."""
    sampled = [step for step in case.steps if as_number(step.get("noop_update_fraction")) is not None]
    lost = [
        (as_number(step.get("noop_update_fraction")) or 0.0) - (as_number(step.get("zero_gradient_fraction")) or 0.0)
        for step in sampled
    ]
    mode = str(mapping(case.record.start, "precision").get("mode"))
    # Stochastic rounding keeps a weight most of the time and moves it by more when it does: the mean arrives.
    bound = _NEARLY_ALL + 0.09 if mode == "fp16-sr" else _MOSTLY
    if not lost or mean(lost) < bound:
        return None
    rate = case.number("train.learning_rate")
    return Finding(
        "noop_updates",
        "problem" if mode != "fp16-sr" else "warning",
        f"{format_percent(mean(lost))} of the weights of a sampled matrix did not move although they had a gradient, "
        f"at {format_lr(max(numbers(case.steps, 'lr'), default=0.0))} and less, in {mode}",
        "keep FP32 masters (precision.mode=fp16-master), or raise the learning rate"
        if mode in ("fp16-sr", "fp16-split")
        else "raise the learning rate",
        steps=cited(sampled),
        setting="precision.mode=fp16-master"
        if mode in ("fp16-sr", "fp16-split")
        else f"train.learning_rate={100 * rate:.2g}",
        numbers={"noop_update_fraction": mean(lost), "learning_rate": rate},
    )


CAUSES = (
    Cause(loss_scale_collapsed, explains=("divergence", "refused_batches", "stopped_early")),
    Cause(zero_gradients, explains=("rate_too_low", "noop_updates")),
    Cause(noop_updates, explains=("rate_too_low",)),
)
