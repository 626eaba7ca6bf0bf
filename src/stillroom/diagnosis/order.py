"""Ask every check and put the findings in order: the gravest first, and a root before what follows from it.

Advice is held against the run: what it had already, or what --inject did to it on purpose, is not advised away.
"""

from __future__ import annotations

from dataclasses import replace

from stillroom.diagnosis import components, data, ending, learning, machine, precision, schedule, teacher
from stillroom.diagnosis.case import Case
from stillroom.diagnosis.finding import SEVERITIES, Finding
from stillroom.diagnosis.settings import harmful_settings

# In the order of a run, from its data to its end.
CAUSES = (
    *data.CAUSES,
    *teacher.CAUSES,
    *schedule.CAUSES,
    *precision.CAUSES,
    *components.CAUSES,
    *learning.CAUSES,
    *machine.CAUSES,
    *ending.CAUSES,
)


_TEACHERS_FAULTS = frozenset({"teacher_nan", "teacher_garbage", "router_nan"})
_FAULTS = _TEACHERS_FAULTS | {
    "nan_weight", "nan_embedding", "huge_weight", "inf_logit", "bad_batch", "all_masked", "inf_grad", "nan_grad",
    "nan_moment", "lr_spike", "oom",
}  # fmt: skip
_ENDS = frozenset({"kill", "disk_full", "freeze"})
# What --inject can provoke, and by which faults.
_PROVOKED = {
    "divergence": _FAULTS,
    "refused_batches": _FAULTS,
    "rate_too_high": _FAULTS,
    "loss_scale_collapsed": _FAULTS,
    "teacher_degraded": _TEACHERS_FAULTS,
    "masked_out_data": frozenset({"all_masked"}),
    "stopped_early": _FAULTS | _ENDS,
    "stalled_run": _ENDS,
}
_AFTERMATH = 8  # steps after a fault that it may still be the cause of: the state is looked at after 1, 2, 4, 8 ...


def diagnose(case: Case) -> list[Finding]:
    """The findings of a run, the most likely root cause first. Harmful settings come last, as hints.

    A run that asks about itself is told what is worth saying while it goes on, and nothing about its settings.
    """
    asked = [cause for cause in CAUSES if cause.is_live or not case.is_live]
    found = {cause.name: _fitting(case, finding) for cause in asked if (finding := cause.check(case)) is not None}
    findings = _ordered(found)
    if case.is_live:
        return findings
    named = {_key(finding) for finding in findings} - {""}
    hints = [replace(one, severity="hint") for one in harmful_settings(case.record.config)]
    return findings + [hint for hint in hints if _key(hint) not in named]


def _fitting(case: Case, finding: Finding) -> Finding:
    """The finding with advice that can be right for this run."""
    struck = _strikes(case, finding)
    if struck:
        names = ", ".join(dict.fromkeys(f"{name} at step {step:,}" for name, step in struck[:3]))
        told = f"nothing to change: --inject struck {names}; a run without it shows whether anything else is wrong"
        return replace(finding, advice=told, setting="")
    if finding.setting and case.has(finding.setting):
        return replace(finding, advice=finding.otherwise or f"{finding.setting} was not enough", setting="")
    return finding


def _strikes(case: Case, finding: Finding) -> list[tuple[str, int]]:
    """The injected faults that account for all steps of a finding; none where a step is left over."""
    faults = _PROVOKED.get(finding.cause, frozenset())
    strikes = [(name, step) for name, step in case.injected if name in faults or name.partition("_")[0] in faults]

    def is_of(step: int) -> bool:
        return any(-1 <= step - at <= _AFTERMATH for _, at in strikes)

    steps = finding.steps if finding.cause != "rate_too_high" else finding.steps[-1:]
    return strikes if all(is_of(step) for step in steps) else []


def roots(findings: list[Finding]) -> list[Finding]:
    """The findings that do not follow from another one."""
    causes = {cause.name: cause for cause in CAUSES}
    explained = {name for one in findings if one.cause in causes for name in causes[one.cause].explains}
    return [finding for finding in findings if finding.cause not in explained]


def _key(finding: Finding) -> str:
    return finding.setting.partition("=")[0]


def _ordered(found: dict[str, Finding]) -> list[Finding]:
    """By gravity, then roots before what they explain, then by the order of the causes.

    A cause is as grave as the gravest finding that follows from it.
    """
    gravity = {name: SEVERITIES.index(finding.severity) for name, finding in found.items()}
    explained: set[str] = set()
    for cause in CAUSES:
        if cause.name in found:
            gravity[cause.name] = min(
                [gravity[cause.name], *(gravity[name] for name in cause.explains if name in found)]
            )
            explained |= set(cause.explains)
    ranks = {cause.name: rank for rank, cause in enumerate(CAUSES)}
    order = sorted(found, key=lambda name: (gravity[name], name in explained, ranks[name]))
    return [replace(found[name], severity=SEVERITIES[gravity[name]]) for name in order]
