"""Start processes of a run, and read what a run left."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
from safetensors.torch import load_file

from stillroom.telemetry import read_events


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**over: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **over}


def losses(folder: Path, key: str = "train_loss") -> list[float]:
    return [event[key] for event in read_events(folder / "events.jsonl") if event["event"] == "step"]


def weights(folder: Path) -> torch.Tensor:
    found = load_file(folder / "student" / "model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])
