"""From FP32 to two bytes without losing the small updates.

Rounding to nearest drops every update below half a unit in the last place: at learning rate 5e-6 that is
most of them. Stochastic rounding keeps them in the mean; a residual keeps them exactly (nearly).
"""

from __future__ import annotations

import torch
from torch import Tensor

_FP16_SMALLEST_NORMAL = 2.0**-14
_FP16_SUBNORMAL_STEP = 2.0**-24
_FP16_LARGEST = 65504.0

RESIDUAL_SCALE = 4096.0  # keeps the residual of ordinary weights out of FP16's subnormal range


def stochastic_fp16(values: Tensor, generator: torch.Generator) -> Tensor:
    """FP16 neighbours of FP32 values, up or down with the probability that makes the mean exact.

    FP32 carries 13 mantissa bits more than FP16: adding 13 random bits and cutting them off rounds up with
    the right probability. Below 2^-14 FP16's steps stop shrinking, so there the addition is done in units of
    the smallest step. NaN and infinity pass through; what exceeds the largest finite value becomes infinite,
    as in any cast, for the guard to see.
    """
    random = torch.randint(0, 1 << 13, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = values.view(torch.int32)
    normal = ((bits + random) & ~0x1FFF).view(torch.float32)
    steps = values / _FP16_SUBNORMAL_STEP
    small = torch.floor(steps + random.float() / (1 << 13)) * _FP16_SUBNORMAL_STEP
    rounded = torch.where(values.abs() < _FP16_SMALLEST_NORMAL, small, normal)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.float16)


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """BF16 neighbours of FP32 values, unbiased. BF16 shares FP32's exponents, so one addition covers all."""
    random = torch.randint(0, 1 << 16, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    rounded = ((values.view(torch.int32) + random) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """(FP16 value, FP16 residual): together about 22 bits of an FP32 value.

    Above 32,768 half a step times the residual's scale would just exceed FP16's range; the clamp costs at
    most 1e-3 there, far below the step itself.
    """
    coarse = values.to(torch.float16)
    residual = (values - coarse.float()) * RESIDUAL_SCALE
    return coarse, residual.clamp(-_FP16_LARGEST, _FP16_LARGEST).to(torch.float16)


def join(coarse: Tensor, residual: Tensor) -> Tensor:
    return coarse.float() + residual.float() / RESIDUAL_SCALE
