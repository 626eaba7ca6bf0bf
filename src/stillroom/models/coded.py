"""Frozen linear layers stored in fewer bytes than they multiply in: half numbers, int8, GGUF's blocks, NF4."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stillroom.core.errors import BrokenAtStart
from stillroom.precision.blocks import FORMATS, decode, encode, row_bytes

# What a weight is: numbers, codes with a scale for each output, codes of a block format, or codes with their decoder.
How = Tensor | str | Callable[[Tensor], Tensor] | None


class WidenedLinear(nn.Linear):
    """A frozen linear layer with a half weight that multiplies in its input's dtype, or as autocast says."""

    def __init__(self, narrow: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = narrow.in_features, narrow.out_features
        self.weight, self.bias = narrow.weight, narrow.bias

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == self.weight.dtype or torch.is_autocast_enabled(inputs.device.type):
            return functional.linear(inputs, self.weight, self.bias)
        answer: Tensor = _WidenedProduct.apply(inputs, self.weight, None)  # type: ignore[no-untyped-call]
        return answer if self.bias is None else answer + self.bias


class _WidenedProduct(torch.autograd.Function):
    """inputs @ weight.T; the wide weight is made again in the backward and not kept until then."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, how: How) -> Tensor:
        ctx.weight, ctx.how = weight, how  # frozen, so nothing can change them before the backward
        return functional.linear(inputs, _numbers(weight, how).to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream[0] @ _numbers(ctx.weight, ctx.how).to(upstream[0].dtype), None, None


def _numbers(weight: Tensor, how: How) -> Tensor:
    if isinstance(how, str):
        return decode(weight, how)
    if how is None or isinstance(how, Tensor):
        return weight if how is None else weight * how
    return how(weight)


# -- codes -----------------------------------------------------------------------------------------------

_LARGEST = 127  # codes are symmetric: -128 is not used


class StoredLinear(nn.Linear):
    """A frozen linear layer of codes. It multiplies in its input's dtype, or as autocast says."""

    @property
    def how(self) -> How:
        """What the codes stand for."""
        raise NotImplementedError

    def widened(self) -> nn.Linear:
        """A plain layer of the very numbers that the codes stand for."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(_numbers(self.weight.data, self.how).float(), requires_grad=False)
        plain.bias = self.bias
        return plain

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        answer: Tensor = _WidenedProduct.apply(inputs.to(dtype), self.weight, self.how)  # type: ignore[no-untyped-call]
        return answer if self.bias is None else answer + self.bias.to(dtype)


class CodedLinear(StoredLinear):
    """int8 codes with an FP32 scale for each output, the largest of its row by 127.

    The scales are made from the weights at every start, like the codes, so they are in no checkpoint.
    """

    scales: Tensor

    def __init__(self, full: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = full.in_features, full.out_features, full.bias
        weight = full.weight.detach().float()
        largest = weight.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
        codes = (weight / scales).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales, persistent=False)

    @property
    def how(self) -> Tensor:
        return self.scales


class BlockLinear(StoredLinear):
    """The codes of one of GGUF's block formats, as a file holds them: 4.5 bits a weight in q4_0."""

    def __init__(self, codes: Tensor, kind: str, sizes: tuple[int, int], bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = sizes[0], sizes[1], kind
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = bias  # type: ignore[assignment]

    @property
    def how(self) -> str:
        return self.kind


class Nf4Linear(StoredLinear):
    """NF4 codes by bitsandbytes: quantiles of a normal distribution, and an FP32 scale for each 64 weights.

    The weight holds the bytes of the scales, then the codes. It is decoded to FP32 and multiplied by torch:
    bitsandbytes' own product on a CPU differs from that by a hundredth where its outputs are about 1.
    """

    levels: Tensor

    def __init__(self, full: nn.Linear, *, where: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = full.in_features, full.out_features, full.bias
        weight = full.weight.detach().float()
        codes, state = _bitsandbytes(where).quantize_4bit(weight, blocksize=_NF4_BLOCK, quant_type="nf4")
        packed = torch.cat([state.absmax.view(torch.uint8), codes.view(-1)])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("levels", state.code, persistent=False)

    @property
    def how(self) -> Callable[[Tensor], Tensor]:
        return self._numbers

    def _numbers(self, packed: Tensor) -> Tensor:
        library, shape = _bitsandbytes(""), torch.Size((self.out_features, self.in_features))
        begin = 4 * -(-shape.numel() // _NF4_BLOCK)
        how = {"code": self.levels, "blocksize": _NF4_BLOCK, "quant_type": "nf4", "dtype": torch.float32}
        state = library.QuantState(packed[:begin].view(torch.float32), shape, **how)
        numbers: Tensor = library.dequantize_4bit(packed[begin:], state)
        return numbers


_NF4_BLOCK = 64


def _bitsandbytes(where: str) -> Any:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as error:
        raise BrokenAtStart(
            f"nf4 needs bitsandbytes, which cannot be imported: {error}",
            where=where,
            advice=["pip install 'stillroom[bitsandbytes]'", f"--set {where}=q4_0, which needs nothing more"],
        ) from error


def coded(layer: nn.Linear, kind: str, name: str, *, where: str) -> nn.Linear:
    """A frozen layer as codes: int8, NF4 or a block format. Raise for rows that it cannot hold."""
    if kind == "int8":
        return CodedLinear(layer)
    if kind == "nf4":
        return Nf4Linear(layer, where=where)
    weight = layer.weight.detach()
    size = FORMATS[kind].size
    if layer.in_features % size:
        raise BrokenAtStart(
            f"{name} has rows of {layer.in_features:,} weights, which are not whole blocks of {size} for {kind}",
            where=where,
            advice=[f"--set {where}=int8, which takes rows of any length"],
        )
    if weight.is_meta:
        codes = torch.empty(layer.out_features, row_bytes(layer.in_features, kind), dtype=torch.uint8, device="meta")
    else:
        codes = encode(weight, kind)
    return BlockLinear(codes, kind, (layer.in_features, layer.out_features), layer.bias)


@contextmanager
def widened(network: Any) -> Iterator[None]:
    """In the body layers of codes are plain ones of the same numbers; after it, the codes again."""
    coded = {name: part for name, part in network.named_modules() if isinstance(part, StoredLinear)}
    try:
        for name, part in coded.items():
            network.set_submodule(name, part.widened())
        yield
    finally:
        for name, part in coded.items():
            network.set_submodule(name, part)
