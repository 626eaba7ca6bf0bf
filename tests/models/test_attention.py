"""Heads that share keys: repeated for cards whose fast kernel does not take them as they are, with the same answers."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.models import student


@pytest.mark.parametrize(
    ("device", "capability", "repeats"),
    [("cpu", (0, 0), False), ("cuda:0", (7, 5), True), ("cuda:1", (8, 0), False), ("cuda:2", (6, 0), True)],
)
def test_heads_are_repeated_below_sm_80_of_the_chosen_card(
    device: str, capability: tuple[int, int], repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(where: torch.device) -> tuple[int, int]:
        assert where == torch.device(device)
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    assert student.needs_every_head(torch.device(device)) is repeats


def test_repeated_heads_give_the_same_answers_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config("llama", width=32, num_layers=2)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert student.attend_causally(model)
    ids = torch.arange(24).reshape(2, 12)
    seen: list[bool] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(bool(options.get("enable_gqa", False)))
        return plain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = []
    for repeats in (False, True):
        monkeypatch.setattr(student, "needs_every_head", lambda _device, repeats=repeats: repeats)
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().sum().backward()
        found.append((logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    assert seen == [True, True, False, False], "the kernel is given every head"
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
