"""The models of the cost model: Llama configurations of published sizes, built on the fake card, not downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY = 49_152


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    mlp_width: int
    heads: int
    key_heads: int

    @property
    def num_parameters(self) -> int:
        head_width = self.width // self.heads
        attention = 2 * self.width * self.width + 2 * self.width * self.key_heads * head_width
        return VOCABULARY * self.width + self.layers * (attention + 3 * self.width * self.mlp_width)

    def config(self, length: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=max(2048, length),
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )

    def build(self, length: int, dtype: torch.dtype) -> Any:
        """A network on the card that is current. Its weights have no values."""
        with torch.device("cuda"):
            network = AutoModelForCausalLM.from_config(self.config(length), dtype=dtype, attn_implementation="sdpa")
        network.tie_weights()
        return network


SMOL_135M = Shape(30, 576, 1536, 9, 3)  # SmolLM2-135M
SMOL_360M = Shape(32, 960, 2560, 15, 5)  # SmolLM2-360M
SMOL_81M = Shape(15, 576, 1536, 9, 3)  # every other layer of SmolLM2-135M


@dataclass(frozen=True)
class Problem:
    name: str
    teacher: Shape
    student: Shape
    rows: int = 4
    length: int = 512

    @property
    def tokens(self) -> int:
        return self.rows * self.length


PROBLEMS = (
    Problem("135M -> 81M", SMOL_135M, SMOL_81M),
    Problem("360M -> 135M", SMOL_360M, SMOL_135M),
)
