"""Which layers get an adapter, and which names are refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from torch import nn
from transformers import AutoModelForCausalLM

from stillroom.core.errors import ConfigError
from stillroom.models.anatomy import layers_of
from stillroom.models.lora import choose_targets, is_linear

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model(family: str = "llama", *, is_tied: bool = False) -> Any:
    config = tiny.config(family, width=16)
    config.tie_word_embeddings = is_tied
    return AutoModelForCausalLM.from_config(config)


def refused(network: Any, *patterns: str) -> str:
    with pytest.raises(ConfigError) as caught:
        choose_targets(network, patterns)
    assert caught.value.exit_code == 2 and caught.value.where == "student.adapter.targets"
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_by_default_all_linear_layers_of_the_blocks_and_nothing_else(family: str, is_tied: bool) -> None:
    network = model(family, is_tied=is_tied)
    chosen = {id(network.get_submodule(name)) for name in choose_targets(network, ())}
    assert chosen == {id(part) for block in layers_of(network) for part in block.modules() if is_linear(part)}
    assert id(network.get_output_embeddings()) not in chosen


def test_a_layer_is_named_by_its_last_parts_or_by_a_pattern() -> None:
    network = model()
    assert len(choose_targets(network, ())) == 2 * len(LLAMA)
    assert choose_targets(network, ["q_proj", "mlp.down_proj"]) == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    )
    assert choose_targets(network, ["model.layers.1.self_attn.q_proj"]) == ("model.layers.1.self_attn.q_proj",)
    assert len(choose_targets(network, ["*.1.mlp.*"])) == 3
    assert choose_targets(network, ["lm_head"]) == ("lm_head",), "a head of its own may be adapted"


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_a_tied_head_is_refused_under_either_name(name: str) -> None:
    said = refused(model(is_tied=True), "q_proj", name)
    assert "tied" in said and "lm_head" in said and "embed_tokens" in said


@pytest.mark.parametrize("patterns", [("wq",), ("q_proj", "query"), ("*.7.*",), ("proj",), ("",)])
def test_a_name_that_matches_nothing_is_refused_with_the_names_there_are(patterns: tuple[str, ...]) -> None:
    said = refused(model(), *patterns)
    assert repr(patterns[-1]) in said and all(name in said for name in [*LLAMA, "lm_head"])


@pytest.mark.parametrize(("name", "kind"), [("embed_tokens", "Embedding"), ("norm", "LlamaRMSNorm")])
def test_what_is_no_linear_layer_is_refused_with_its_kind(name: str, kind: str) -> None:
    said = refused(model(), name)
    assert kind in said and "no linear layer" in said


def test_a_layer_that_two_blocks_share_is_refused() -> None:
    network = model()
    network.model.layers[1].mlp.up_proj = network.model.layers[0].mlp.up_proj
    assert "model.layers.1.mlp.up_proj" in refused(network, "up_proj")


def test_a_network_without_linear_layers_is_refused() -> None:
    network = model()
    for block in network.model.layers:
        for name, part in list(block.named_modules()):
            if is_linear(part):
                block.set_submodule(name, nn.Identity())
    assert "no linear layer" in refused(network)


@pytest.mark.parametrize("family", ["llama4", "phimoe"])
def test_a_router_that_is_a_linear_layer_by_its_class_alone_is_none(family: str) -> None:
    network = model(family)
    routers = [name for name, part in network.named_modules() if isinstance(part, nn.Linear) and "router" in name]
    assert routers and not set(routers) & set(choose_targets(network, ()))
    assert "no linear layer" in refused(network, routers[0])
