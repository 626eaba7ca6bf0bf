"""The description of a head, and the check of it in whatever dtype a model was loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from stillroom.core.types import HeadWeights
from stillroom.models.anatomy import anatomy_of, head_error, head_logits, head_of, hidden_matrices

IDS = torch.arange(12).unsqueeze(0)


def model_of(family: str = "llama") -> torch.nn.Module:
    torch.manual_seed(0)
    config = (
        MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1) if family == "mamba" else tiny.config(family)
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


@torch.no_grad()
def with_logits_around(mean: float) -> torch.nn.Module:
    """A model whose logits at IDS are all shifted: of a size at which half numbers lie far apart."""
    model = model_of()
    hidden = model.base_model(IDS).last_hidden_state[0]  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight.add_(mean * (torch.linalg.pinv(hidden) @ torch.ones(len(hidden))))
    assert abs(float(model(IDS).logits.mean()) - mean) < 1.0
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_is_described_whatever_dtype_it_was_loaded_in(dtype: torch.dtype) -> None:
    model = with_logits_around(-300.0).to(dtype)
    with torch.no_grad():
        own = model(IDS).logits.float()
        described = head_logits(head_of(model), model.base_model(IDS).last_hidden_state)  # type: ignore[operator]
    assert (own - described).abs().max() / own.std() > 0.05, "by its own rounded logits it would be refused"
    assert head_error(model, IDS) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_a_wrong_description_is_noticed_in_every_dtype(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family).to(dtype)
    assert head_error(model, IDS) < 1e-3
    monkeypatch.setattr("stillroom.models.anatomy.head_of", lambda model: HeadWeights(model.lm_head.weight))
    assert head_error(model, IDS) > 0.1


def test_the_check_leaves_the_head_as_it_was() -> None:
    model = model_of().half()
    head = model.get_output_embeddings()  # type: ignore[operator]
    before = dict(vars(head))
    head_error(model, IDS)
    assert vars(head) == before
    assert model(IDS).logits.dtype == torch.float16


def test_products_have_half_operands_under_autocast_alone() -> None:
    model = model_of()
    assert head_of(model).product_dtype is None
    with torch.autocast("cpu", torch.bfloat16):
        assert head_of(model).product_dtype == torch.bfloat16
        assert head_of(model.half()).product_dtype is None, "half already"


def test_weights_that_are_packed_count_as_many_as_they_are() -> None:
    """bitsandbytes stores two weights of four bits in a byte."""
    model = AutoModelForCausalLM.from_config(tiny.config("llama", num_layers=1))
    whole, layer = anatomy_of(model).num_parameters, model.model.layers[0].mlp.up_proj
    shape = layer.weight.shape
    layer.weight = torch.nn.Parameter(torch.zeros(shape.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    layer.weight.quant_state = SimpleNamespace(shape=shape)
    assert anatomy_of(model).num_parameters == whole


NOT_HIDDEN = {  # the modules of matrices that Muon does not update
    "llama": {"embed_tokens", "lm_head"},
    "gpt2": {"wte", "wpe"},
    "mixtral": {"embed_tokens", "lm_head", "gate"},
    "gpt_oss": {"embed_tokens", "lm_head", "router", "experts"},  # a bias for each expert
    "dbrx": {"wte", "lm_head", "layer", "mlp"},  # the gate, and all experts in one matrix
    "mamba": {"embeddings", "mixer", "conv1d", "dt_proj"},  # rates of the state, filters, a column
}


@pytest.mark.parametrize("family", NOT_HIDDEN)
def test_hidden_matrices_are_those_that_multiply_features(family: str) -> None:
    model = model_of(family)
    found = hidden_matrices(model)
    left = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2 and name not in found}
    assert {name.split(".")[-2] for name in left} == NOT_HIDDEN[family]
    assert any("experts" in name for name in found) == (family in ("mixtral", "gpt_oss"))
    assert all(min(parameter.shape[-2:]) > 1 for parameter in found.values())


def test_what_is_frozen_is_no_hidden_matrix() -> None:
    assert not hidden_matrices(model_of().requires_grad_(False))
