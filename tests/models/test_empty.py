"""A network without weights: nothing is allocated for them, and what no file holds is computed."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from stillroom.models.gguf import empty_network


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_weights_that_are_put_in_make_it_the_whole_network(family: str) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(tiny.config(family)).eval()
    state = torch.random.get_rng_state()
    network = empty_network(tiny.config(family), torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state), "nothing is drawn"
    assert all(weight.is_meta for weight in network.parameters()), "no weight takes memory"
    assert not any(buffer.is_meta for buffer in network.buffers())
    network.load_state_dict(whole.state_dict(), assign=True)
    network.tie_weights()
    ids = torch.randint(2, tiny.VOCAB, (2, 9))
    with torch.no_grad():
        assert torch.equal(network(ids).logits, whole(ids).logits)
    assert not nn.Linear(2, 2).weight.is_meta, "modules are made as ever afterwards"
