"""How long a row a model may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from stillroom.models.student import num_positions

SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def limit(config: Any) -> int | None:
    return num_positions(AutoModelForCausalLM.from_config(config))


def test_the_table_of_positions_is_the_limit() -> None:
    assert limit(LlamaConfig(**SMALL, max_position_embeddings=96)) == 96
    assert limit(tiny.config("gpt2")) == 128


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, 96),
        ({"rope_type": "linear", "factor": 2.0}, 192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64}, 96),
    ],
)
def test_a_scaled_rotary_embedding_counts_with_its_factor(scaling: dict[str, Any], expected: int) -> None:
    config = Qwen2Config(**SMALL, max_position_embeddings=96, rope_parameters={"rope_theta": 1e4, **scaling})
    assert limit(config) == expected


def test_settings_of_each_kind_of_layer_are_looked_at() -> None:
    inner = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    config = SimpleNamespace(max_position_embeddings=10, rope_parameters=inner)
    assert num_positions(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))) == 80


def test_a_sliding_window_is_no_limit_and_neither_is_nothing() -> None:
    assert limit(MistralConfig(**SMALL, max_position_embeddings=96, sliding_window=16)) == 96
    config = SimpleNamespace()
    assert num_positions(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))) is None
