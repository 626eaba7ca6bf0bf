"""Small random problems that trials compute, and derivatives by finite differences.

Legend: N positions, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stillroom.objectives import divergences
from stillroom.objectives.divergences.base import Divergence

# Settings that show a divergence at work; one that is not named here is taken with its defaults.
_SETTINGS: dict[str, list[dict[str, float]]] = {
    "jsd": [{"beta": 0.5}, {"beta": 0.05}, {"beta": 0.9}],
    "skew_forward_kl": [{"alpha": 0.1}],
    "skew_reverse_kl": [{"alpha": 0.1}, {"alpha": 0.95}],
    "alpha_beta": [{"alpha": 0.2, "beta": 0.7}],
    "taid": [{"interpolation": 0.4}],
}
_STEP = 1e-5  # of a central difference in float64: its error is of the order 1e-10


def members() -> list[tuple[str, Divergence]]:
    """Every divergence that can be had by name, with a name that says its settings."""
    found = []
    for name in divergences.names():
        for settings in _SETTINGS.get(name, [{}]):
            said = ", ".join(f"{key} {value:g}" for key, value in settings.items())
            found.append((f"{name} ({said})" if said else name, divergences.make(name, settings)))
    return found


def draw(seed: int, *shape: int, spread: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(spread).to(dtype)


def leaf(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of its own that takes a gradient."""
    return tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_()


def gradient(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The gradients of a loss, zero for a leaf that it does not depend on."""
    found: Any = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(one) if part is None else part for one, part in zip(leaves, found, strict=True)]


def slope_error(loss: Callable[[Tensor], Tensor], at: Tensor, seed: int = 11) -> float:
    """How far a loss's own gradient in a random direction is from its central difference, over the difference.

    In float64. `loss` must be smooth at the point.
    """
    point = leaf(at, torch.float64)
    (own,) = gradient(loss(point), point)
    direction = draw(seed, *at.shape, spread=1.0)
    direction = direction / direction.norm()
    with torch.no_grad():
        rise = loss(point + _STEP * direction) - loss(point - _STEP * direction)
    expected = float(rise) / (2 * _STEP)
    return abs(float((own * direction).sum()) - expected) / max(abs(expected), 1e-6)
