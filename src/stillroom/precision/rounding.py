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


FP16_BITS, BF16_BITS = 13, 16  # mantissa bits that FP32 has and the shorter format has not


def random_bits(count: int, num_bits: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """`count` integers of that many random bits. On a CPU a draw in pieces gives the numbers of one draw."""
    return torch.randint(0, 1 << num_bits, (count,), generator=generator, device=device, dtype=torch.int32)


def round_to_fp16(values: Tensor, bits: Tensor) -> Tensor:
    """FP16 neighbours of FP32 values, up or down with the probability that makes the mean exact.

    FP32 carries 13 mantissa bits more than FP16: adding 13 random bits and cutting them off rounds up with
    the right probability. Below 2^-14 FP16's steps stop shrinking, so there the addition is done in units of
    the smallest step. NaN and infinity pass through; what exceeds the largest finite value becomes infinite,
    as in any cast, for the guard to see.
    """
    normal = (values.view(torch.int32) + bits).bitwise_and_(~0x1FFF).view(torch.float32)
    small = bits.float().div_(1 << FP16_BITS).add_(values / _FP16_SUBNORMAL_STEP).floor_().mul_(_FP16_SUBNORMAL_STEP)
    rounded = torch.where(values.abs() < _FP16_SMALLEST_NORMAL, small, normal)
    # Infinity has no mantissa bits to be added to; NaN has, and might become a number.
    return torch.where(values == values, rounded, values).to(torch.float16)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """BF16 neighbours of FP32 values, unbiased. BF16 shares FP32's exponents, so one addition covers all."""
    rounded = (values.view(torch.int32) + bits).bitwise_and_(~0xFFFF).view(torch.float32)
    return torch.where(values == values, rounded, values).to(torch.bfloat16)


def stochastic_fp16(values: Tensor, generator: torch.Generator) -> Tensor:
    """`round_to_fp16` with bits of its own."""
    return round_to_fp16(values, random_bits(values.numel(), FP16_BITS, generator, values.device).view(values.shape))


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """`round_to_bf16` with bits of its own."""
    return round_to_bf16(values, random_bits(values.numel(), BF16_BITS, generator, values.device).view(values.shape))


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
