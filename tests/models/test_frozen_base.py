"""The weights under an adapter: their hash and their dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from refusals import refused
from torch import nn
from transformers import AutoModelForCausalLM

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.models.coded import CodedLinear, Nf4Linear, WidenedLinear, widened
from stillroom.models.lora import attach, store_base, weights_identity

IDS = torch.arange(3, 27).view(2, 12)


def model(**config: Any) -> Any:
    torch.manual_seed(0)
    settings = tiny.config("llama", width=32)
    settings.update(config)
    return AutoModelForCausalLM.from_config(settings).eval()


def adapted(kind: str = "lora") -> Any:
    """A network with an adapter that does something."""
    adapter = attach(model(), AdapterConfig(rank=4, kind=kind), name="student", base_name="", seed=1)
    generator = torch.Generator().manual_seed(2)
    for _name, layer in adapter.layers():
        layer.lora_B["default"].weight.data.normal_(0, 0.1, generator=generator)
    return adapter.network


def test_the_identity_is_of_every_bit_and_of_nothing_else() -> None:
    network = model()
    known = weights_identity(network)
    assert weights_identity(copy.deepcopy(network)) == known
    weight = network.model.layers[1].mlp.up_proj.weight.data
    weight.view(-1).view(torch.int32)[-1] ^= 1
    assert weights_identity(network) != known
    weight.view(-1).view(torch.int32)[-1] ^= 1
    assert weights_identity(network) == known
    network.model.norm.weight.data += 1e-6
    assert weights_identity(network) != known


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_base_multiplies_in_fp32_what_it_stores(dtype: torch.dtype) -> None:
    """Answers and gradients are those of an FP32 base of the same, rounded, numbers."""
    half, full = adapted(), adapted()
    num_stored = store_base(half, dtype, whole=False)
    for name, weight in half.named_parameters():
        full.get_parameter(name).data = weight.data.float()
    stored = {name for name, weight in half.named_parameters() if weight.dtype == dtype}
    assert num_stored == sum(half.get_parameter(name).numel() for name in stored) > 0
    assert stored == {f"{name}.weight" for name, part in half.named_modules() if isinstance(part, WidenedLinear)}
    assert all(name.endswith("base_layer.weight") for name in stored), "embeddings, norms and the head stay in FP32"
    answers = [network(IDS).logits for network in (half, full)]
    assert answers[0].dtype == torch.float32 and torch.equal(*answers)
    for answer in answers:
        answer.square().mean().backward()
    for name, weight in half.named_parameters():
        if weight.requires_grad:
            assert weight.dtype == torch.float32
            assert torch.allclose(weight.grad, full.get_parameter(name).grad, rtol=1e-6, atol=1e-9), name


def test_an_nf4_base_multiplies_the_numbers_that_bitsandbytes_gives() -> None:
    """Answers and gradients are those of an FP32 base of the same numbers, in 4.5 bits a weight."""
    library = pytest.importorskip("bitsandbytes.functional")
    coded, full = adapted(), adapted()
    num_stored = store_base(coded, "nf4", whole=False)
    layers = {name: part for name, part in coded.named_modules() if isinstance(part, Nf4Linear)}
    assert sum(part.weight.numel() for part in layers.values()) == num_stored * 4.5 / 8
    for name in layers:
        weight = full.get_submodule(name).weight
        weight.data = library.dequantize_4bit(*library.quantize_4bit(weight.data, blocksize=64, quant_type="nf4"))
    answers = [network(IDS).logits for network in (coded, full)]
    assert torch.equal(*answers)
    for answer in answers:
        answer.square().mean().backward()
    trained = [name for name, weight in coded.named_parameters() if weight.requires_grad]
    assert trained and all(torch.equal(coded.get_parameter(n).grad, full.get_parameter(n).grad) for n in trained)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_a_half_base_gives_the_bits_of_an_fp32_base(dtype: torch.dtype) -> None:
    half, full = adapted(), adapted()
    store_base(half, dtype, whole=False)
    with torch.autocast("cpu", dtype=dtype):
        answers = [network(IDS).logits for network in (half, full)]
    assert torch.equal(*answers)


def test_the_widened_product_has_the_gradient_of_float64() -> None:
    torch.manual_seed(3)
    narrow = nn.Linear(24, 40)
    narrow.requires_grad_(False)
    narrow.weight.data = narrow.weight.data.half()
    layer = WidenedLinear(narrow)
    inputs = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (inputs,))
    exact = torch.nn.functional.linear(inputs, narrow.weight.double(), narrow.bias.double())
    assert torch.allclose(layer(inputs), exact)
    assert not layer.weight.requires_grad and layer.weight.dtype == torch.float16


def test_a_whole_half_base_computes_in_fp16_and_leaves_the_adapter_in_fp32() -> None:
    network = adapted()
    num_stored = store_base(network, torch.float16, whole=True)
    dtypes = {weight.requires_grad: weight.dtype for weight in network.parameters()}
    assert dtypes == {True: torch.float32, False: torch.float16}
    assert num_stored == sum(weight.numel() for weight in network.parameters() if not weight.requires_grad)
    answer = network(IDS).logits
    assert answer.dtype == torch.float16
    exact = adapted()(IDS).logits.detach()
    assert float((answer.detach().float() - exact).abs().max()) < 1e-2 * float(exact.abs().max())
    answer.float().square().mean().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in network.parameters() if weight.requires_grad)


def test_a_tied_head_stays_one_tensor() -> None:
    adapter = attach(model(tie_word_embeddings=True), AdapterConfig(rank=2), name="student", base_name="", seed=1)
    store_base(adapter.network, torch.float16, whole=False)
    assert adapter.network.lm_head.weight is adapter.network.model.embed_tokens.weight
    assert adapter.network.lm_head.weight.dtype == torch.float32
    assert type(adapter.network.lm_head) is nn.Linear


@pytest.mark.parametrize("whole", [True, False])
def test_a_weight_beyond_the_range_of_fp16_is_refused_by_name(whole: bool) -> None:
    network = adapted()
    network.model.layers[1].mlp.up_proj.base_layer.weight.data[0, 0] = 7e4
    with refused(BrokenAtStart, "student.adapter.base_dtype", "model.layers.1.mlp.up_proj", "7e+04"):
        store_base(network, torch.float16, whole=whole)
    assert store_base(network, torch.bfloat16, whole=whole) > 0


# -- eight bits ------------------------------------------------------------------------------------------


def coded() -> tuple[Any, Any]:
    """A network over an int8 base, and one over an FP32 base of the numbers that the codes stand for."""
    small, full = adapted(), adapted()
    assert store_base(small, torch.int8, whole=False) > 0
    for name, part in small.named_modules():
        if isinstance(part, CodedLinear):
            full.get_submodule(name).weight.data = part.widened().weight.data
    return small, full


def test_codes_are_within_half_a_step_of_the_weights_and_take_a_byte() -> None:
    small, before = adapted(), adapted()
    num_stored = store_base(small, torch.int8, whole=False)
    layers = {name: part for name, part in small.named_modules() if isinstance(part, CodedLinear)}
    assert len(layers) == 2 * 7 and num_stored == sum(part.weight.numel() for part in layers.values())
    for name, part in layers.items():
        assert part.weight.dtype == torch.int8 and part.weight.element_size() == 1
        weight = before.get_submodule(name).weight
        assert bool(((part.widened().weight - weight).abs() <= 0.5001 * part.scales).all()), name
        assert bool((part.weight.abs().amax(1) == 127).all()), "the largest of each row is exact"
    assert {weight.dtype for weight in small.parameters() if weight.requires_grad} == {torch.float32}
    assert not any("scales" in name for name in small.state_dict()), "they are made again at every start"


def test_an_int8_base_has_the_answers_and_gradients_of_the_numbers_it_stands_for() -> None:
    small, full = coded()
    answers = [network(IDS).logits for network in (small, full)]
    assert answers[0].dtype == torch.float32 and torch.equal(*answers)
    for answer in answers:
        answer.square().mean().backward()
    for name, weight in small.named_parameters():
        if weight.requires_grad:
            assert torch.allclose(weight.grad, full.get_parameter(name).grad, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_an_int8_base_multiplies_in_its_dtype(dtype: torch.dtype) -> None:
    small, full = coded()
    with torch.autocast("cpu", dtype=dtype):
        answers = [network(IDS).logits for network in (small, full)]
    assert torch.equal(*answers)
    answers[0].float().square().mean().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in small.parameters() if weight.requires_grad)


def test_the_coded_product_has_the_gradient_of_float64() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(24, 40).requires_grad_(False)
    plain.weight.data[7] = 0.0  # a row of zeros has no scale of its own
    layer = CodedLinear(plain)
    inputs = torch.randn(5, 24, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (inputs,))
    stands_for = layer.widened().weight
    assert torch.allclose(layer(inputs), nn.functional.linear(inputs, stands_for.double(), plain.bias.double()))
    assert bool((stands_for[7] == 0).all())


def test_layers_of_codes_are_plain_ones_only_for_a_while() -> None:
    small, full = coded()
    with widened(small):
        assert not any(isinstance(part, CodedLinear) for part in small.modules())
        assert torch.equal(small(IDS).logits, full(IDS).logits)
    assert sum(isinstance(part, CodedLinear) for part in small.modules()) == 2 * 7


def test_a_network_without_linear_layers_has_no_int8_base() -> None:
    network = AutoModelForCausalLM.from_config(tiny.config("gpt2")).requires_grad_(False)
    with refused(BrokenAtStart, "student.adapter.base_dtype", "GPT2LMHeadModel", "int8"):
        store_base(network, torch.int8, whole=False)
