"""All trials of the self-test, and what came of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stillroom.checks.selftest import divergences, guard, kernels, objectives, precision, sparse, survival
from stillroom.checks.selftest.trial import Outcome, Trial, run_trials
from stillroom.checks.selftest.world import make_world

GROUPS = tuple(part.GROUP for part in (divergences, kernels, sparse, objectives, precision, guard, survival))


@dataclass(frozen=True)
class Report:
    outcomes: tuple[Outcome, ...]
    seconds: float
    device: str

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return tuple(one for one in self.outcomes if one.status == "failed")

    def of(self, group: str) -> tuple[Outcome, ...]:
        return tuple(one for one in self.outcomes if one.group == group)

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": not self.failed,
            "device": self.device,
            "seconds": self.seconds,
            "failed": [f"{one.group}: {one.name}" for one in self.failed],
            "trials": [one.to_dict() for one in self.outcomes],
        }


def all_trials(folder: Path, device: torch.device) -> list[Trial]:
    """Arithmetic on the CPU and, where it is another, on the device; runs in `folder` on the CPU."""
    devices = [torch.device("cpu"), *([device] if device.type != "cpu" else [])]
    return [
        *divergences.trials(),
        *(trial for one in devices for trial in kernels.trials(one)),
        *sparse.trials(),
        *objectives.trials(),
        *(trial for one in devices for trial in precision.trials(one)),
        *guard.trials(folder),
        *survival.trials(folder),
    ]


def selftest(
    device: torch.device,
    *,
    only: tuple[str, ...] = (),
    on_trial: Callable[[Trial, int, int], None] = lambda _trial, _number, _all: None,
) -> Report:
    """Run the trials, those of some groups alone where `only` names any; `on_trial` hears of each as it begins."""
    began = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="stillroom-selftest-") as name:
        folder = Path(name)
        make_world(folder)
        trials = [trial for trial in all_trials(folder, device) if not only or trial.group in only]
        for number, trial in enumerate(trials, start=1):
            on_trial(trial, number, len(trials))
            outcomes += run_trials([trial])
    return Report(tuple(outcomes), time.monotonic() - began, str(device))
