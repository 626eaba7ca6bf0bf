"""Muon: matrices follow their orthogonalised momentum (Jordan et al. 2024).

One buffer instead of two moments. The update of a matrix is scaled so that its root mean square is about AdamW's (Liu
et al. 2025): the same learning rate and weight decay serve both. All of it is FP32, like the rest of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero; singular values end between 0.7 and 1.2
_ITERATIONS = 5
_LEAST_NORM = 1e-7  # of a momentum: a smaller one is noise and not enlarged further
_LARGEST_VALUE = 1.21  # singular value that five iterations give
_RMS = 0.2  # of an update, in learning rates


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with all singular values near one: the quintic Newton-Schulz iteration."""
    is_tall = matrices.size(-2) > matrices.size(-1)
    found = matrices.mT if is_tall else matrices
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp_min(_LEAST_NORM)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        gram = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        found = torch.baddbmm(found, gram, found, beta=linear)
    return found.mT if is_tall else found


def scale_of(shape: Sequence[int]) -> float:
    """What brings an orthogonal matrix to AdamW's size: one of r x c has a root mean square of 1 / sqrt(max(r, c))."""
    return _RMS * math.sqrt(max(shape[-2:]))


def longest_step(shape: Sequence[int]) -> float:
    """The largest change of a weight in one update, in learning rates: no entry exceeds the largest singular value."""
    return _LARGEST_VALUE * scale_of(shape)


def muon_update(
    weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], *, rate: float, decay: float, momentum: float
) -> None:
    """Update weights and buffers in place, with Nesterov's momentum. Experts in one tensor are matrices each."""
    torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
    torch._foreach_mul_(weights, 1.0 - rate * decay)
    for shape in dict.fromkeys(weight.shape for weight in weights):
        alike = [place for place, weight in enumerate(weights) if weight.shape == shape]
        ahead = torch.stack([buffers[place] for place in alike])
        ahead.lerp_(torch.stack([gradients[place] for place in alike]), 1.0 - momentum)
        moved = orthogonalised(ahead.view(-1, *shape[-2:])).reshape(ahead.shape)
        torch._foreach_add_([weights[place] for place in alike], list(moved.unbind()), alpha=-rate * scale_of(shape))
