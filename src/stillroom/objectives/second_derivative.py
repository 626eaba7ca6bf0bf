"""Raise on a second derivative of hand-written gradients, instead of silently returning 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stillroom.errors import ConfigError


class _NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        raise ConfigError(
            "the second derivative of this loss was asked for, and only the first is known",
            where="stillroom.objectives",
            advice=[
                "for gradient penalties and Hessians make the logits and use torch's own losses on them",
                "drop create_graph=True",
            ],
        )


def only_once(gradients: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients unchanged; under create_graph, differentiating them raises."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(
        None if gradient is None else _NoSecondDerivative.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]
        for gradient in gradients
    )
