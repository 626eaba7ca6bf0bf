"""Look at a set-up with every rule of the doctor, and gather what is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.config import Loaded
from stillroom.core.errors import StillroomError
from stillroom.core.shortages import explained
from stillroom.doctor import setup_rules
from stillroom.doctor.printed import doctor_lines
from stillroom.doctor.rules import Finding, Rule, rules_for
from stillroom.doctor.setup import NotLooked, PartFailed, Setup, read_machine
from stillroom.precision.device import find_device

SUBJECTS = setup_rules.SUBJECTS  # in the order of the report


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    def of(self, level: str) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.level == level)

    def __str__(self) -> str:
        return "\n".join(line for _level, line in doctor_lines(self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        findings = [
            {"level": one.level, "subject": one.subject, "cause": one.cause, "what": one.evidence, "try": one.remedy}
            for one in self.findings
        ]
        return {**{level: len(self.of(level)) for level in ("red", "amber", "green")}, "findings": findings}


def examine(
    load: Callable[[], Loaded] | None,
    *,
    device: str = "auto",
    is_quick: bool = False,
    on_subject: Callable[[str], None] = lambda _subject: None,
) -> Report:
    """Look at this machine and, where `load` gives one, at a configuration."""
    findings: list[Finding] = []
    loaded = None
    if load is not None:
        try:
            loaded = load()
        except StillroomError as error:
            findings.append(_of_error(error, "configuration"))
    try:
        where = find_device(device)
    except StillroomError as error:
        findings.append(_of_error(error, "machine"))
        where = torch.device("cpu")
    config, notes = (loaded.config, loaded.notes) if loaded else (None, ())
    setup = Setup(read_machine(where, Path.cwd()), config, device=where, notes=notes)
    wanted = [rule for rule in rules_for("setup") if not (is_quick and rule.is_slow)]
    return Report((*findings, *look(setup, wanted, on_subject)))


def look(
    setup: Setup, rules: Iterable[Rule], on_subject: Callable[[str], None] = lambda _subject: None
) -> list[Finding]:
    """The findings of some rules, each once, by subject. An error that a run would end with is a red one."""
    findings: list[Finding] = []
    last = ""
    for rule in rules:
        if rule.needs_config and not setup.has_config:
            continue
        if rule.subject != last:
            on_subject(rule.subject)
            last = rule.subject
        findings += _found_by(rule, setup)
    unique: dict[str, Finding] = {}
    for finding in findings:
        unique.setdefault(finding.evidence, finding)
    return sorted(unique.values(), key=lambda finding: SUBJECTS.index(finding.subject))


def _found_by(rule: Rule, setup: Setup) -> list[Finding]:
    findings: list[Finding] = []
    try:
        for finding in rule.find(setup):
            findings.append(finding)
    except NotLooked:
        pass  # the part that it needs has its own finding
    except PartFailed as failed:
        findings.append(_of_error(failed.error, failed.subject))
    except StillroomError as error:
        findings.append(_of_error(error, rule.subject))
    except Exception as error:  # memory and disk have an explanation; anything else is a bug
        end = explained(error, rule.subject)
        if end is None:
            raise
        findings.append(_of_error(end, rule.subject))
    return findings


def _of_error(error: StillroomError, subject: str) -> Finding:
    """An error that a run would end with."""
    where = f" ({error.where})" if error.where else ""
    to_try = "; or ".join(error.advice) or "stillroom distill --dry-run shows where it stops"
    return Finding("problem", f"{error.what}{where}", to_try, cause=type(error).__name__, subject=subject)
