"""Laws of scaled rotary frequencies in GGUF files: read as they are meant, or refused; transformers leaves them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.models import open_teacher

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


def saved(folder: Path, rotation: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = tiny.config("llama", width=64)
    config.rope_parameters = rotation
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    ids = torch.randint(2, tiny.VOCAB, (1, 100), generator=torch.Generator().manual_seed(3))
    network = open_teacher(TeacherConfig(model=str(path)), torch.float32).network
    return network(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("rotation", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_a_scaled_model_answers_as_the_folder_it_was_made_from(rotation: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "scaled", rotation)
    is_linear = rotation["rope_type"] == "linear"
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0} if is_linear else {}
    expected = logits(folder)
    assert torch.equal(logits(gguf_files.write(folder, tmp_path / "scaled.gguf", fields=fields)), expected)
    plain = saved(tmp_path / "plain", {"rope_type": "default", "rope_theta": rotation["rope_theta"]})
    assert not torch.equal(logits(plain), expected), "the scaling shows"


@pytest.mark.parametrize(
    ("fields", "tensors", "named"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {}, "'yarn' with factor 4"),
        ({}, {"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)}, "rope_freqs.weight"),
    ],
    ids=["yarn", "divisors of no llama"],
)
def test_any_other_scaling_is_refused(fields: Any, tensors: Any, named: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", {"rope_type": "default", "rope_theta": 10_000.0})
    path = gguf_files.write(folder, tmp_path / "odd.gguf", fields=fields, tensors=tensors)
    with pytest.raises(BrokenAtStart) as caught:
        logits(path)
    assert caught.value.exit_code == 20 and named in caught.value.what and "own folder" in caught.value.advice[0]


def test_divisors_of_one_scale_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", {"rope_type": "default", "rope_theta": 10_000.0})
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    assert torch.equal(logits(gguf_files.write(folder, tmp_path / "ones.gguf", tensors=ones)), logits(folder))
