"""Laws of outlines: no values, the same layers, and the same answers once they are filled."""

from __future__ import annotations

import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.config.schema import AdapterConfig
from stillroom.models.check import logits_of
from stillroom.models.lora import attach, fill, outline_of, store_base


def test_an_outline_has_no_values_and_filled_it_answers_as_the_network_did() -> None:
    """With tied embeddings, a base of codes, and an adapter that is no longer zero."""
    config = tiny.config("gpt2", num_layers=1)
    for family in (config, tiny.config("llama", num_layers=1)):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(family).eval()
        attach(network, AdapterConfig(rank=2), name="tiny", base_name="", seed=0)
        store_base(network, torch.int8 if family is not config else torch.float16, whole=False)
        for parameter in network.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
        outline = outline_of(network)
        assert all(parameter.is_meta for parameter in outline.parameters())
        assert [name for name, _ in outline.named_parameters()] == [name for name, _ in network.named_parameters()]
        fill(outline, {name: tensor.detach().clone() for name, tensor in network.named_parameters()})
        ids = torch.arange(12).view(2, 6)
        with torch.no_grad():
            assert torch.equal(logits_of(outline, ids), logits_of(network, ids))
        is_tied = network.get_input_embeddings().weight is network.get_output_embeddings().weight
        assert is_tied == (outline.get_input_embeddings().weight is outline.get_output_embeddings().weight)
        trained = [parameter.requires_grad for parameter in network.parameters()]
        assert trained == [parameter.requires_grad for parameter in outline.parameters()]
