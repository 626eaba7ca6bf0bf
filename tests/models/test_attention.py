"""Heads that share keys: repeated for cards whose fast kernel does not take them as they are, with the same answers."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("length", [64, 130, 257])
@pytest.mark.parametrize("sharpness", [1.0, 3.0])
def test_kept_probabilities_are_as_exact_as_the_fused_kernel(length: int, sharpness: float) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(2, 8, length, 64) * size for size in (sharpness, sharpness, 1.0, 1.0)]
    drawn[1], drawn[2] = drawn[1][:, ::2], drawn[2][:, ::2]  # keys and values that two heads share
    halves = [one.bfloat16() for one in drawn]

    def errors(attend: Callable[..., torch.Tensor]) -> list[float]:
        inputs = [one.detach().requires_grad_() for one in halves[:3]]
        answer = attend(*inputs)
        found = [answer.detach(), *torch.autograd.grad(answer, inputs, halves[3])]
        return [float((one.double() - right).norm() / right.norm()) for one, right in zip(found, exact, strict=True)]

    inputs = [one.double().requires_grad_() for one in halves[:3]]
    answer = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    exact = [answer.detach(), *torch.autograd.grad(answer, inputs, halves[3].double())]
    module = torch.nn.Module()
    own = errors(lambda *inputs: student._attend(module, *inputs, None)[0].transpose(1, 2))
    fused = errors(
        lambda *inputs: torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    )
    assert own != fused, "the kernel of short rows is used"
    for mine, theirs in zip(own, fused, strict=True):
        assert mine <= 1.5 * theirs + 1e-3


def test_short_rows_are_those_a_large_student_trains_in_bf16() -> None:
    states = torch.randn(1, 8, 64, 64, requires_grad=True)
    assert not student._is_short(states, states, 0.0), "FP32"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert student._is_short(states, states, 0.0)
        assert not student._is_short(states, states, 0.1), "dropout"
        assert not student._is_short(states.detach(), states, 0.0), "evaluation"
        assert not student._is_short(states, states[:, :, :32], 0.0), "keys of another length"
        assert not student._is_short(states[:, :4], states[:, :4], 0.0), "a small student"
        long = torch.empty(1, 8, 1024, 64, requires_grad=True)
        assert not student._is_short(long, long, 0.0), "probabilities would take more memory than all else"
