"""A finding, and the registry of checks that make them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stillroom.errors import StillroomError

if TYPE_CHECKING:
    from stillroom.checks.doctor.setup import Setup

Level = Literal["green", "amber", "red"]
SUBJECTS = ("machine", "installation", "configuration", "models", "tokenizers", "data", "real step")


@dataclass(frozen=True)
class Finding:
    """green: sound; amber: works and could be better; red: will fail or give a wrong student."""

    level: Level
    subject: str
    what: str
    to_try: str = ""  # a command or a setting

    def __post_init__(self) -> None:
        if self.level != "green" and not self.to_try:
            raise ValueError(f"nothing to try: {self.what}")

    def to_dict(self) -> dict[str, Any]:
        return {"level": self.level, "subject": self.subject, "what": self.what, "try": self.to_try}


def of_error(error: StillroomError, subject: str) -> Finding:
    """An error that a run would end with."""
    where = f" ({error.where})" if error.where else ""
    to_try = "; or ".join(error.advice) or "stillroom distill --dry-run shows where it stops"
    return Finding("red", subject, f"{error.what}{where}", to_try)


Look = Callable[["Setup"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    subject: str
    look: Look
    needs_config: bool
    is_slow: bool  # loads models or tokenizes data


CHECKS: list[Check] = []


def check(subject: str, *, needs_config: bool = True, is_slow: bool = False) -> Callable[[Look], Look]:
    """Register a function that looks at a set-up."""

    def add(look: Look) -> Look:
        CHECKS.append(Check(subject, look, needs_config, is_slow))
        return look

    return add
