"""Laws of compiled layers: the answers and gradients of the plain ones, which are used where compiling fails."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from stillroom.models.anatomy import layers_of
from stillroom.models.compile import CompiledLayers


def wrong(graph: Any, _inputs: Any) -> Any:
    return lambda *args: tuple(one * 1.5 if one.is_floating_point() else one for one in graph(*args))


def fails(_graph: Any, _inputs: Any) -> Any:
    raise RuntimeError("no compiler here\nand more")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("eager", "compile: student, layer by layer, 2 rows of 64"),
        (wrong, "compile: the layers of the student run as they are: a compiled one differs by"),
        (fails, "compile: the layers of the student run as they are"),
    ],
)
def test_layers_answer_as_the_plain_ones_and_the_log_says_which_ran(backend: Any, said: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config("llama", num_layers=2))
    ids, notes = torch.randint(0, 64, (2, 33)), list[str]()
    plain = model.model(input_ids=ids, use_cache=False).last_hidden_state
    plain.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    layers = CompiledLayers(model, layers_of(model), "student", notes.append, backend=backend)
    for _ in range(2):
        answer = layers(ids)
        torch.testing.assert_close(answer, plain, rtol=1e-5, atol=1e-6)
    answer.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert len(notes) == 1 and notes[0].startswith(said)
    again = model.model(input_ids=ids, use_cache=False).last_hidden_state  # outside of the call, layers are plain
    torch.testing.assert_close(again, plain, rtol=0, atol=0)
