"""A merged student answers as the trained one does, and is a plain folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel
from refusals import refused
from transformers import AutoModelForCausalLM

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import CannotSave
from stillroom.models.lora import Adapter, attach, compare, merged, save_merged, store_base

IDS = torch.arange(3, 27).view(2, 12)


def trained(folder: Path, family: str = "llama", *, is_tied: bool = False, **settings: Any) -> Adapter:
    """An adapter as it is after training: every part of it is far from zero."""
    torch.manual_seed(0)
    config = tiny.config(family, width=32)
    config.tie_word_embeddings = is_tied
    network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder / "base")
    adapter = attach(network, AdapterConfig(rank=4, **settings), name="student", base_name=str(folder / "base"), seed=1)
    for part in network.parameters():
        if part.requires_grad:
            part.data += 0.1 * torch.randn_like(part)
    return adapter


def answers(network: Any) -> torch.Tensor:
    with torch.no_grad():
        return network.eval()(IDS).logits.float()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
def test_the_written_student_answers_as_the_trained_one(
    tmp_path: Path, family: str, kind: str, dtype: torch.dtype, whole: bool
) -> None:
    adapter = trained(tmp_path, family, kind=kind, is_tied=family == "gemma2")
    network = adapter.network
    plain = answers(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    store_base(network, dtype, whole=whole)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    note = save_merged(adapter, tmp_path / "student", IDS)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert {weight.dtype for weight in written.parameters()} == {torch.float32}
    network.float()  # the trained student in FP32, of the numbers it stores
    assert float((answers(written) - answers(network)).abs().max()) < 1e-4
    assert float((answers(written) - plain).abs().max()) > 1e-2, "the adapter does something"
    assert "logits differ by" in note
    keys = set(AutoModelForCausalLM.from_config(written.config).state_dict())
    assert set(written.state_dict()) == keys, "nothing of the adapter is in the plain folder"
    after = network.state_dict()
    assert all(torch.equal(after[name].to(weight.dtype), weight) for name, weight in before.items())


def test_the_network_is_the_trained_one_again_to_the_last_bit(tmp_path: Path) -> None:
    adapter = trained(tmp_path, dropout=0.5)
    network = adapter.network.train()
    before = {name: (weight, weight.clone()) for name, weight in network.named_parameters()}
    own = answers(network)
    network.train()
    with merged(adapter) as plain:
        assert not any("lora" in name for name, _part in plain.named_modules())
        assert float((answers(plain) - own).abs().max()) < 1e-5
    for name, weight in network.named_parameters():
        assert weight is before[name][0] and torch.equal(weight, before[name][1]), name
    assert torch.equal(answers(network), own)
    random = torch.get_rng_state()
    network.train()
    save_merged(adapter, tmp_path / "student", IDS)
    assert network.training and torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_adapter_beside_it_is_one_that_peft_reads(tmp_path: Path, kind: str) -> None:
    adapter = trained(tmp_path, kind=kind)
    save_merged(adapter, tmp_path / "student", IDS)
    folder = tmp_path / "student" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.allclose(answers(PeftModel.from_pretrained(base, folder)), answers(adapter.network), atol=1e-6)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["r"] == 4
    assert json.loads((folder / "base.json").read_text())["base_sha256_32"] == adapter.base_identity
    trained_bytes = 4 * adapter.num_trained
    assert trained_bytes < (folder / "adapter_model.safetensors").stat().st_size < trained_bytes + 8192


def test_a_merge_that_changes_the_answers_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = trained(tmp_path)
    first = next(layer for _name, layer in adapter.layers())
    right = type(first).get_delta_weight
    monkeypatch.setattr(type(first), "get_delta_weight", lambda self, name: 1.5 * right(self, name))
    with refused(CannotSave, "student.adapter") as caught:
        save_merged(adapter, tmp_path / "student", IDS)
    assert caught.value.exit_code == 24


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 1.0])
def test_answers_that_are_not_the_same_are_refused(spoiled: float) -> None:
    one = torch.randn(2, 5, 7)
    assert "at most" in compare(one, one + 1e-6)
    other = one.clone()
    other[0, 0, 0] += spoiled
    with pytest.raises(CannotSave):
        compare(one, other)
