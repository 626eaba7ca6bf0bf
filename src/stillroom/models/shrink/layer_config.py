"""Rewrite a model's configuration for a subset of its layers.

Families encode the kind of each layer differently: a list with an entry for each layer, a list of layer numbers, a
count of leading layers, a period. Each is rewritten for the layers kept. What a family's settings cannot express stays
unchanged; `models/shrink/proof.py` then finds that the layers differ from the teacher's, and refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

# One entry for each layer.
_FOR_EACH_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "activation_sparsity_pattern",
)  # fmt: skip
# Numbers of layers.
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
# Number of leading layers of another kind.
_LEADING = ("first_k_dense_replace", "num_dense_layers")
# Layers with number % period == offset are of another kind.
_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """A copy of a model's configuration for these layers, as it would be after saving and loading."""
    new = copy.deepcopy(config)
    text = new.get_text_config()
    num_layers = int(text.num_hidden_layers)
    if vars(text).get("rescale_every"):
        # RWKV halves weights in place in evaluation mode, against FP16 overflow: a student saved then would be wrong.
        text.rescale_every = 0
    if tuple(layers) == tuple(range(num_layers)):
        return _read_back(new)
    own = vars(text)
    for name in _FOR_EACH_LAYER:
        if isinstance(own.get(name), list | tuple) and len(own[name]) >= num_layers:
            setattr(text, name, [own[name][layer] for layer in layers])
    _rewrite_sparse_step(text, num_layers)
    for name in _LAYER_NUMBERS:
        if own.get(name):
            setattr(text, name, [place for place, layer in enumerate(layers) if layer in own[name]])
    for name in _LEADING:
        if own.get(name):
            setattr(text, name, sum(layer < own[name] for layer in layers))
    for names in _PERIODS:
        _rewrite_period(text, names, layers)
    _rewrite_range(text, layers)
    _rewrite_tiles(text, layers, num_layers)
    text.num_hidden_layers = len(layers)
    return _read_back(new)


def _read_back(config: Any) -> Any:
    """The configuration as it would be after saving and loading: derived values are computed again."""
    loaded = type(config).from_dict(config.to_dict())
    loaded._attn_implementation = config._attn_implementation
    return loaded


def _rewrite_sparse_step(text: Any, num_layers: int) -> None:
    """Rewrite "every nth layer is sparse" as a list of the dense layers."""
    step = vars(text).get("decoder_sparse_step")
    if not step or step == 1 or not isinstance(vars(text).get("mlp_only_layers"), list):
        return
    dense = {layer for layer in range(num_layers) if (layer + 1) % step} | set(text.mlp_only_layers)
    text.mlp_only_layers = sorted(dense)
    text.decoder_sparse_step = 1


def _rewrite_period(text: Any, names: tuple[str, str], layers: Sequence[int]) -> None:
    period, offset = (vars(text).get(name) for name in names)
    if not period or offset is None:
        return
    rewritten = find_period([layer % period == offset for layer in layers])
    if rewritten is not None:
        for name, value in zip(names, rewritten, strict=True):
            setattr(text, name, value)


def find_period(marks: Sequence[bool]) -> tuple[int, int] | None:
    """The smallest period, with its offset, that gives exactly the marked layers; None if there is none."""
    for period in range(1, len(marks) + 2):
        for offset in range(period):
            if all((place % period == offset) == mark for place, mark in enumerate(marks)):
                return period, offset
    return None


def _rewrite_range(text: Any, layers: Sequence[int]) -> None:
    """Rewrite a range of sparse layers."""
    own = vars(text)
    first, last = own.get("moe_layer_start_index"), own.get("moe_layer_end_index")
    if first is None or last is None or own.get("moe_layer_interval", 1) != 1:
        return
    last = max(layers) if last < 0 else last
    inside = [place for place, layer in enumerate(layers) if first <= layer <= last]
    text.moe_layer_start_index = inside[0] if inside else len(layers)
    text.moe_layer_end_index = inside[-1] if inside else len(layers)


def _rewrite_tiles(text: Any, layers: Sequence[int], num_layers: int) -> None:
    """Write out a pattern of layer kinds that the family repeats."""
    own = vars(text)
    tile = own.get("block_types")
    if isinstance(tile, list | tuple) and tile:
        text.block_types = [tile[layer % len(tile)] for layer in layers]
    kinds = own.get("attention_layers")
    if isinstance(kinds, list) and len(kinds) == num_layers and "attention_types" in own:
        text.attention_types = [[[kinds[layer]], 1] for layer in layers]
        text.attention_layers = [kinds[layer] for layer in layers]
