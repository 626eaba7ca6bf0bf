"""Predictions that were written before any measurement (`predictions.json`), and the verdict on a measurement.

A prediction is a list of kernels: operations, dtype, bytes and launches. Rates turn it into seconds, so it is compared
twice: with the rates of the data sheet, and with those that were measured on the same device. The second ratio is that
of the model; the first is that of the model and of what the device reaches of its data sheet.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stillroom.precision.gpus import Kernels, Rates, seconds_of

_FILE = Path(__file__).with_name("predictions.json")


@dataclass(frozen=True)
class Prediction:
    name: str
    kernels: tuple[Kernels, ...]  # of a time
    value: float | None  # of anything else
    interval: tuple[float, float]  # of measured over predicted
    formula: str

    def at(self, rates: Rates | None) -> float | None:
        """Seconds at these rates, or the value; None for a time without rates."""
        if self.value is not None:
            return self.value
        return seconds_of(self.kernels, rates) if rates is not None else None


@dataclass(frozen=True)
class Judged:
    """A measurement next to its prediction."""

    name: str
    measured: float
    at_published: float | None  # measured over predicted with the rates of the data sheet
    at_measured: float | None
    interval: tuple[float, float]

    @property
    def is_inside(self) -> bool | None:
        """By the measured rates; None where there are none."""
        return None if self.at_measured is None else self.interval[0] <= self.at_measured <= self.interval[1]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_inside": self.is_inside}


@functools.cache
def read_predictions() -> dict[str, Any]:
    """The file as it is in the package."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def predictions() -> dict[str, Prediction]:
    made = {}
    for name, one in read_predictions()["predictions"].items():
        kernels = tuple(Kernels(*kernel) for kernel in one.get("kernels", ()))
        low, high = one["interval"]
        made[name] = Prediction(name, kernels, one.get("value"), (low, high), one["formula"])
    return made


def judge(measured: Mapping[str, float], *, published: Rates | None, own: Rates | None) -> list[Judged]:
    """Compare each measurement that was predicted. Others are figures without a verdict."""
    known = predictions()
    judged = []
    for name, value in measured.items():
        if name not in known:
            continue
        one = known[name]
        ratios = [value / expected if expected else None for expected in (one.at(published), one.at(own))]
        judged.append(Judged(name, value, ratios[0], ratios[1], one.interval))
    return judged


def body_bytes(form: str, phase: str) -> float:
    """Bytes that a layer moves besides its products, a token and unit of width: `eager` or `compiled`."""
    return float(read_predictions()["body_bytes"][form][phase])
