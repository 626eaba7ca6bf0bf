"""How parameters and their moments are kept between steps.

The optimizer works in FP32 on what `read_all` returns and hands it to `write_all`. A storage is the only place that
knows in how many bytes a weight lives, so a new precision policy is a new storage, not a new optimizer. Tensors are
read and written many at a time, through one flat copy: a GPU is given a few large kernels instead of a few a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from stillroom.precision.blocks import encode, is_searched, rounded

# -- rounding --------------------------------------------------------------------------------------
# From FP32 to two bytes without losing the small updates.
#
# Rounding to nearest drops every update below half a unit in the last place: at learning rate 5e-6 that is most of
# them. Stochastic rounding keeps them in the mean; a residual keeps them exactly (nearly).


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
    """`round_to_fp16` with its own random bits."""
    return round_to_fp16(values, random_bits(values.numel(), FP16_BITS, generator, values.device).view(values.shape))


def stochastic_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """`round_to_bf16` with its own random bits."""
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


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory; the tensor itself where it is not sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@dataclass(frozen=True)
class Working:
    """FP32 values of several tensors. `flat` holds them end to end where they are copies, and `parts` are its views."""

    parts: list[Tensor]
    flat: Tensor | None = None


def in_fp32(tensors: Sequence[Tensor]) -> Working:
    """The tensors themselves where all are FP32, else FP32 copies of all of them."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        return Working(list(tensors))
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    parts = [part.view(tensor.shape) for part, tensor in zip(torch.split(flat, sizes), tensors, strict=True)]
    torch._foreach_copy_(parts, list(tensors))
    return Working(parts, flat)


def copy_flat(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy values that lie end to end into tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in into])
    torch._foreach_copy_(list(into), [part.view(tensor.shape) for part, tensor in zip(parts, into, strict=True)])


class Storage(Protocol):
    """Keeps one parameter. `extra` are the tensors a checkpoint must hold in addition to the parameter itself."""

    parameter: nn.Parameter
    draws: ClassVar[int]  # random numbers that a write takes for each element
    scratch_bytes: ClassVar[int]  # memory that reading and writing take for each element

    def read(self) -> Tensor: ...
    def refresh(self) -> None: ...
    def extra(self) -> dict[str, Tensor]: ...


class Direct:
    """The parameter is FP32 and is its own master."""

    draws: ClassVar[int] = 0
    scratch_bytes: ClassVar[int] = 0

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def read(self) -> Tensor:
        return local(self.parameter.data)

    @staticmethod
    def read_all(storages: Sequence[Direct]) -> Working:
        return Working([storage.read() for storage in storages])

    @staticmethod
    def write_all(storages: Sequence[Direct], values: Working, bits: Tensor | None) -> None:
        """Nothing to do: `read_all` gave the parameters themselves."""

    def refresh(self) -> None:
        """Nothing to do: there is no second copy."""

    def extra(self) -> dict[str, Tensor]:
        return {}


class Gathered(Direct):
    """The parameter is a part of an FP32 master, and is cast to FP16 when the parts are gathered.

    A checkpoint has its master under the name that `Master` gives it, so either reads what the other wrote.
    """

    def extra(self) -> dict[str, Tensor]:
        return {"master": self.read()}


class Master:
    """FP16 parameter, FP32 master copy."""

    draws: ClassVar[int] = 0
    scratch_bytes: ClassVar[int] = 0

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.master = parameter.data.float()
        parameter.data = self.master.to(torch.float16)

    def read(self) -> Tensor:
        return self.master

    @staticmethod
    def read_all(storages: Sequence[Master]) -> Working:
        return Working([storage.master for storage in storages])

    @staticmethod
    def write_all(storages: Sequence[Master], values: Working, bits: Tensor | None) -> None:
        torch._foreach_copy_([storage.parameter.data for storage in storages], values.parts)

    def refresh(self) -> None:
        """Write the master over the FP16 copy: heals a copy that was damaged alone."""
        self.parameter.data.copy_(self.master)

    def extra(self) -> dict[str, Tensor]:
        return {"master": self.master}


class Rounded(Master):
    """FP32 parameter, rounded to a block format of GGUF after every update; FP32 master.

    The forward pass and every evaluation use the rounded weights. Their gradient is applied to the master as it is
    (straight-through: Bengio et al. 2013), so an update too small to change a code is not lost.
    """

    def __init__(self, parameter: nn.Parameter, kind: str) -> None:
        self.parameter, self.kind = parameter, kind
        self.master = parameter.data.float().clone()
        self.refresh()

    @staticmethod
    def write_all(storages: Sequence[Master], values: Working, bits: Tensor | None) -> None:
        for storage in storages:
            storage.refresh()

    def refresh(self) -> None:
        self.parameter.data.copy_(rounded(self.master, self.kind))

    def codes(self) -> Tensor | None:
        """The codes that a file must hold, where rounding the rounded weights again may find others."""
        return encode(self.master, self.kind) if is_searched(self.kind) else None


class Split:
    """FP16 parameter, FP16 residual: four bytes that hold about 22 bits."""

    draws: ClassVar[int] = 0
    scratch_bytes: ClassVar[int] = 20

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        parameter.data, self.residual = split(parameter.data.float())

    def read(self) -> Tensor:
        return join(self.parameter.data, self.residual)

    @staticmethod
    def read_all(storages: Sequence[Split]) -> Working:
        coarse = in_fp32([storage.parameter.data for storage in storages])
        residual = in_fp32([storage.residual for storage in storages])
        assert coarse.flat is not None and residual.flat is not None  # both are FP16
        coarse.flat.add_(residual.flat.div_(RESIDUAL_SCALE))
        return coarse

    @staticmethod
    def write_all(storages: Sequence[Split], values: Working, bits: Tensor | None) -> None:
        assert values.flat is not None
        coarse, residual = split(values.flat)
        copy_flat(coarse, [storage.parameter.data for storage in storages])
        copy_flat(residual, [storage.residual for storage in storages])

    def refresh(self) -> None:
        """Nothing to do: the parameter is half of the value, not a copy of it."""

    def extra(self) -> dict[str, Tensor]:
        return {"residual": self.residual}


class Stochastic:
    """FP16 parameter alone, rounded so that small updates survive in the mean."""

    draws: ClassVar[int] = 1
    scratch_bytes: ClassVar[int] = 28

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        parameter.data = parameter.data.to(torch.float16)

    def read(self) -> Tensor:
        return self.parameter.data.float()

    @staticmethod
    def read_all(storages: Sequence[Stochastic]) -> Working:
        return in_fp32([storage.parameter.data for storage in storages])

    @staticmethod
    def write_all(storages: Sequence[Stochastic], values: Working, bits: Tensor | None) -> None:
        assert values.flat is not None and bits is not None
        copy_flat(round_to_fp16(values.flat, bits), [storage.parameter.data for storage in storages])

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
        self.shape = local(like.detach()).shape
        self.values = torch.zeros(self.shape, dtype=dtype, device=like.device)

    @property
    def scratch_bytes(self) -> int:
        """Memory that reading and writing take for each element."""
        return 24 if self.draws else 0

    @property
    def draws(self) -> int:
        """Random numbers that a write takes."""
        return 0 if self.values.dtype == torch.float32 else self.values.numel()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by the end of its name."""
        return {"": self.values}

    def read(self) -> Tensor:
        return self.values.float()  # the tensor itself when it is FP32 already

    @staticmethod
    def read_all(moments: Sequence[Moment]) -> Working:
        return in_fp32([moment.values for moment in moments])

    @staticmethod
    def write_all(moments: Sequence[Moment], values: Working, bits: Tensor | None) -> None:
        if values.flat is not None and bits is not None:
            copy_flat(round_to_bf16(values.flat, bits), [moment.values for moment in moments])


BLOCK = 256  # numbers that share a scale
_PER_OCTAVE = 8  # codes
_STEP = 2.0 ** (1 / _PER_OCTAVE)


class Coded(Moment):
    """A running mean in eight bits: a code for each number and an FP32 scale for each block (Dettmers et al. 2022).

    Codes are logarithms of the share of the block's largest value: a sign and 16 octaves for the first moment, 32 for
    the second. So a number is off by at most 4.5 or 9 per cent of itself, however large its neighbours are. The first
    moment is rounded to nearest. The second is rounded up or down so that its mean is exact, or it could not decay, and
    never to zero, which would divide by epsilon alone. What is not finite makes its block's scale so.
    """

    def __init__(self, like: Tensor, *, is_second: bool) -> None:
        self.shape, self.is_second = like.shape, is_second
        num_blocks = -(-like.numel() // BLOCK)  # the last one is filled up with zeros
        dtype = torch.uint8 if is_second else torch.int8
        self.values = torch.zeros(num_blocks, BLOCK, dtype=dtype, device=like.device)
        self.scales = torch.zeros(num_blocks, 1, device=like.device)

    @property
    def scratch_bytes(self) -> int:
        return 24

    @property
    def draws(self) -> int:
        return self.values.numel() if self.is_second else 0

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.values, "_scales": self.scales}

    def read(self) -> Tensor:
        return self.read_all([self]).parts[0]

    @staticmethod
    def read_all(moments: Sequence[Any]) -> Working:
        codes = torch.cat([moment.values for moment in moments])
        shares = _share(codes.float().abs_(), is_second=moments[0].is_second).mul_(codes.sign())
        flat = shares.mul_(torch.cat([moment.scales for moment in moments])).view(-1)
        pieces = torch.split(flat, [moment.values.numel() for moment in moments])
        parts = [piece[: one.shape.numel()].view(one.shape) for piece, one in zip(pieces, moments, strict=True)]
        return Working(parts, flat)

    @staticmethod
    def write_all(moments: Sequence[Any], values: Working, bits: Tensor | None) -> None:
        assert values.flat is not None
        flat, is_second = values.flat.view(-1, BLOCK), moments[0].is_second
        scales = flat.abs().amax(1, keepdim=True)
        shares = flat.abs().div_(torch.where(scales == 0, 1.0, scales))
        places = shares.log2().mul_(_PER_OCTAVE).add_(_largest(is_second=is_second))
        if is_second:
            assert bits is not None
            codes = places.floor_().clamp_(min=0)
            excess = shares.div_(_share(codes.clone(), is_second=True)).sub_(1).div_(_STEP - 1)
            codes.add_(excess > bits.view(-1, BLOCK).add(0.5).div_(1 << BF16_BITS))
            codes = torch.where((codes == 0) & (flat > 0), 1.0, codes)
        else:
            codes = places.round_().clamp_(min=0).mul_(flat.sign())
        copy_flat(codes.nan_to_num_(0.0).to(moments[0].values.dtype).view(-1), [one.values for one in moments])
        copy_flat(scales.view(-1), [one.scales for one in moments])


def _largest(*, is_second: bool) -> int:
    """The code of a block's largest value."""
    return 255 if is_second else 127


def _share(codes: Tensor, *, is_second: bool) -> Tensor:
    """What codes without sign stand for, in place; that of 0 is not used."""
    return codes.sub_(_largest(is_second=is_second)).div_(_PER_OCTAVE).exp2_()


def make_moment(like: Tensor, dtype: torch.dtype, *, is_second: bool) -> Moment:
    """Vectors stay in FP32 where matrices are coded: they are too few to count."""
    if dtype != torch.int8:
        return Moment(like, dtype)
    return Coded(like, is_second=is_second) if like.ndim >= 2 else Moment(like, torch.float32)
