"""Tiny real models, tokenizers and texts for tests: built from configurations, saved, loaded like any other."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from process_jobs import Child
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HunYuanMoEV1Config,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SAYING = (
    "the still room keeps spirits and waters, and the maid who keeps the room knows how long a thing must be "
    "heated, how slowly it must drip, and what is left behind when the best of it has gone over the bridge"
)
WORDS = _SAYING.split()
VOCAB = 320


def sentences(count: int, seed: int) -> list[str]:
    """Text with enough structure to be learned: every sentence walks along the same ring of words."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        start, length = rng.randrange(len(WORDS)), rng.randrange(8, 24)
        lines.append(" ".join(WORDS[(start + i) % len(WORDS)] for i in range(length)) + ".")
    return lines


def tokenizer(vocab_size: int = VOCAB, seed: int = 0) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(sentences(200, seed), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")


def config(family: str, *, width: int = 32, num_layers: int = 2, vocab_size: int = VOCAB) -> Any:
    common = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": width}
    latent = {
        "n_routed_experts": 4, "q_lora_rank": width // 2, "kv_lora_rank": width // 2,
        "qk_rope_head_dim": width // 4, "qk_nope_head_dim": width // 4, "v_head_dim": width // 2,
    }  # fmt: skip
    without_kv = {key: value for key, value in common.items() if key != "num_key_value_heads"}
    match family:
        case "llama":
            return LlamaConfig(**common)
        case "gpt2":
            return GPT2Config(
                vocab_size=vocab_size, n_embd=width, n_layer=num_layers, n_head=2, n_positions=128,
                bos_token_id=0, eos_token_id=0, pad_token_id=1,
            )  # fmt: skip
        case "qwen3":
            return Qwen3Config(**common, head_dim=width // 2)
        case "qwen3_moe":
            return Qwen3MoeConfig(**common, head_dim=width // 2, num_experts=4, **experts)
        case "mixtral":
            return MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
        case "olmoe":
            return OlmoeConfig(**common, num_experts=4, num_experts_per_tok=2)
        case "qwen2_moe":
            return Qwen2MoeConfig(**common, num_experts=4, shared_expert_intermediate_size=width, **experts)
        case "granitemoe":
            return GraniteMoeConfig(**common, num_local_experts=4, num_experts_per_tok=2, logits_scaling=2.0)
        case "gpt_oss":
            return GptOssConfig(**common, head_dim=width // 2, num_local_experts=4, num_experts_per_tok=2)
        case "phimoe":
            # Its weights depend on the logits only where two experts are within this share of each other.
            return PhimoeConfig(**common, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.4)
        case "deepseek_v2":
            return DeepseekV2Config(**common, **latent, **experts, first_k_dense_replace=1, n_shared_experts=1)
        case "deepseek_v3":
            return DeepseekV3Config(
                **common, **latent, **experts, first_k_dense_replace=1, n_group=2, topk_group=1, rope_interleave=False
            )
        case "glm4_moe":
            return Glm4MoeConfig(
                **common, **experts, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1,
                head_dim=width // 2,
            )  # fmt: skip
        case "minimax_m2":
            return MiniMaxM2Config(**common, num_local_experts=4, num_experts_per_tok=2, head_dim=width // 2)
        case "hunyuan":
            return HunYuanMoEV1Config(**common, num_experts=4, moe_topk=2, head_dim=width // 2)
        case "ernie":
            return Ernie4_5_MoeConfig(
                **common, moe_num_experts=4, moe_k=2, moe_intermediate_size=width, moe_layer_start_index=1,
                moe_layer_end_index=num_layers - 1,
            )  # fmt: skip
        case "llama4":
            return Llama4TextConfig(
                **common, intermediate_size_mlp=2 * width, num_local_experts=4, num_experts_per_tok=1,
                interleave_moe_layer_step=1, head_dim=width // 2,
            )  # fmt: skip
        case "jetmoe":
            kept = {key: value for key, value in common.items() if key != "num_attention_heads"}
            return JetMoeConfig(**kept, num_local_experts=4, num_experts_per_tok=2, kv_channels=width // 2)
        case "dbrx":
            return DbrxConfig(
                d_model=width, n_heads=2, n_layers=num_layers, max_seq_len=128, vocab_size=vocab_size,
                attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
                ffn_config={"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 2 * width, "hidden_size": width},
            )  # fmt: skip
        case "gemma2":
            return Gemma2Config(**common, head_dim=width // 2, final_logit_softcapping=30.0)
        case "granite":
            return GraniteConfig(**common, logits_scaling=8.0)
        case "phi":
            return PhiConfig(**common)
        case "opt":
            return OPTConfig(**without_kv, ffn_dim=2 * width, word_embed_proj_dim=width)
        case "gpt_neox":
            return GPTNeoXConfig(**without_kv)
    raise ValueError(family)


def save_model(path: Path, family: str = "llama", *, seed: int = 0, with_tokenizer: bool = True, **size: Any) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config(family, **size)).save_pretrained(path)
    if with_tokenizer:
        tokenizer(size.get("vocab_size", VOCAB)).save_pretrained(path)
    return path


def save_trained(path: Path, family: str = "llama", *, steps: int = 120, **size: Any) -> Path:
    """A teacher that knows the text: trained for a moment, then saved."""
    torch.manual_seed(1)
    words = tokenizer()
    model = AutoModelForCausalLM.from_config(config(family, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = [i for line in sentences(400, 3) for i in [*words(line)["input_ids"], 0]]
    for step in range(steps):
        starts = [(step * 977 + row * 131) % (len(ids) - 33) for row in range(16)]
        batch = torch.tensor([ids[start : start + 32] for start in starts])
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


def save_text(path: Path, count: int = 300, seed: int = 0) -> Path:
    path.write_text("\n".join(json.dumps({"text": line}) for line in sentences(count, seed)) + "\n", encoding="utf-8")
    return path


def in_child(work: Callable[[], object]) -> int:
    """Do something in a copy of this process, to be killed in the middle. Answers with its end: -9 for SIGKILL.

    A fork spares the import of torch; torch is single-threaded in tests, so nothing is left locked in the copy.
    """
    ended = Child(work, os.environ).wait()
    sys.stderr.write(ended.err)
    return ended.code


def settings(folder: Path, **over: Any) -> dict[str, Any]:
    """Dotted overrides of a run that takes a second or two."""
    base: dict[str, Any] = {
        "teacher.model": str(folder / "teacher"),
        "student.model": str(folder / "student"),
        "data.train": str(folder / "train.jsonl"),
        "data.max_length": 32,
        "data.eval_share": 0.1,
        "train.max_steps": 8,
        "train.batch_size": 4,
        "train.learning_rate": 3e-3,
        "train.eval_steps": 4,
        "eval.max_batches": 2,
        "eval.samples": 0,
    }
    return {**base, **{key.replace("__", "."): value for key, value in over.items()}}
