"""Tiny llama-like models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring channels, transformers the two halves of a head."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _model, _layers, number, rest = name.split(".", 3)
    return f"blk.{number}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def write(
    folder: Path,
    path: Path,
    *,
    architecture: str = "llama",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    with_tokenizer: bool = True,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """The llama of a folder as a GGUF file. `without` names tensors that are left out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.rope_parameters["rope_type"] == "llama3":
        # As the converter of llama.cpp: what each frequency is divided by.
        plain = config.rope_parameters["rope_theta"] ** -np.linspace(0, 1, config.head_dim // 2, endpoint=False)
        divisors = plain / model.model.rotary_emb.inv_freq.double().numpy()
        tensors = {"rope_freqs.weight": divisors.astype(np.float32), **(tensors or {})}
    for key, value in (fields or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    if with_tokenizer:
        _add_tokenizer(writer, folder)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        weight = _permuted(weight, heads[name.split(".")[-2]]) if name.split(".")[-2] in heads else weight
        if _name(name) not in without:
            _add(writer, _name(name), weight.numpy(), kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in held["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
