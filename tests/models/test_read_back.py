"""A written folder is compared with the network it was written from, and a difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import psutil
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from stillroom.models import check as module
from stillroom.models.check import compare_tensors, read_back

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny.config("llama"))


def changed(folder: Path, name: str = "model.layers.1.mlp.up_proj.weight", by: float = 0.5) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + by
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_folder_that_holds_the_network_is_equal_in_every_dtype(
    tmp_path: Path, dtype: torch.dtype, is_tied: bool
) -> None:
    config = tiny.config("llama")
    config.tie_word_embeddings = is_tied
    network = AutoModelForCausalLM.from_config(config).to(dtype)
    network.save_pretrained(tmp_path / "student")
    found = read_back(network, tmp_path / "student", IDS)
    assert found.is_equal and found.compared == "logits" and found.difference < 1e-5 and not found.reason
    assert compare_tensors(network, tmp_path / "student").is_equal


def test_a_changed_weight_is_a_difference_of_logits(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path / "student")
    found = read_back(network, changed(tmp_path / "student"), IDS)
    assert not found.is_equal and found.difference is not None and found.difference > 1e-3
    assert "logits differ by" in found.reason


def test_a_setting_that_is_lost_on_the_way_is_a_difference(network: Any, tmp_path: Path) -> None:
    """Every tensor is there and equal: only the answers tell."""
    network.save_pretrained(tmp_path / "student")
    path = tmp_path / "student" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.1}))
    assert compare_tensors(network, tmp_path / "student").is_equal
    assert not read_back(network, tmp_path / "student", IDS).is_equal


def test_a_folder_that_cannot_be_loaded_differs_and_says_why(network: Any, tmp_path: Path) -> None:
    network.save_pretrained(tmp_path / "student")
    tensors = load_file(tmp_path / "student" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "student" / "model.safetensors", metadata={"format": "pt"})
    found = read_back(network, tmp_path / "student", IDS)
    assert not found.is_equal and found.difference is None and "model.norm.weight" in found.reason


def test_where_a_copy_does_not_fit_tensors_are_compared_by_name(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.save_pretrained(tmp_path / "student")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000))
    monkeypatch.setattr(module, "load_teacher", lambda *_: pytest.fail("a copy was loaded"))
    found = read_back(network, tmp_path / "student", IDS)
    assert found.is_equal and found.compared == "tensors" and found.difference == 0.0
    found = read_back(network, changed(tmp_path / "student"), IDS)
    assert not found.is_equal and "model.layers.1.mlp.up_proj.weight differs by 0.5" in found.reason


def test_the_network_is_left_as_it_was(network: Any, tmp_path: Path) -> None:
    network.half().train()
    network.save_pretrained(tmp_path / "student")
    before = {name: (id(tensor), tensor.dtype) for name, tensor in network.named_parameters()}
    random = torch.get_rng_state()
    read_back(network, tmp_path / "student", IDS)
    assert {name: (id(tensor), tensor.dtype) for name, tensor in network.named_parameters()} == before
    assert network.training and torch.equal(torch.get_rng_state(), random)


def test_a_family_that_does_not_survive_being_saved_is_found(tmp_path: Path) -> None:
    """Its files load without a word, and the model is another one."""
    network = families.build("youtu").eval()
    network.save_pretrained(tmp_path / "student")
    found = read_back(network, tmp_path / "student", IDS)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "student")(IDS).logits
        gap = float((again - network(IDS).logits).abs().max())
    assert found.is_equal == (gap < 1e-4), "a version of transformers that writes it rightly is believed"
    if not found.is_equal:
        assert found.difference == pytest.approx(gap, rel=1e-3)
