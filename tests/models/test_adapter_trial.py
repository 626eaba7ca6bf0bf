"""An adapter is tried before it is trained: it is reached, and merged it would answer alike."""

from __future__ import annotations

from typing import Any

import families
import pytest
import tiny
import torch
from refusals import refused
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import ConfigError
from stillroom.models.lora import Adapter, attach, try_adapter


def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny.config("llama", width=32))


def attached(network: Any, **settings: Any) -> Adapter:
    return attach(network, AdapterConfig(rank=2, **settings), name="student", base_name="base", seed=1)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_trial_leaves_nothing_behind(kind: str) -> None:
    adapter = attached(model(), kind=kind, dropout=0.3)
    network = adapter.network.train()
    before = {name: (part, part.detach().clone()) for name, part in network.named_parameters()}
    state = torch.get_rng_state()
    assert try_adapter(adapter, "student") == []
    assert network.training and torch.equal(torch.get_rng_state(), state)
    for name, part in network.named_parameters():
        assert part is before[name][0] and torch.equal(part, before[name][1]) and part.grad is None, name


def use_the_weight(network: Any, *places: int) -> None:
    """Let `up_proj` of these blocks be read and not called, as some networks do for speed."""
    for place in places:
        mlp = network.model.layers[place].mlp

        def forward(inputs: Tensor, mlp: Any = mlp) -> Tensor:
            up = torch.nn.functional.linear(inputs, mlp.up_proj.weight)
            answer: Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(inputs)) * up)
            return answer

        mlp.forward = forward


def test_layers_that_the_network_does_not_call_are_refused_by_name() -> None:
    network = model()
    use_the_weight(network, 0, 1)
    with refused(ConfigError, "student.adapter.targets", "model.layers.0.mlp.up_proj") as caught:
        try_adapter(attached(network, targets=("up_proj",)), "student")
    assert caught.value.exit_code == 2
    network = model()
    use_the_weight(network, 1)
    with refused(ConfigError, "student.adapter.targets", "model.layers.1.mlp.up_proj"):
        try_adapter(attached(network), "student")


def test_experts_that_no_token_reaches_and_layers_for_an_absent_encoder_are_named() -> None:
    notes = try_adapter(attached(families.build("bart")), "student")
    assert len(notes) == 1 and "encoder_attn" in notes[0]


def test_a_network_that_reads_some_weights_itself_is_refused_before_it_is_trained() -> None:
    """Jamba reads the weight of `dt_proj`: merged, its adapter would count, and trained it does not."""
    with refused(ConfigError, "student.adapter.targets", "dt_proj") as caught:
        try_adapter(attached(families.build("jamba")), "student")
    assert caught.value.exit_code == 2 and caught.value.where == "student.adapter.targets"
    assert try_adapter(attached(families.build("jamba"), targets=("in_proj", "x_proj")), "student") == []
