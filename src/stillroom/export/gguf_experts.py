"""Read back GGUF files of experts that transformers does not read: mixtral and olmoe.

Sizes and weights come from the file alone, and names and the order of rows are turned round by rules of their own, not
by those of the writer: a mistake there must show as other logits.

# H heads, D width of a head, W width of the model, E experts, F width of an expert
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

READ_HERE = ("mixtral", "olmoe")
_ROTATED_BY_PAIRS = ("mixtral",)  # written as llama, which rotates neighbouring channels
# setting of transformers: field of the file, behind the architecture's name
_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "head_dim": "attention.key_length",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def read_network(library: Any, path: Path, family: str) -> Any:
    """The network of a file, in FP32. Raise ValueError or KeyError if the file does not hold all of it."""
    reader = library.GGUFReader(str(path))
    network = AutoModelForCausalLM.from_config(_config(reader, family)).float()
    weights = _weights(library, reader)
    state = {}
    for name, weight in weights.items():
        state.update(_named(name, weight, weights, network.config, family))
    report = network.load_state_dict(state, strict=False)
    missing = [
        name for name in report.missing_keys if not (name == "lm_head.weight" and "output.weight" not in weights)
    ]
    if missing or report.unexpected_keys:
        raise ValueError(f"it lacks {missing} and has {list(report.unexpected_keys)} beside")
    network.tie_weights()
    return network


def _config(reader: Any, family: str) -> Any:
    architecture = reader.fields["general.architecture"].contents()
    values = {key: reader.fields[f"{architecture}.{field}"].contents() for key, field in _FIELDS.items()}
    rope = {"rope_type": "default", "rope_theta": float(values.pop("rope_theta"))}
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return AutoConfig.for_model(family, **values, rope_parameters=rope, tie_word_embeddings=is_tied)


def _weights(library: Any, reader: Any) -> dict[str, Tensor]:
    """Each tensor in FP32. The reader turns shapes round, as numpy has them; dequantising keeps them."""
    return {
        tensor.name: torch.from_numpy(
            np.array(library.quants.dequantize(tensor.data, tensor.tensor_type), np.float32, copy=True)
        ).reshape(tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }


def _named(name: str, weight: Tensor, weights: dict[str, Tensor], config: Any, family: str) -> dict[str, Tensor]:
    """The parameter that a tensor is, by its name in transformers; of experts' gates and ups one of both."""
    stem = name.removesuffix(".weight")
    if stem in _WHOLE:
        return {f"{_WHOLE[stem]}.weight": weight}
    _blk, layer, part = stem.split(".", 2)
    before = f"model.layers.{layer}"
    if part in ("ffn_gate_exps", "ffn_up_exps"):
        halves = [weights[f"blk.{layer}.ffn_{half}_exps.weight"] for half in ("gate", "up")]
        return {f"{before}.mlp.experts.gate_up_proj": torch.cat(halves, 1)}  # [E, 2 F, W]
    if part == "ffn_down_exps":
        return {f"{before}.mlp.experts.down_proj": weight}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if part in heads and family in _ROTATED_BY_PAIRS:
        weight = in_halves(weight, heads[part])
    return {f"{before}.{_OF_LAYER[part]}.weight": weight}


def in_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys, from neighbouring pairs to two halves of a head. [H D, W]"""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return torch.cat([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(weight.shape)
