"""Which kernel serves scaled_dot_product_attention on a card, and what it costs.

The rules are those of torch 2.13: flash needs compute capability 8.0 and half inputs; the memory-efficient kernel knows
no grouped queries; what neither serves is computed openly, in FP32 and with the whole matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OPEN = torch.nn.functional.scaled_dot_product_attention


def kernel_for(capability: tuple[int, int], dtype: torch.dtype, *, has_mask: bool, is_grouped: bool) -> str:
    is_half = dtype in (torch.float16, torch.bfloat16)
    if capability >= (8, 0) and is_half and not has_mask:
        return "flash"
    if is_grouped or (dtype == torch.bfloat16 and capability < (8, 0)):
        return "math"
    return "efficient"


def fused_attention(capability: tuple[int, int], recorder: Any) -> Callable[..., Tensor]:
    """A stand-in for torch's function that tells the recorder what the fused kernels would do."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            half = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(half), key.to(half), value.to(half)
        is_grouped = enable_gqa and query.shape[1] != key.shape[1]
        chosen = kernel_for(capability, query.dtype, has_mask=attn_mask is not None, is_grouped=is_grouped)
        if query.device.type != "cuda" or chosen == "math":
            return _OPEN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        answer: Tensor = _Fused.apply(query, key, value, is_causal, recorder)  # type: ignore[no-untyped-call]
        return answer

    return attend


class _Fused(torch.autograd.Function):
    """One launch forward and two backward; scores are made again in the backward, so there are five products in it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, recorder: Any) -> Tensor:
        out = torch.empty_like(query)
        norms = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, norms)
        ctx.recorder = recorder
        ctx.flops = 2 * query.numel() * key.shape[-2] // (2 if is_causal else 1)  # of one product
        recorder.note("attention", 2 * ctx.flops, query.dtype, [query, key, value], [out, norms], launches=1)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        made = [torch.empty_like(tensor) for tensor in inputs[:3]]
        reads = [*inputs, gradients[0]]
        ctx.recorder.note("attention backward", 5 * ctx.flops, inputs[0].dtype, reads, made, launches=2)
        return *made, None, None
