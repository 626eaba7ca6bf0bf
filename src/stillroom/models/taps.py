"""Read hidden states and attention maps of chosen layers by forward hooks.

`output_hidden_states=True` would keep every layer's states. Only the layers that an objective needs get a hook.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.errors import BrokenAtStart
from stillroom.models.anatomy import backbone, layers_of
from stillroom.models.attention import attend_openly, attention_of
from stillroom.types import Needs


@contextmanager
def tapped(blocks: Sequence[nn.Module], needs: Needs) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that the model's forward in the body fills: `hidden.<layer>` [B, L, D], `attention.<layer>`
    [B, H, L, L]."""
    taps: dict[str, Tensor] = {}

    def keep_hidden(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            taps[f"hidden.{layer}"] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_attention(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], Tensor):
                taps[f"attention.{layer}"] = output[1]

        return hook

    if not blocks and (needs.hidden_layers or needs.attention_layers):
        raise BrokenAtStart(
            "the model is not a list of layers that can be looked at",
            advice=["use objectives on the model's answers alone (kd, ce)"],
        )
    attend_openly(blocks, needs.attention_layers)
    handles = [blocks[layer].register_forward_hook(keep_hidden(layer)) for layer in sorted(needs.hidden_layers)]
    for layer in sorted(needs.attention_layers):
        handles.append(attention_of(blocks[layer]).register_forward_hook(keep_attention(layer)))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def gives_attention(model: Any, layers: Collection[int]) -> bool:
    """Whether the taps of these layers give causal attention maps. Tested on a few tokens."""
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).unsqueeze(0)
    was_training = model.training
    model.eval()
    try:
        with tapped(layers_of(model), Needs(attention_layers=frozenset(layers))) as taps:
            backbone(model)(input_ids=ids, use_cache=False)
    except LookupError:  # a block without an attention module
        return False
    finally:
        model.train(was_training)
    maps = [taps.get(f"attention.{layer}") for layer in layers]
    return all(
        weights is not None
        and weights.ndim == 4
        and weights.shape[2:] == (4, 4)
        and bool(torch.allclose(weights.float().sum(-1), torch.ones((), device=device), atol=1e-2))
        and bool((weights.float().triu(1) == 0).all())
        for weights in maps
    )
