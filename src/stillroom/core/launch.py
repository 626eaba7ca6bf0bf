"""Triton kernels: whether they can be started here, and a start of one with its arguments.

Tests compile and execute as PTX what the product would start on a device.
"""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_FAILURES = (RuntimeError, OSError, ImportError, AssertionError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Launch:
    """One start of a Triton kernel. The arguments keep their tensors alive until it is issued."""

    kernel: Any
    arguments: dict[str, Any]
    constants: dict[str, Any]
    grid: int
    options: dict[str, int]  # of the compiler: num_warps, maxnreg
    tables: dict[str, list[list[Tensor]]] = field(default_factory=dict)  # tensors that an argument holds addresses of

    def start(self) -> None:
        self.kernel[(self.grid,)](**self.arguments, **self.constants, **self.options)


def triton_doubt() -> str:
    """Why no Triton kernel can be started in this process, as far as that is known without trying; empty: none."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except _FAILURES as error:
        return f"Triton finds no driver: {first_line(error)}"
    return ""


def triton_failures() -> tuple[type[Exception], ...]:
    """What Triton, ptxas, the launcher's C compiler and the driver raise where a kernel cannot be built or started."""
    from triton.errors import TritonError

    return (*_FAILURES, TritonError)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
