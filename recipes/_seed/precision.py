"""The four modes of the gradient scaler guide: what is asked for, and the message of what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES = ("float16", "float32")

_MESSAGES = {
    "fp16-mixed": "Mixed precision training enabled - FP16 computations with FP32 parameters and gradient scaling",
    "bf16-mixed": "Mixed precision training enabled - BF16 computations with FP32 parameters, no scaling needed",
    "fp32": "FP32 training - gradient scaler disabled",
    "fp16-split": "FP16 model parameters detected - using FP16 training with FP16 residuals",
    "fp16-master": "FP16 model parameters detected - using FP16 training with FP32 masters",
    "fp16-sr": "FP16 model parameters detected - using FP16 training with stochastic rounding",
}
_NO_CUDA = "CUDA not available - gradient scaler disabled"
_SCALED = "; the loss is scaled without torch's GradScaler, which cannot unscale FP16 gradients"
_UNSCALED = "WARNING: FP16 parameters detected - disabling gradient scaler to prevent errors"


def wanted_mode(dtype: str | None, autocast: bool | None) -> str | None:
    """The `precision.mode` of `--model_dtype` and `--autocast`; None where neither says anything."""
    if dtype == "float16":
        return "fp16-split"
    if autocast is not None:
        return "fp16-mixed" if autocast else "fp32"
    return "auto" if dtype == "float32" else None


def mode_lines(start: Mapping[str, Any], device: str) -> list[str]:
    """The message of the chosen mode and its reason, from the record of a run's start."""
    chosen, asked = start["precision"], start["config"]["precision"]
    mode = str(chosen["mode"])
    message = _MESSAGES[mode]
    lines = []
    if mode == "fp32" and asked["mode"] == "auto" and device == "cpu":
        message = _NO_CUDA
    elif mode in ("fp16-split", "fp16-master", "fp16-sr"):
        is_scaled = asked["initial_loss_scale"] > 1.0
        message += _SCALED if is_scaled else " without gradient scaling"
        lines = [] if is_scaled else [_UNSCALED]
    return [*lines, message, f"  precision {mode}: {chosen['reason']}"]
