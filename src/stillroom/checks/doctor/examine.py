"""Look at a set-up with every check, and gather what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Importing a module registers its checks; the order is that of the report.
from stillroom.checks.doctor import machine as machine  # isort: skip
from stillroom.checks.doctor import installation as installation  # isort: skip
from stillroom.checks.doctor import configuration as configuration  # isort: skip
from stillroom.checks.doctor import tokenizers as tokenizers  # isort: skip
from stillroom.checks.doctor import data as data  # isort: skip
from stillroom.checks.doctor import models as models  # isort: skip
from stillroom.checks.doctor import step as step  # isort: skip
from stillroom.checks.doctor.facts import read_machine
from stillroom.checks.doctor.finding import CHECKS, SUBJECTS, Check, Finding, of_error
from stillroom.checks.doctor.setup import NotLooked, PartFailed, Setup
from stillroom.config import Loaded
from stillroom.ends import explained
from stillroom.engine.building.device import find_device
from stillroom.errors import StillroomError


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    def of(self, level: str) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.level == level)

    def to_dict(self) -> dict[str, Any]:
        counts = {level: len(self.of(level)) for level in ("red", "amber", "green")}
        return {**counts, "findings": [one.to_dict() for one in self.findings]}


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
            findings.append(of_error(error, "configuration"))
    try:
        where = find_device(device)
    except StillroomError as error:
        findings.append(of_error(error, "machine"))
        where = torch.device("cpu")
    config, notes = (loaded.config, loaded.notes) if loaded else (None, ())
    setup = Setup(read_machine(where, Path.cwd()), config, device=where, notes=notes)
    wanted = [one for one in CHECKS if not (is_quick and one.is_slow)]
    return Report((*findings, *look(setup, wanted, on_subject)))


def look(
    setup: Setup, checks: Iterable[Check] = tuple(CHECKS), on_subject: Callable[[str], None] = lambda _subject: None
) -> list[Finding]:
    """The findings of some checks, each once, by subject. An error that a run would end with is a red one."""
    found: list[Finding] = []
    last = ""
    for one in checks:
        if one.needs_config and not setup.has_config:
            continue
        if one.subject != last:
            on_subject(one.subject)
            last = one.subject
        found += _of(one, setup)
    unique: dict[str, Finding] = {}
    for finding in found:
        unique.setdefault(finding.what, finding)
    return sorted(unique.values(), key=lambda finding: SUBJECTS.index(finding.subject))


def _of(one: Check, setup: Setup) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in one.look(setup):
            found.append(finding)
    except NotLooked:
        pass  # what it rests on has a finding of its own
    except PartFailed as failed:
        found.append(of_error(failed.error, failed.subject))
    except StillroomError as error:
        found.append(of_error(error, one.subject))
    except Exception as error:  # memory and disk have an explanation; anything else is a fault of ours
        end = explained(error, one.subject)
        if end is None:
            raise
        found.append(of_error(end, one.subject))
    return found
