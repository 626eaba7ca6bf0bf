"""The weights under an adapter: their identity, and the dtype they are stored in.

They never change, so they are in no checkpoint: a hash says which they are, and a run is continued on those alone.
"""

from __future__ import annotations

import hashlib
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
    autocast casts anyway; embeddings, norms, the head and other kinds of layers stay in FP32. A network of shapes alone
    has no values that could be out of range.
    """
    layers: dict[str, nn.Linear] = {}
    if whole:
        chosen = dict(network.named_parameters())
    else:
        kept = {id(part.weight) for part in (network.get_input_embeddings(), network.get_output_embeddings())}
        found = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
        layers = {name: part for name, part in found.items() if id(part.weight) not in kept}
        chosen = {f"{name}.weight": part.weight for name, part in layers.items()}
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
