"""Ask every check and put the findings in order: the gravest first, and a root before what follows from it."""

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


def diagnose(case: Case) -> list[Finding]:
    """The findings of a run, the most likely root cause first. Harmful settings come last, as hints.

    A run that asks about itself is told what is worth saying while it goes on, and nothing about its settings.
    """
    asked = [cause for cause in CAUSES if cause.is_live or not case.is_live]
    found = {cause.name: finding for cause in asked if (finding := cause.check(case)) is not None}
    findings = _ordered(found)
    if case.is_live:
        return findings
    named = {_key(finding) for finding in findings} - {""}
    hints = [replace(one, severity="hint") for one in harmful_settings(case.record.config)]
    return findings + [hint for hint in hints if _key(hint) not in named]


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
