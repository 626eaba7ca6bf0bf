"""How a parameter and its moments are kept between steps.

The optimizer works in FP32 on what `read` returns and hands it to `write`. A storage is the only place that
knows in how many bytes a weight lives, so a new precision policy is a new storage, not a new optimizer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from stillroom.precision import rounding


class Storage(Protocol):
    """Keeps one parameter. `extra` are the tensors a checkpoint must hold beside the parameter itself."""

    parameter: nn.Parameter

    def read(self) -> Tensor: ...
    def write(self, values: Tensor, generator: torch.Generator) -> None: ...
    def refresh(self) -> None: ...
    def extra(self) -> dict[str, Tensor]: ...


class Direct:
    """The parameter is FP32 and is its own master."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def read(self) -> Tensor:
        return self.parameter.data

    def write(self, values: Tensor, generator: torch.Generator) -> None:
        """Nothing to do: `read` gave the parameter itself."""

    def refresh(self) -> None:
        """Nothing to do: there is no second copy."""

    def extra(self) -> dict[str, Tensor]:
        return {}


class Master:
    """FP16 parameter, FP32 master copy."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.master = parameter.data.float()
        parameter.data = self.master.to(torch.float16)

    def read(self) -> Tensor:
        return self.master

    def write(self, values: Tensor, generator: torch.Generator) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Write the master over the FP16 copy: heals a copy that was damaged alone."""
        self.parameter.data.copy_(self.master)

    def extra(self) -> dict[str, Tensor]:
        return {"master": self.master}


class Split:
    """FP16 parameter, FP16 residual: four bytes that hold about 22 bits."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        parameter.data, self.residual = rounding.split(parameter.data.float())

    def read(self) -> Tensor:
        return rounding.join(self.parameter.data, self.residual)

    def write(self, values: Tensor, generator: torch.Generator) -> None:
        coarse, residual = rounding.split(values)
        self.parameter.data.copy_(coarse)
        self.residual.copy_(residual)

    def refresh(self) -> None:
        """Nothing to do: the parameter is half of the value, not a copy of it."""

    def extra(self) -> dict[str, Tensor]:
        return {"residual": self.residual}


class Stochastic:
    """FP16 parameter alone, rounded so that small updates survive in the mean."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        parameter.data = parameter.data.to(torch.float16)

    def read(self) -> Tensor:
        return self.parameter.data.float()

    def write(self, values: Tensor, generator: torch.Generator) -> None:
        self.parameter.data.copy_(rounding.stochastic_fp16(values, generator))

    def refresh(self) -> None:
        """Nothing to do: there is no second copy."""

    def extra(self) -> dict[str, Tensor]:
        return {}


class Moment:
    """A running mean of the optimizer, in FP32 or in stochastically rounded BF16.

    BF16 is a storage format only: no BF16 arithmetic is done, so it serves devices that have none. Rounding
    must be stochastic: to nearest, a second moment with decay 0.999 could never decay.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.values = torch.zeros(like.shape, dtype=dtype, device=like.device)

    def read(self) -> Tensor:
        return self.values.float()  # the tensor itself when it is FP32 already

    def write(self, values: Tensor, generator: torch.Generator) -> None:
        if self.values.dtype == torch.bfloat16:
            self.values.copy_(rounding.stochastic_bf16(values, generator))
