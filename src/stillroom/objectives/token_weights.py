"""Weights and temperatures of positions in the kd term, from statistics of both models' distributions.

Everything is relative to the position's own sequence (median, mean, rank). A sequence is never split over
micro-batches, so eight micro-batches equal one; the published methods compare within the batch. Weights have mean 1 in
each sequence, so the counts that divide the loss are known before any forward.

Nothing here carries gradient.

Legend: N scored positions, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-6  # of a Hellinger distance: below it two rows are the same


@dataclass(frozen=True)
class Sequences:
    """The sequence of each scored position."""

    index: Tensor  # [N]
    count: int

    def size(self, like: Tensor) -> Tensor:
        """Scored positions of each sequence. [S]"""
        return torch.zeros(self.count, dtype=like.dtype, device=like.device).index_add_(
            0, self.index, torch.ones_like(like)
        )

    def mean(self, values: Tensor) -> Tensor:
        """[N]: each position gets the mean of its sequence."""
        sums = torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add_(0, self.index, values)
        return (sums / self.size(values).clamp_min(1.0))[self.index]

    def rank(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in ascending order within their sequences [N], and each position's rank there, from 0 [N]."""
        by_value = values.argsort(stable=True)
        order = by_value[self.index[by_value].argsort(stable=True)]
        size = self.size(values).long()
        start = size.cumsum(0) - size
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - start[self.index[order]]
        return order, rank

    def median(self, values: Tensor) -> Tensor:
        """[N]: each position gets the lower median of its sequence."""
        order, _ = self.rank(values)
        size = self.size(values).long()
        middle = size.cumsum(0) - size + (size - 1).clamp_min(0) // 2
        return values[order[middle.clamp_max(len(order) - 1)]][self.index]


def temperatures(hellinger: Tensor, sequences: Sequences, base: float, strength: float) -> Tensor:
    """T_i = base * exp(-strength * tanh(log(s_i / median s))): lower temperatures for harder positions.

    Inverse difficulty temperature scaling of AdaKD (Xie et al. 2026), who use strength 0.5. [N]
    """
    distance = hellinger.clamp_min(_LEAST)
    ratio = distance / sequences.median(distance)
    return base * torch.exp(-strength * torch.tanh(ratio.log()))


def entropy_weights(entropy: Tensor, sequences: Sequences) -> Tensor:
    """The student's entropy over its mean in the sequence: certain positions weigh little. [N]"""
    mean = sequences.mean(entropy)
    return torch.where(mean > 0, entropy / mean.clamp_min(torch.finfo(mean.dtype).tiny), torch.ones_like(mean))


def top_fraction(criterion: Tensor, sequences: Sequences, fraction: float) -> Tensor:
    """n / k on the k = ceil(fraction * n) positions of each sequence where the criterion is largest, else 0. [N]"""
    size = sequences.size(criterion)
    kept = torch.ceil(size * fraction - 1e-6).clamp_min(1.0)
    _, rank = sequences.rank(-criterion)
    is_kept = rank < kept[sequences.index]
    return torch.where(is_kept, (size / kept)[sequences.index], torch.zeros_like(criterion))
