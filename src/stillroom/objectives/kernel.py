"""Which row kernel runs, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stillroom.objectives.base import RowKernel
from stillroom.objectives.kernel_plain import PlainKernel

KernelName = Literal["auto", "plain", "compiled"]


@dataclass(frozen=True)
class KernelChoice:
    kernel: RowKernel
    reason: str


def choose_kernel(name: KernelName = "auto") -> KernelChoice:
    """The row kernel for a pass, with the reason as a sentence for the log."""
    return KernelChoice(PlainKernel(), "plain PyTorch")
