"""Laws of gates: which modules they are, what can be read and changed there, and what stays untouched."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.models.routers import Gate, Routing, describe, find_gates, has_gates, routed

# family: (the gates' weights with * for the layer, how many)
EXPECTED = {
    "mixtral": ("model.layers.*.mlp.gate.weight", 2),
    "qwen2_moe": ("model.layers.*.mlp.gate.weight", 2),
    "qwen3_moe": ("model.layers.*.mlp.gate.weight", 2),
    "olmoe": ("model.layers.*.mlp.gate.weight", 2),
    "granitemoe": ("model.layers.*.block_sparse_moe.router.weight", 2),
    "deepseek_v2": ("model.layers.*.mlp.gate.weight", 1),
    "deepseek_v3": ("model.layers.*.mlp.gate.weight", 1),
    "gpt_oss": ("model.layers.*.mlp.router.weight", 2),
    "phimoe": ("model.layers.*.mlp.router.weight", 2),
    "glm4_moe": ("model.layers.*.mlp.gate.weight", 1),
    "minimax_m2": ("model.layers.*.mlp.gate.weight", 2),
    "hunyuan": ("model.layers.*.mlp.gate.wg.weight", 2),
    "ernie": ("model.layers.*.mlp.gate.weight", 1),
    "llama4": ("model.layers.*.feed_forward.router.weight", 2),
    "dbrx": ("transformer.blocks.*.ffn.router.layer.weight", 2),
}
FAMILIES = list(EXPECTED)
SIGMOID = {"deepseek_v3", "glm4_moe", "minimax_m2", "llama4"}
CHOOSES_ELSEWHERE = {"phimoe", "dbrx"}
IDS = torch.arange(3, 27).view(2, 12)


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config(family)).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():  # away from zero gates and biases, so that each part shows
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def stand_ins(model: Any, gates: list[Gate]) -> dict[str, torch.nn.Parameter]:
    own = dict(model.named_parameters())
    names = [name for gate in gates for name in gate.parameter_names()]
    return {name: torch.nn.Parameter(own[name].detach().float().clone()) for name in names}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gates_are_found_and_nothing_else(family: str) -> None:
    gates = find_gates(model_of(family))
    pattern, count = EXPECTED[family]
    assert len(gates) == count
    for gate in gates:
        layer = next(part for part in gate.name.split(".") if part.isdigit())
        assert gate.weight == pattern.replace("*", layer)
        assert gate.num_experts == 4 and gate.num_chosen == (1 if family == "llama4" else 2)
        assert (gate.bias is not None) == (family == "gpt_oss"), "a correction bias is not trained"
    assert str(count) in describe(gates) and "of 4 experts" in describe(gates)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_dense_model_has_no_gate_and_the_error_says_what_was_looked_for(family: str) -> None:
    model = model_of(family)
    with refused(BrokenAtStart, "teacher.model", type(model).__name__) as caught:
        find_gates(model)
    assert "teacher.router.mode=frozen" in caught.value.advice[0]


@pytest.mark.parametrize(("family", "has"), [("mixtral", True), ("gpt_oss", True), ("llama", False)])
def test_gates_are_seen_in_shapes_without_weights(family: str, has: bool) -> None:
    with FakeTensorMode():
        assert has_gates(AutoModelForCausalLM.from_config(tiny.config(family))) == has


def test_patterns_name_gates_by_hand() -> None:
    model = model_of("mixtral")
    assert [gate.name for gate in find_gates(model, ["model.layers.1.*.gate"])] == ["model.layers.1.mlp.gate"]
    with refused(BrokenAtStart, "teacher.model", "nothing_like_it"):
        find_gates(model, ["nothing_like_it"])
    with refused(ConfigError, "teacher.router.patterns"):
        find_gates(model, ["model.layers.0.self_attn"])


@pytest.mark.parametrize("family", FAMILIES)
def test_looking_changes_nothing_and_leaves_nothing(family: str) -> None:
    model = model_of(family)
    gates = find_gates(model)
    plain = model(IDS).logits
    with routed(gates, Routing()) as routing:
        watched = model(IDS).logits
    assert torch.equal(plain, watched)
    assert all("forward" not in vars(gate.module) for gate in gates)
    assert set(routing.seen) == {gate.name for gate in gates}
    for gate in gates:
        seen = routing.seen[gate.name]
        assert seen.logits.shape == (24, 4) and seen.logits.dtype == torch.float32
        assert seen.chosen.shape == (24, gate.num_chosen)
        assert seen.is_sigmoid == (family in SIGMOID)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_weights_in_fp32_give_the_same_teacher(family: str) -> None:
    model = model_of(family)
    gates = find_gates(model)
    with routed(gates, Routing(weights=stand_ins(model, gates))):
        overlaid = model(IDS).logits
    assert torch.allclose(overlaid, model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_reaches_exactly_the_gates(family: str) -> None:
    model = model_of(family)
    gates = find_gates(model)
    weights = stand_ins(model, gates)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with routed(gates, Routing(weights=weights)):
        loss = torch.log_softmax(model(IDS).logits.float(), -1)[..., 7].sum()
        loss.backward()
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CHOOSES_ELSEWHERE])
def test_all_experts_answer_when_asked_for(family: str) -> None:
    model = model_of(family)
    gates = find_gates(model)
    with routed(gates, Routing(num_chosen=lambda experts: experts)) as routing:
        forced = model(IDS).logits
    assert all(seen.chosen.shape[1] == 4 for seen in routing.seen.values())
    assert torch.isfinite(forced).all() and not torch.equal(forced, model(IDS).logits)
    assert all(getattr(gate.module, "top_k", gate.num_chosen) == gate.num_chosen for gate in gates), "put back"


@pytest.mark.parametrize("family", sorted(CHOOSES_ELSEWHERE))
def test_a_choice_that_cannot_be_changed_is_refused_in_words(family: str) -> None:
    model = model_of(family)
    with (
        refused(ConfigError, "teacher.router.mode", type(find_gates(model)[0].module).__name__),
        routed(find_gates(model), Routing(num_chosen=lambda experts: experts)),
    ):
        model(IDS)


def test_sampled_experts_are_distinct_and_depend_on_the_seed_alone() -> None:
    model = model_of("mixtral")
    gates = find_gates(model)

    def draw(seed: int, share: float) -> torch.Tensor:
        with routed(gates, Routing(num_chosen=lambda experts: experts - 1, sampled_share=share, seed=seed)) as routing:
            model(IDS)
        return routing.seen[gates[0].name].chosen.sort(dim=1).values

    assert torch.equal(draw(1, 1.0), draw(1, 1.0))
    assert not torch.equal(draw(1, 1.0), draw(2, 1.0))
    assert (draw(1, 1.0).diff(dim=1) > 0).all(), "without replacement"
    best = draw(1, 0.0)
    part = (draw(1, 0.3) != best).any(dim=1).float().mean()
    assert 0.0 < part < 0.6, "the other tokens keep their best experts"


def test_fp16_gates_are_computed_in_fp32() -> None:
    model = model_of("qwen3_moe").half()
    gates = find_gates(model)
    with routed(gates, Routing(weights=stand_ins(model, gates))) as routing:
        logits = model(IDS).logits
    assert logits.dtype == torch.float16 and torch.isfinite(logits).all()
    assert all(seen.logits.dtype == torch.float32 for seen in routing.seen.values())
