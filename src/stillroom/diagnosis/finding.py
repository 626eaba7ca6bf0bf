"""A finding: one cause, with its evidence and a setting to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["problem", "warning", "hint"]

# problem: the result is lost or harmed; warning: it could be better, or means less than it seems; hint: it costs time,
# or is worth knowing.
SEVERITIES: tuple[Severity, ...] = ("problem", "warning", "hint")


@dataclass(frozen=True)
class Finding:
    """One cause. `setting` is a value for --set; empty where no setting helps.

    `otherwise` is the advice for a run that has this setting already.
    """

    cause: str
    severity: Severity
    evidence: str
    advice: str
    steps: tuple[int, ...] = ()
    setting: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    otherwise: str = ""

    @property
    def is_alarming(self) -> bool:
        return self.severity != "hint"

    def to_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "severity": self.severity,
            "steps": list(self.steps),
            "evidence": self.evidence,
            "advice": f"{self.advice}: --set '{self.setting}'" if self.setting else self.advice,
            "setting": self.setting,
            "numbers": dict(self.numbers),
        }
