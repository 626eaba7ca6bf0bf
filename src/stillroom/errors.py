"""Every exception we raise on purpose.

Each one says what happened, where, and what to try, and carries the exit code of the command line. Code
below the command line never prints and never exits: it raises one of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StillroomError(Exception):
    """An end with a reason. `advice` is what to try, most promising first."""

    exit_code = 1
    title = "stillroom stopped"

    def __init__(self, what: str, *, where: str = "", advice: tuple[str, ...] | list[str] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.advice = tuple(advice)

    def __str__(self) -> str:
        lines = [f"{self.what}" + (f" ({self.where})" if self.where else "")]
        lines += [f"  try: {advice}" for advice in self.advice]
        return "\n".join(lines)


class ConfigError(StillroomError):
    """The configuration cannot be carried out as it stands."""

    exit_code = 2
    title = "the configuration cannot be used"


class DataError(StillroomError):
    """The data cannot be read, or what is left of it is not worth training on."""

    exit_code = 2
    title = "the data cannot be used"


class BrokenAtStart(StillroomError):
    """Model, teacher or device are broken before training begins."""

    exit_code = 20
    title = "broken before training"


class CacheDamaged(BrokenAtStart):
    """A teacher's stored answers are not what was written."""

    title = "the teacher's cache is damaged"


class OutOfMemory(StillroomError):
    """The machine or its device has too little memory for what was configured."""

    exit_code = 20
    title = "out of memory"


class TooManySkips(StillroomError):
    """So many steps were refused that going on would be pretence."""

    exit_code = 21
    title = "too many skipped steps"


class Diverged(StillroomError):
    """The run diverged and every rollback is spent."""

    exit_code = 22
    title = "the run diverged"


class NoBetterStudent(Diverged):
    """All steps were taken, and no evaluation found a better student than the one before training.

    `folder` and `summary` are the finished run's: its record is complete, and its report can be written.
    """

    title = "the student got worse"

    def __init__(self, what: str, *, folder: object, summary: Mapping[str, Any], advice: list[str]) -> None:
        super().__init__(what, where=str(folder), advice=advice)
        self.folder = folder
        self.summary = summary


class LossScaleAtFloor(StillroomError):
    """FP16 gradients overflow even at the smallest loss scale."""

    exit_code = 23
    title = "the loss scale is at its floor"


class CannotSave(StillroomError):
    """The result cannot be written."""

    exit_code = 24
    title = "cannot save"


class CheckpointUnusable(StillroomError):
    """No checkpoint of the run passes verification."""

    exit_code = 25
    title = "no usable checkpoint"


class Interrupted(StillroomError):
    """Stopped from outside after saving: the run can be resumed."""

    exit_code = 75
    title = "interrupted, resumable"


class Fault(StillroomError):
    """A fault of ours: nothing a user did explains it."""

    exit_code = 70
    title = "a fault in stillroom itself"
