"""A named check of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stillroom.diagnosis.case import Case
from stillroom.diagnosis.finding import Finding

Check = Callable[[Case], Finding | None]


@dataclass(frozen=True)
class Cause:
    """`explains`: the causes that follow from this one. `is_live`: worth saying while the run goes on."""

    check: Check
    explains: tuple[str, ...] = ()
    is_live: bool = True

    @property
    def name(self) -> str:
        return self.check.__name__
