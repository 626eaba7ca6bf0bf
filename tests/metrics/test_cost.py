"""Laws of what a model costs."""

from __future__ import annotations

from pathlib import Path

import families
import torch

from stillroom.metrics.cost import cost_of, disk_megabytes


def test_every_figure_of_a_model_is_measured(tmp_path: Path) -> None:
    model = families.build("llama")
    model.save_pretrained(tmp_path)
    found = cost_of(model, place=tmp_path, load_seconds=1.5)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert found.disk_megabytes == size / 1e6 and found.load_seconds == 1.5
    assert found.prefill_tokens_per_second > 0 and found.decode_tokens_per_second > 0
    weights = sum(weight.numel() * 4 for weight in model.parameters())
    assert found.peak_memory_gb is None or found.peak_memory_gb >= weights / 1e9


def test_a_model_of_few_positions_and_one_without_a_cache_are_measured() -> None:
    few = families.build("gpt2", n_positions=40)
    assert cost_of(few).decode_tokens_per_second > 0
    assert cost_of(families.build("recurrent_gemma")).decode_tokens_per_second > 0


def test_a_place_without_weights_has_no_size(tmp_path: Path) -> None:
    assert disk_megabytes(tmp_path) is None
    (tmp_path / "a.gguf").write_bytes(bytes(2_000_000))
    assert disk_megabytes(tmp_path) == disk_megabytes(tmp_path / "a.gguf") == 2.0


def test_measuring_leaves_the_random_state_alone() -> None:
    model = families.build("llama")
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    cost_of(model)
    assert torch.equal(torch.random.get_rng_state(), state)
