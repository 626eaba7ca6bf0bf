"""The JSON log of the ultra-stable guide: one object a line with its five keys, next to the run's own events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stillroom.telemetry.record import read_events

NAME = "training.jsonl"
KEYS = ("step", "train_loss", "success_rate", "consecutive_nans", "gpu_memory_gb")


class SeedLog:
    """A listener that writes the log. A resumed run begins with the steps that its events still hold."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def handle(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "run_start":
            known = read_events(self.path.parent / "events.jsonl")
            self.path.write_text("".join(_line(one) for one in known if one["event"] == "step"), encoding="ascii")
        elif event["event"] == "step":
            with self.path.open("a", encoding="ascii") as file:
                file.write(_line(event))


def _line(step: Mapping[str, Any]) -> str:
    """A step; a loss that was not finite is null, with a word that says what it was."""
    kept = {key: step.get(key) for key in KEYS}
    if "train_loss_nonfinite" in step:
        kept["train_loss_nonfinite"] = step["train_loss_nonfinite"]
    return json.dumps(kept, allow_nan=False) + "\n"
