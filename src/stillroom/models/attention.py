"""Causal attention without a mask, and without asking the device about one; open to view where a term asks for it.

transformers decides in each forward whether a mask is needed at all, and to decide it reads from the device: it
looks whether the mask is all ones, or whether the positions restart. Our rows are padded on the right and attention
is causal, so no scored position can see padding and the answer is always no. An attention function that transformers
knows of, but has no mask builder for, is given none and uses the fast causal kernel.

The fast kernel never makes the probabilities. Layers whose maps are asked for compute them openly instead; the others
keep the fast kernel, so the price is paid for the chosen layers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stillroom.numerics import work_dtype

NAME = "stillroom_causal"

# Attention modules that compute openly. They stay so after the forward pass, because gradient checkpointing runs it
# again in the backward pass and must find the same arithmetic.
_OPEN: WeakSet[nn.Module] = WeakSet()
_NO_GROUPS = nn.Module()  # stands in for an attention whose heads were repeated: it has no `num_key_value_groups`


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if module in _OPEN:
        return _attend_in_the_open(query, key, value, options.get("dropout", 0.0), options.get("scaling"))
    if attention_mask is None and key.shape[1] < query.shape[1] and needs_every_head(query.device):
        options.setdefault("is_causal", getattr(module, "is_causal", True))
        key, value, module = _every_head(key, query), _every_head(value, query), _NO_GROUPS
    answer: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return answer


def needs_every_head(device: torch.device) -> bool:
    """Whether keys and values are repeated for each query head before the kernel is called.

    Only the flash kernel takes fewer key heads than query heads, and below sm_80 there is none: torch would fall back
    to plain products that keep [heads, length, length]. With repeated heads the memory-efficient kernel serves there.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def _every_head(states: Tensor, query: Tensor) -> Tensor:
    """Keys or values once for each query head. [B, H_kv, L, D] -> [B, H, L, D]"""
    groups = query.shape[1] // states.shape[1]
    return states.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


def _attend_in_the_open(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The same attention with its probabilities, in FP32 and before dropout: noise is no part of what is matched."""
    if key.shape[1] < query.shape[1]:
        key, value = _every_head(key, query), _every_head(value, query)
    num_queries, num_keys = query.shape[2], key.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        wide = work_dtype(query)
        scores = (query.to(wide) * scale) @ key.to(wide).transpose(-1, -2)
        is_past = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        probs = torch.softmax(scores.masked_fill(~is_past, float("-inf")), dim=-1)
        output = F.dropout(probs, dropout, training=dropout > 0) @ value.to(wide)
    return output.to(value.dtype).transpose(1, 2).contiguous(), probs


AttentionInterface.register(NAME, _attend)


def attend_causally(model: Any) -> bool:
    """Switch a model to maskless causal attention where that is exactly what it computes. True if it was switched.

    Sliding windows, chunks and soft-capped scores need their own masks or kernels and stay as they are.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not _is_plain(config):
        return False
    model.set_attn_implementation(NAME)
    return True


def attention_of(block: nn.Module) -> nn.Module:
    """The self-attention of a block: the first module whose class is named so."""
    for module in block.modules():
        if type(module).__name__.endswith("Attention") and not getattr(module, "is_cross_attention", False):
            return module
    raise LookupError(f"no attention in {type(block).__name__}")


def attend_openly(blocks: Sequence[nn.Module], layers: Collection[int]) -> None:
    """From here on the attention of these layers, and of no other block of the model, makes its probabilities."""
    if not layers and not _OPEN:
        return
    for module in [module for block in blocks for module in block.modules()]:
        _OPEN.discard(module)
    for layer in layers:
        _OPEN.add(attention_of(blocks[layer]))


def show_attention(model: Any) -> str:
    """Make a model able to give its attention maps; says how. One with masks of its own turns to eager attention."""
    if model.config.get_text_config()._attn_implementation == NAME:
        return "computes the attention of the chosen layers openly, without the fast kernel"
    model.set_attn_implementation("eager")
    return "uses eager attention in all layers: its kind of attention has no open form layer by layer"


def _is_plain(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        return False
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_chunk_size", None):
        return False
    uses_window = getattr(config, "use_sliding_window", True)
    return not (uses_window and getattr(config, "sliding_window", None))
