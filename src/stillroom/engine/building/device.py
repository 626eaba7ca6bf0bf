"""The device of a run, by name, and how it adds up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.files import reason_of

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_NO_FLOAT64 = "sums are taken in float64, which Apple's GPU does not have"


def _say_nothing(_text: str) -> None:
    """The default for `tell`."""


def find_device(wanted: str, tell: Callable[[str], None] = _say_nothing) -> torch.device:
    """The device by name; `auto` takes a CUDA card where there is one, else the CPU. `tell` hears what was passed over.

    Nothing is remembered between two calls, so a process may ask for `cpu` and then for `auto`.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        if wanted == "auto" and torch.backends.mps.is_available():
            tell(f"the run is on the CPU: {_NO_FLOAT64}")
        return torch.device("cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise BrokenAtStart(
            "a CUDA device was asked for and torch sees none",
            where="--device",
            advice=["--device cpu", "check the driver with nvidia-smi, and that torch is a CUDA build"],
        )
    if wanted in ("auto", "cuda"):
        return _own_card()
    try:
        device = torch.device(wanted)
    except RuntimeError:
        advice = ["cpu, cuda, cuda:1, or auto, which takes a GPU where there is one"]
        raise ConfigError(f"there is no device {wanted!r}", where="--device", advice=advice) from None
    if device.type == "mps":
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {_NO_FLOAT64}", where="--device", advice=["--device cpu"]
        )
    try:
        torch.zeros(1, device=device).tolist()  # `meta` and a card that is not there are told here
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        reason = reason_of(error)
        raise BrokenAtStart(
            f"the device {wanted} cannot be used: {reason}", where="--device", advice=["--device cpu", "--device auto"]
        ) from error
    return device


def _own_card() -> torch.device:
    """The card of this process: its own where several processes share a machine, else the current one."""
    local = os.environ.get("LOCAL_RANK", "")
    if not local.isdecimal():
        return torch.device("cuda", torch.cuda.current_device())
    if int(local) >= torch.cuda.device_count():
        raise BrokenAtStart(
            f"process {local} of this machine has no card: torch sees {torch.cuda.device_count()}",
            where="--device",
            advice=["start as many processes as there are cards", "--device cpu"],
        )
    device = torch.device("cuda", int(local))
    torch.cuda.set_device(device)  # collectives use the current card
    return device


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On a card, ask torch for kernels that add in a fixed order, and leave its settings as they were.

    An operation that has none is warned of by torch and computed all the same: refusing it would end the run. On a CPU
    with the same number of threads the order is fixed already.
    """
    if device.type != "cuda":
        yield
        return
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # a module with a property, which types do not know
    fills = memory.fill_uninitialized_memory
    workspace = os.environ.get(_WORKSPACE)
    if workspace is None:
        os.environ[_WORKSPACE] = ":4096:8"  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=not was_on or warned)
    memory.fill_uninitialized_memory = False  # a kernel for each allocation, and nothing reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        memory.fill_uninitialized_memory = fills
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
