"""Tiny models of any causal family of transformers, built from its own configuration class with its sizes made small.

Nothing is known about a family but the names its configuration uses for sizes. A family for which that is not enough
has a line of its own; one that cannot be built small, or at all, is left out and says why.
"""

from __future__ import annotations

import copy
from typing import Any

import tiny
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ALL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MOST_PARAMETERS = 20_000_000

_WIDTH, _HEADS, _LAYERS = 32, 4, 2
_SIZES: dict[str, int] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "lru_width", "word_embed_proj_dim"], _WIDTH),
    **dict.fromkeys(["embedding_size", "embedding_dim", "moe_intermediate_size", "projection_dim"], _WIDTH),
    **dict.fromkeys(["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"], _WIDTH),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"], 2 * _WIDTH
    ),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], _LAYERS),
    **dict.fromkeys(["encoder_layers", "num_encoder_layers", "depth"], 1),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "mamba_n_heads"], _HEADS),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], _HEADS),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 8),
    **dict.fromkeys(["state_size", "mamba_d_state"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "mamba_d_head"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 128),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "pad_token_id"], 1),
    **dict.fromkeys(["bos_token_id", "eos_token_id", "decoder_start_token_id"], 0),
    "vocab_size": tiny.VOCAB,
}
SMALL_EYE: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
# What the names alone do not say.
_SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "gemma3": {"vision_config": SMALL_EYE},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}
# Names that some families compute themselves and do not take.
_NOT_GIVEN = ((), ("head_dim",), ("head_dim", "v_head_dim"), ("num_hidden_layers",), ("max_position_embeddings",))
_LATENT = {"num_key_value_heads": _HEADS}  # latent attention has as many keys as queries


def _sizes_for(kind: Any, left_out: tuple[str, ...]) -> dict[str, Any]:
    named = {**kind().to_dict(), **kind.attribute_map}
    return {name: size for name, size in _SIZES.items() if name in named and name not in left_out}


def config(family: str, left_out: tuple[str, ...] = (), **over: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    parts = {
        name: part for name, part in (getattr(kind, "sub_configs", None) or {}).items() if hasattr(part, "model_type")
    }
    inner = {name: part(**_sizes_for(part, left_out)) for name, part in parts.items() if part.__name__ != "AutoConfig"}
    return kind(**{**_sizes_for(kind, left_out), **inner, **_SPECIAL.get(family, {}), **over})


def build(family: str, **over: Any) -> Any:
    """A tiny model with weights away from their usual beginnings, so that each part of it shows in its answers.

    Raises the last error of those that stood in the way: it is the test's business to leave such a family out.
    """
    reason: Exception = LookupError(family)
    for left_out, more in [*((names, {}) for names in _NOT_GIVEN), ((), _LATENT), (("head_dim",), _LATENT)]:
        try:
            found = config(family, left_out, **more, **over)
            with torch.device("meta"):
                count = sum(
                    parameter.numel()
                    for parameter in AutoModelForCausalLM.from_config(copy.deepcopy(found)).parameters()
                )
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count:,} parameters")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(found).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
                model(input_ids=torch.tensor([[5, 9, 2, 7]]), use_cache=False)
        except Exception as error:  # noqa: BLE001, any error means that the family is not built this way
            reason = error
        else:
            return model
    raise reason
