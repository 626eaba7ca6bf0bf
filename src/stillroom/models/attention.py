"""Causal attention without a mask, and without asking the device about one.

transformers decides in each forward whether a mask is needed at all, and to decide it reads from the device: it
looks whether the mask is all ones, or whether the positions restart. Our rows are padded on the right and attention
is causal, so no scored position can see padding and the answer is always no. An attention function that transformers
knows of, but has no mask builder for, is given none and uses the fast causal kernel.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "stillroom_causal"

AttentionInterface.register(NAME, sdpa_attention_forward)


def attend_causally(model: Any) -> bool:
    """Switch a model to maskless causal attention where that is exactly what it computes. True if it was switched.

    Sliding windows, chunks and soft-capped scores need their own masks or kernels and stay as they are.
    """
    config = model.config.get_text_config()
    if config._attn_implementation != "sdpa" or not _is_plain(config):
        return False
    model.set_attn_implementation(NAME)
    return True


def _is_plain(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        return False
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "attention_chunk_size", None):
        return False
    uses_window = getattr(config, "use_sliding_window", True)
    return not (uses_window and getattr(config, "sliding_window", None))
