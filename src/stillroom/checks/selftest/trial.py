"""A trial: something computed on this machine, how far it is from what it should be, and how far it may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from stillroom.files import reason_of

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Measured:
    """The largest error of a trial beside its bound, and what it is an error of."""

    error: float
    bound: float
    of: str = ""


@dataclass(frozen=True)
class Trial:
    group: str
    name: str
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `why` names the part that failed, or the reason why it was not run."""

    group: str
    name: str
    status: Status
    error: float | None
    bound: float | None
    why: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class NotHere(Exception):
    """Raised by a trial of something that this machine does not have."""


class Wrong(Exception):
    """Raised by a trial whose answer is wrong in a way that is no distance. The message says what was found."""


def run_trials(trials: Iterable[Trial]) -> Iterator[Outcome]:
    """Run each trial. One that ends in an error has failed, and the others are run all the same."""
    for trial in trials:
        began = time.monotonic()
        status, measured, why = _attempt(trial)
        error, bound = (measured.error, measured.bound) if measured else (None, None)
        yield Outcome(trial.group, trial.name, status, error, bound, why, time.monotonic() - began)


def _attempt(trial: Trial) -> tuple[Status, Measured | None, str]:
    try:
        measured = trial.measure()
    except NotHere as reason:
        return "not run", None, str(reason)
    except Wrong as finding:
        return "failed", None, str(finding)
    except Exception as error:  # noqa: BLE001 - whatever a broken kernel or library raises is a finding
        return "failed", None, f"{type(error).__name__}: {reason_of(error)}"
    if measured.error <= measured.bound:  # false for NaN
        return "passed", measured, ""
    return "failed", measured, f"{measured.of} is off by {measured.error:.3g}, and may be by {measured.bound:.3g}"


EXACT = Measured(0.0, 0.0, "the bits")


def worst(*parts: Measured) -> Measured:
    """The part that comes nearest to its bound or exceeds it most; one that is NaN before all."""
    return max(parts, key=lambda part: part.error / part.bound if part.error == part.error else float("inf"))


def away(value: Tensor, expected: Tensor) -> float:
    """The largest deviation over the largest entry; NaN where either is not finite."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    if value.shape != expected.shape:
        raise ValueError(f"shape {list(value.shape)} instead of {list(expected.shape)}")
    if not bool(value.isfinite().all() and expected.isfinite().all()):
        return float("nan")
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
