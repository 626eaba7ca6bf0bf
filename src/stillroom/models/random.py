"""Write models with random weights as Hugging Face folders: for measurements that need a size and no knowledge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    width: int
    mlp_width: int
    heads: int
    key_heads: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer."""
        kept = self.width * self.key_heads // self.heads
        return 2 * self.width * (self.width + kept) + 3 * self.width * self.mlp_width

    @property
    def num_parameters(self) -> int:
        """Embeddings are the head."""
        return self.vocabulary * self.width + self.layers * self.layer_parameters


def write_llama(folder: Path, shape: LlamaShape, *, length: int, seed: int = 0) -> None:
    """Write a Llama of this shape, and a tokenizer of words t0, t1, ... that fills its vocabulary."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape.vocabulary)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1", unk_token="t1")
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=max(2048, length),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
