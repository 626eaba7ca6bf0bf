"""Which precision to train in, and the reason in a sentence."""

from __future__ import annotations

import torch

from stillroom.config.schema import PrecisionConfig
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.precision.budget import Moments, bytes_per_parameter
from stillroom.precision.device import DeviceFacts, check_device, facts_of
from stillroom.precision.policy import POLICIES, Precision

# Student state alone; the rest of the card belongs to the teacher, activations and the head.
_STATE_SHARE = 0.5

_WHY_ASKED = {
    "fp32": "FP32 throughout, no loss scaling",
    "bf16-mixed": "FP32 weights, BF16 products, no loss scaling needed",
    "fp16-mixed": "FP32 weights, FP16 products, scaled loss",
    "fp16-master": "FP16 weights with FP32 masters, scaled loss",
    "fp16-split": "FP16 weights with FP16 residuals, scaled loss",
    "fp16-sr": "FP16 weights rounded stochastically, scaled loss",
}


def choose(
    mode: str, facts: DeviceFacts, num_parameters: int = 0, *, moments: Moments = "float32", begun_in: str = ""
) -> tuple[str, str]:
    """(mode, reason) for what was asked on a device: a pure decision.

    `num_parameters` counts everything that is trained, routers included. `begun_in` is the mode of a run that is
    continued: `auto` is not resolved again, because the saved state is of that mode.
    """
    wanted = begun_in or mode
    if wanted != "auto" and wanted not in _WHY_ASKED:
        raise ConfigError(f"there is no precision {wanted!r}", advice=[f"modes: auto, {', '.join(_WHY_ASKED)}"])
    if num_parameters < 0:
        raise ConfigError(f"{num_parameters} parameters cannot be trained", where="num_parameters")
    if begun_in:
        return _asked(begun_in, facts, why="the run began in it", advice=["--device cpu", "a card with native bf16"])
    if mode != "auto":
        return _asked(mode, facts, why="asked for", advice=["--precision fp16-mixed", "--precision auto"])
    if facts.kind == "cpu":
        return "fp32", "no GPU: FP32 is the fastest exact choice on a CPU"
    if facts.kind != "cuda":
        return "fp32", f"{facts.name}: FP16 training was never tried on it"
    if facts.has_native_bf16:
        return "bf16-mixed", f"{facts.name} has native bf16: FP32 weights, BF16 products, no loss scaling needed"
    fast = "fp16-mixed" if facts.has_tensor_cores else "fp32"
    held = bytes_per_parameter(fast, moments).on_device
    needed, room = num_parameters * held, int(facts.memory_bytes * _STATE_SHARE)
    if needed > room:
        return (
            "fp16-split",
            f"{facts.name} has no native bf16, and {needed / 1e9:.1f} GB of {fast} training state would not leave room "
            f"on {facts.memory_bytes / 1e9:.0f} GB: FP16 weights with FP16 residuals, scaled loss",
        )
    if not facts.has_tensor_cores:
        return "fp32", f"{facts.name} has no tensor cores: FP16 products would be no faster than FP32"
    return "fp16-mixed", f"{facts.name} has no native bf16: FP32 weights, FP16 products, scaled loss"


def _asked(mode: str, facts: DeviceFacts, *, why: str, advice: list[str]) -> tuple[str, str]:
    """A mode that is not ours to choose."""
    if mode == "bf16-mixed" and facts.kind == "cuda" and not facts.has_native_bf16:
        raise ConfigError(f"{mode}: {why}, and {facts.name} has no native bf16", where="precision.mode", advice=advice)
    said = f"{why}: {_WHY_ASKED[mode]}"
    if facts.kind == "cpu" and mode.startswith("fp16"):
        said += "; on a CPU FP16 products are computed in FP32 and rounded"
    return mode, said


def resolve(
    mode: str = "auto",
    device: str | torch.device = "cpu",
    *,
    config: PrecisionConfig | None = None,
    num_parameters: int = 0,
    begun_in: str = "",
) -> Precision:
    """The policy for a mode on a device; `.mode` and `.reason` say what was chosen and why."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise BrokenAtStart(f"there is no device {device!r}", advice=["use cpu, cuda or cuda:1"]) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BrokenAtStart(f"torch sees no {device}", advice=["use cpu", "check the driver with nvidia-smi"])
    facts = facts_of(device)
    check_device(facts)
    moments = config.moments if config else "float32"
    chosen, reason = choose(mode, facts, num_parameters, moments=moments, begun_in=begun_in)
    return POLICIES[chosen](device, reason, config)
