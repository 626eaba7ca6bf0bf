"""The device of a run, by name."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.files import reason_of


def find_device(wanted: str) -> torch.device:
    """The device by name; `auto` takes a GPU where there is one. Accelerate places, and does nothing else."""
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a CUDA device was asked for and torch sees none",
            where="--device",
            advice=["--device cpu", "check the driver with nvidia-smi, and that torch is a CUDA build"],
        )
    accelerator = Accelerator(cpu=wanted == "cpu", mixed_precision="no")
    if wanted in ("auto", "cpu"):
        device: torch.device = accelerator.device
        return device
    try:
        device = torch.device(wanted)
    except RuntimeError:
        advice = ["cpu, cuda, cuda:1, or auto, which takes a GPU where there is one"]
        raise ConfigError(f"there is no device {wanted!r}", where="--device", advice=advice) from None
    try:
        torch.zeros(1, device=device).tolist()  # `meta` and a card that is not there are told here
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = reason_of(error)
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {reason}", where="--device", advice=["--device cpu", "--device auto"]
        ) from error
    return device
