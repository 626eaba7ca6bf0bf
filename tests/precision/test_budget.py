"""What a parameter takes, by part: what is counted is what is held."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.precision import AdamW, ParameterGroup, bytes_per_parameter, resolve
from stillroom.precision.policy import POLICIES

SIZE = 64 * 64


def trained(mode: str, moments: str, accumulation: int) -> tuple[nn.Parameter, AdamW]:
    """A matrix with a gradient from two backward passes."""
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    matrix = nn.Parameter(torch.ones(64, 64))
    train = TrainConfig(gradient_accumulation_steps=accumulation)
    optimizer = precision.optimizer([ParameterGroup("student", 1e-3, (("matrix", matrix),))], train)
    for _ in range(2):
        (matrix.float() * matrix.float()).sum().backward()
    return matrix, optimizer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_the_bytes_of_a_parameter_are_those_of_its_tensors(mode: str, moments: str, accumulation: int) -> None:
    matrix, optimizer = trained(mode, moments, accumulation)
    told = bytes_per_parameter(mode, moments, accumulates=accumulation > 1)  # type: ignore[arg-type]
    kept = {name: tensor.element_size() for name, tensor in optimizer.tensors().items() if tensor.numel() == SIZE}
    (gradient,) = optimizer.gradients("student")
    assert told.weights == matrix.element_size() and told.gradients == gradient.element_size()
    assert told.moments == kept["matrix.first"] + kept["matrix.second"]
    assert told.extra == sum(size for name, size in kept.items() if name.endswith(("master", "residual")))
    assert told.snapshot == matrix.element_size() + sum(kept.values()), "a capture of weights and optimizer"
    assert told.casts == (2 if mode.endswith("mixed") else 0)
    assert told.in_main_memory(2) == 2 * told.snapshot + told.best


def test_on_a_card_nothing_is_counted_that_is_in_main_memory() -> None:
    assert [bytes_per_parameter(mode).on_device for mode in POLICIES] == [16, 18, 18, 16, 14, 12]
    assert bytes_per_parameter("fp16-sr", "bfloat16").on_device == 8
    assert bytes_per_parameter("fp16-sr", "int8").on_device == 6
    assert bytes_per_parameter("fp32", num_moments=1).on_device == 12, "Muon"
