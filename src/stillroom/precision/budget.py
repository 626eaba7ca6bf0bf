"""How many bytes a trained parameter takes, by part.

Every budget asks here: the choice of a precision by the card's memory, and the choice of where snapshots are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Moments = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class BytesPerParameter:
    """Of a matrix. Norm gains and biases have FP32 masters in every FP16 mode; they are too few to be counted."""

    # On the device.
    weights: int
    extra: int  # the master or the residual
    moments: int
    gradients: int
    casts: int  # autocast keeps a half copy of each weight from the forward to the backward
    # In main memory.
    snapshot: int  # one of the ring
    best: int  # the best student so far

    @property
    def on_device(self) -> int:
        return self.weights + self.extra + self.moments + self.gradients + self.casts

    def in_main_memory(self, num_snapshots: int) -> int:
        return num_snapshots * self.snapshot + self.best


# mode: weights, master or residual, gradients, casts
_PARTS = {
    "fp32": (4, 0, 4, 0),
    "bf16-mixed": (4, 0, 4, 2),
    "fp16-mixed": (4, 0, 4, 2),
    "fp16-master": (2, 4, 2, 0),
    "fp16-split": (2, 2, 2, 0),
    "fp16-sr": (2, 0, 2, 0),
}


def bytes_per_parameter(mode: str, moments: Moments = "float32", *, accumulates: bool = False) -> BytesPerParameter:
    """The parts of a mode. `accumulates`: over several micro-batches, FP16 gradients are summed in FP32."""
    weights, extra, gradients, casts = _PARTS[mode]
    both_moments = 4 if moments == "bfloat16" else 8
    return BytesPerParameter(
        weights=weights,
        extra=extra,
        moments=both_moments,
        gradients=4 if accumulates else gradients,
        casts=casts,
        snapshot=weights + extra + both_moments,
        best=weights,
    )
