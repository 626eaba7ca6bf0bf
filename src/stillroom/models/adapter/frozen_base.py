"""The weights under an adapter: their identity, and the dtype they are stored in.

They never change, so they are in no checkpoint: a hash says which they are, and a run is continued on those alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stillroom.errors import BrokenAtStart


@torch.no_grad()
def weights_identity(network: Any) -> str:
    """A hash over name, type, shape and bytes of every weight and persistent buffer, as they are in memory now."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


@torch.no_grad()
def store_base(network: Any, dtype: torch.dtype, *, whole: bool, has_values: bool = True) -> int:
    """Store frozen weights in a dtype; return how many numbers that are. Adapters stay in FP32.

    `whole`: all of them, and the network then computes in that dtype. Else the matrices of linear layers alone, which
    autocast casts anyway; embeddings, norms, the head and other kinds of layers stay in FP32. int8 are codes with a
    scale for each output. A network of shapes alone has no values that could be out of range.
    """
    layers: dict[str, nn.Linear] = {}
    if whole:
        chosen = dict(network.named_parameters())
    else:
        kept = {id(part.weight) for part in (network.get_input_embeddings(), network.get_output_embeddings())}
        found = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
        layers = {name: part for name, part in found.items() if id(part.weight) not in kept}
        chosen = {f"{name}.weight": part.weight for name, part in layers.items()}
    if dtype == torch.int8:
        return _store_codes(network, layers)
    num_stored = 0
    for name, weight in chosen.items():
        if weight.requires_grad or not weight.is_floating_point() or weight.dtype == dtype:
            continue
        if has_values:
            _check_range(name, weight, dtype)
        weight.data = weight.data.to(dtype)
        num_stored += weight.numel()
    for name, part in layers.items():
        if part.weight.dtype in (torch.float16, torch.bfloat16):
            network.set_submodule(name, WidenedLinear(part))
    return num_stored


def _store_codes(network: Any, layers: dict[str, nn.Linear]) -> int:
    frozen = {name: part for name, part in layers.items() if not part.weight.requires_grad}
    if not frozen:
        raise BrokenAtStart(
            f"a {type(network).__name__} has no linear layers that could be stored in int8",
            where="student.adapter.base_dtype",
            advice=["--set student.adapter.base_dtype=float16"],
        )
    for name, part in frozen.items():
        network.set_submodule(name, CodedLinear(part))
    return sum(part.weight.numel() for part in frozen.values())


def _check_range(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise BrokenAtStart(
            f"the frozen weight {name} reaches {largest:.3g}, which {str(dtype).removeprefix('torch.')} cannot hold",
            where="student.adapter.base_dtype",
            advice=["--precision fp32 with student.adapter.base_dtype = 'float32'", "--precision bf16-mixed"],
        )


class WidenedLinear(nn.Linear):
    """A frozen linear layer with a half weight that multiplies in its input's dtype, or as autocast says."""

    def __init__(self, narrow: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = narrow.in_features, narrow.out_features
        self.weight, self.bias = narrow.weight, narrow.bias

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == self.weight.dtype or torch.is_autocast_enabled(inputs.device.type):
            return functional.linear(inputs, self.weight, self.bias)
        answer: Tensor = _WidenedProduct.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
        return answer if self.bias is None else answer + self.bias


class _WidenedProduct(torch.autograd.Function):
    """inputs @ weight.T; the wide copy of the weight is made again in the backward and not kept until then."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight.to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return upstream[0] @ weight.to(upstream[0].dtype), None


# -- eight bits ------------------------------------------------------------------------------------------

_LARGEST = 127  # codes are symmetric: -128 is not used


class CodedLinear(nn.Linear):
    """A frozen linear layer of int8 codes with an FP32 scale for each output, the largest of its row by 127.

    It multiplies in its input's dtype, or as autocast says. The scales are made from the weights at every start, like
    the codes, so they are in no checkpoint.
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

    def widened(self) -> nn.Linear:
        """A plain layer of the very numbers that the codes stand for."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(self.weight.float() * self.scales, requires_grad=False)
        plain.bias = self.bias
        return plain

    def forward(self, inputs: Tensor) -> Tensor:
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        cast = inputs.to(dtype)
        answer: Tensor = _CodedProduct.apply(cast, self.weight, self.scales)  # type: ignore[no-untyped-call]
        return answer if self.bias is None else answer + self.bias.to(dtype)


class _CodedProduct(torch.autograd.Function):
    """inputs @ weight.T; the weight is made from its codes again in the backward and not kept until then."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(inputs, (codes * scales).to(inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        return upstream[0] @ (codes * scales).to(upstream[0].dtype), None, None


@contextmanager
def widened(network: Any) -> Iterator[None]:
    """In the body layers of codes are plain ones of the same numbers; after it, the codes again."""
    coded = {name: part for name, part in network.named_modules() if isinstance(part, CodedLinear)}
    try:
        for name, part in coded.items():
            network.set_submodule(name, part.widened())
        yield
    finally:
        for name, part in coded.items():
            network.set_submodule(name, part)
