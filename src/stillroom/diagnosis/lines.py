"""A diagnosis as lines of plain text, of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from stillroom.diagnosis.case import Case
from stillroom.diagnosis.finding import Finding
from stillroom.telemetry.reading import show
from stillroom.telemetry.wording import clean, format_result

WIDTH = 80
_LABEL = 9


def words(cause: str) -> str:
    """`rate_too_high` -> `rate too high`."""
    return clean(cause.replace("_", " "))


def step_words(steps: Sequence[int]) -> str:
    """`step 4`, `steps 4, 9`; empty where a finding is about the run as a whole."""
    if not steps or tuple(steps) == (0,):
        return "before the first step" if steps else ""
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(f"{step:,}" for step in steps)


def finding_lines(number: int, finding: Finding) -> list[str]:
    where = step_words(finding.steps)
    head = f"{number}. {finding.severity}  {words(finding.cause)}" + (f"  ({where})" if where else "")
    lines = [head, *labelled("evidence", finding.evidence), *labelled("advice", finding.advice)]
    # Not wrapped: a line break inside the quotes would not be the same setting.
    return [*lines, f"   {'setting':<{_LABEL}}--set '{clean(finding.setting)}'"] if finding.setting else lines


def labelled(label: str, text: str) -> list[str]:
    parts = textwrap.wrap(
        clean(text), WIDTH - _LABEL - 3, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return [f"   {label if place == 0 else '':<{_LABEL}}{part}" for place, part in enumerate(parts or [""])]


def run_lines(case: Case, findings: Sequence[Finding]) -> list[str]:
    """What `stillroom diagnose RUN` prints."""
    record = case.record
    lines = [f"run       {clean(record.name)}", f"state     {state_of(case)}"]
    results = [
        f"{label} {show(row, 'perplexity', format_result)}"
        for label, row in (
            ("teacher", record.result("teacher")),
            ("before", record.result("student_before")),
            ("student", record.result("student")),
        )
        if row
    ]
    lines += [f"result    perplexity: {', '.join(results)}"] if results else []
    for sentence in record.missing:
        lines += [f"{'missing' if part == 0 else '':<10}{text}" for part, text in enumerate(_wrapped(sentence))]
    return [*lines, "", *_verdict(findings)]


def config_lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """What `stillroom diagnose CONFIG` prints."""
    return [f"config    {clean(name)}", "", *_verdict(findings)]


def _verdict(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["nothing found that harms this run"]
    lines: list[str] = []
    for number, finding in enumerate(findings, start=1):
        lines += [*finding_lines(number, finding), ""]
    alarming = sum(finding.is_alarming for finding in findings)
    return [*lines, f"{len(findings)} found, {alarming} of them more than a hint; the most likely root is first"]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(clean(text), WIDTH - 10, break_long_words=False, break_on_hyphens=False) or [""]


def state_of(case: Case) -> str:
    """How far the run is, in words."""
    done, planned, end = case.last_step, case.planned_steps, case.record.end
    place = f"step {done:,} of {planned:,}" if planned else f"step {done:,}"
    if end:
        return f"{clean(end.get('status') or 'ended')}, {place}, exit code {clean(end.get('exit_code', '-'))}"
    if case.is_owned:
        return f"a process works on it, {place}"
    if not case.record.events:
        return "unknown: there are no events"
    return f"not ended, {place}" + ("; no process works on it" if case.is_owned is False else "")


def as_dict(case: Case, findings: Sequence[Finding]) -> dict[str, Any]:
    """What `stillroom diagnose RUN --json` prints."""
    return {
        "run": case.record.name,
        "state": state_of(case),
        "missing": list(case.record.missing),
        "findings": [finding.to_dict() for finding in findings],
    }
