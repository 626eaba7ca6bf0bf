"""An adapter in a network: what is trained, and that it is reached."""

from __future__ import annotations

import sys
from typing import Any

import families
import pytest
import tiny
import torch
from refusals import refused
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.models.lora import Adapter, attach

IDS = torch.arange(3, 27).view(2, 12)


def model(family: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny.config(family, width=32)).eval()


@torch.no_grad()
def answers(network: Any) -> Tensor:
    logits: Tensor = network(IDS).logits
    return logits


def attached(network: Any, seed: int = 1, **settings: Any) -> Adapter:
    return attach(network, AdapterConfig(rank=2, **settings), name="student", base_name="base", seed=seed)


def drawn(adapter: Adapter) -> list[Tensor]:
    return [part.detach().clone() for part in adapter.network.parameters() if part.requires_grad]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_before_the_first_update_no_answer_changes(family: str, kind: str) -> None:
    network = model(family)
    before = answers(network)
    adapter = attached(network, kind=kind)
    assert float((answers(network) - before).abs().max()) < 1e-6
    assert adapter.num_trained == sum(part.numel() for part in drawn(adapter)) > 0
    trained = [name for name, part in network.named_parameters() if part.requires_grad]
    assert all("lora_" in name for name in trained)


def test_its_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    one = drawn(attached(model(seed=0)))
    state = torch.get_rng_state()
    torch.manual_seed(6)
    other = drawn(attached(model(seed=3)))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    third = drawn(attached(model(seed=0), seed=2))
    assert any(not torch.equal(a, b) for a, b in zip(one, third, strict=True))
    torch.set_rng_state(state)
    network = model()
    state = torch.get_rng_state()
    attached(network)
    assert torch.equal(torch.get_rng_state(), state), "the run's own random numbers are not drawn"


def test_alpha_is_twice_the_rank_unless_it_is_given() -> None:
    assert attached(model()).peft_config.lora_alpha == 4.0
    assert attached(model(), alpha=3).peft_config.lora_alpha == 3.0


def test_the_base_keeps_its_identity_whatever_the_adapter_is() -> None:
    assert attached(model()).base_identity == attached(model(), kind="dora", targets=("q_proj",)).base_identity
    assert attached(model()).base_identity != attached(model(seed=1)).base_identity


def test_the_log_says_what_is_trained() -> None:
    adapter = attached(model(), targets=("q_proj", "v_proj"))
    said = adapter.notes[0]
    assert f"{adapter.num_trained:,} parameters are trained" in said and "4 linear layers" in said


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with refused(BrokenAtStart, "", "stillroom[peft]"):
        attached(model())


def test_layers_whose_names_peft_takes_for_stacked_experts_are_left_out_by_default_and_refused_by_name() -> None:
    """The first block of DeepSeek V3 has a plain MLP; peft would adapt the experts of the others in its place."""
    adapter = attached(model("deepseek_v3"))
    assert adapter.targets and not any("mlp" in name for name in adapter.targets)
    assert any("stacked experts" in note and "model.layers.0.mlp.gate_proj" in note for note in adapter.notes)
    with refused(ConfigError, "student.adapter.targets", "model.layers.0.mlp.up_proj"):
        attached(model("deepseek_v3"), targets=("q_b_proj", "layers.0.mlp.up_proj"))


def test_a_layer_that_peft_does_not_adapt_is_refused_in_its_words() -> None:
    network = families.build("mamba")
    with refused(ConfigError, "student.adapter.targets", "out_proj") as caught:
        attached(network)
    assert caught.value.exit_code == 2 and caught.value.where == "student.adapter.targets"
    assert attached(families.build("mamba"), targets=("in_proj", "x_proj")).num_trained > 0
