"""Causes in the terms of the objective: dead, dominating, active where they should be zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stillroom.diagnosis.case import Case, cited, mean, terms_of
from stillroom.diagnosis.cause import Cause
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.events import Event
from stillroom.telemetry.wording import as_number, clean, format_percent

INNER = frozenset({"feature", "attention", "layerwise", "contrastive"})
_DEAD = 0.005  # of the objective
_DOMINATING = 0.95
_SMALL_WEIGHT = 0.02  # of all weights: a term with a larger one is small because its raw value is, as a ramp may be
_LEAST_STEPS = 3


def _by_term(steps: list[Event], key: str) -> dict[str, list[float]]:
    """The values of each term in the steps in which it has a weight."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, term in terms_of(step).items():
            value = as_number(term.get(key))
            if as_number(term.get("weight")) and value is not None:
                found.setdefault(name, []).append(value)
    return {name: values for name, values in found.items() if len(values) >= _LEAST_STEPS}


def active_when_zero(case: Case) -> Finding | None:
    """A term that looks inside the models is active in the first phase, or a term of weight 0 enters all the same."""
    wrong = [step for step in [*case.steps, *case.record.evals] if _unasked(step)]
    if wrong:
        names = sorted({name for step in wrong for name in _unasked(step)})
        return Finding(
            "active_when_zero",
            "problem",
            f"{', '.join(names)} has weight 0 and adds to the objective in {len(wrong)} records",
            "train and eval must weigh alike: this is a fault of the program that wrote the events",
            steps=cited(wrong),
            setting=f"objectives.{names[0]}.weight=0",
            numbers={"records": len(wrong)},
        )
    phases = list(dict.fromkeys(str(step.get("phase") or "") for step in case.steps))
    planned = case.setting("curriculum.phases") or ()
    if len(planned) < 2 or not phases:
        return None
    first = [step for step in case.steps if str(step.get("phase") or "") == phases[0]]
    early = {name: values for name, values in _by_term(first, "weight").items() if name in INNER}
    if not early:
        return None
    shares = _by_term(first, "share")
    said = ", ".join(
        f"{name} at weight {mean(w):.3g} ({format_percent(mean(shares[name]))})" for name, w in early.items()
    )
    name, weights = next(iter(early.items()))
    until = _until(planned, phases[0])
    return Finding(
        "active_when_zero",
        "warning",
        f"in the first phase, {clean(phases[0])}, {said} of the objective; a curriculum begins with the logits alone",
        "let the term begin after the first phase, as a ramp",
        steps=(int(first[0]["step"]), int(first[-1]["step"])),
        setting=f"objectives.{name}.weight={ramp_text(max(weights), until)}",
        numbers={"phase": phases[0], **{f"{term}_weight": mean(w) for term, w in early.items()}},
    )


def ramp_text(end: float, begin: float) -> str:
    """A ramp as a value for --set: nothing until `begin`, `end` at twice that."""
    return f"{{start = 0.0, end = {end:g}, begin = {begin:g}, until = {min(1.0, 2 * begin):g}}}"


def _until(planned: Any, phase: str) -> float:
    for one in planned:
        if isinstance(one, Mapping) and one.get("name") == phase:
            return as_number(one.get("until")) or 0.3
    return 0.3


def _unasked(step: Mapping[str, Any]) -> list[str]:
    return [
        clean(name)
        for name, term in terms_of(step).items()
        if not as_number(term.get("weight")) and as_number(term.get("scaled"))
    ]


def _last_phase(case: Case) -> list[Event]:
    phase = case.steps[-1].get("phase") if case.steps else None
    return [step for step in case.steps if step.get("phase") == phase]


def dominating_component(case: Case) -> Finding | None:
    """One term is almost all of the objective because of its weight: the others are not learned."""
    steps = _last_phase(case)
    shares, weights, raws = (_by_term(steps, key) for key in ("share", "weight", "raw"))
    for name, values in shares.items():
        others = [other for other in shares if other != name]
        if not others or mean(values) < _DOMINATING or not (name in INNER or mean(weights[name]) > 2.0):
            continue
        wanted = mean(weights[name]) * (1.0 - mean(values)) / mean(values)
        return Finding(
            "dominating_component",
            "problem",
            f"{clean(name)} is {format_percent(mean(values))} of the objective (raw {mean(raws[name]):.3g} at weight "
            f"{mean(weights[name]):.3g}); "
            + ", ".join(f"{clean(other)} {format_percent(mean(shares[other]))}" for other in others),
            f"lower the weight of {clean(name)}; at the proposed one it has half of the objective",
            steps=(int(steps[0]["step"]), int(steps[-1]["step"])),
            setting=f"objectives.{clean(name)}.weight={wanted:.2g}",
            numbers={"term": name, "share": mean(values), "weight": mean(weights[name])},
        )
    return None


def dead_component(case: Case) -> Finding | None:
    """A term that has a weight and hardly a share: it costs time and teaches nothing."""
    steps = _last_phase(case)
    shares, weights, raws = (_by_term(steps, key) for key in ("share", "weight", "raw"))
    if len(shares) < 2:
        return None
    for name, values in shares.items():
        is_nothing = max(raws[name]) == 0.0
        asked = mean(weights[name]) / sum(mean(others) for others in weights.values())
        if mean(values) >= _DEAD or not (is_nothing or asked < _SMALL_WEIGHT):
            continue
        is_contrast = name == "contrastive" and is_nothing and case.setting("train.batch_size") in (1, None)
        return Finding(
            "dead_component",
            "warning",
            f"{clean(name)} is {format_percent(mean(values), 3)} of the objective (raw {mean(raws[name]):.3g} at "
            f"weight {mean(weights[name]):.3g})",
            "a row has nothing to be told from in a batch of one: raise train.batch_size"
            if is_contrast
            else f"leave it out (objectives.{clean(name)}.weight=0), or give it a weight that counts",
            steps=(int(steps[0]["step"]), int(steps[-1]["step"])),
            setting="train.batch_size=8" if is_contrast else f"objectives.{clean(name)}.weight=0",
            numbers={"term": name, "share": mean(values), "weight": mean(weights[name]), "raw": mean(raws[name])},
        )
    return None


CAUSES = (
    Cause(active_when_zero),
    Cause(dominating_component, explains=("dead_component", "rate_too_low", "train_eval_gap")),
    Cause(dead_component),
)
