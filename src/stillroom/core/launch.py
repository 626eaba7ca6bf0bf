"""A kernel with its arguments: what is started on a device, and what tests compile and execute as PTX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
