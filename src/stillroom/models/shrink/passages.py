"""Passages of text that rank a model's layers while it is cut: a few hundred tokens, the same every time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stillroom.types import IGNORED, Batch

_LONGEST = 128  # positions of a passage: many short passages rank layers better and sooner than few long ones
_LEAD = 32  # positions before the first scored one, as context


@dataclass(frozen=True)
class Passage:
    """One sequence without padding. `targets[l]` is the token that follows position l, or IGNORED."""

    ids: Tensor  # [1, L]
    targets: Tensor  # [L]

    @property
    def num_scored(self) -> int:
        return int((self.targets != IGNORED).sum())

    def losses(self, logits: Tensor) -> Tensor:
        """Cross-entropy of each scored position, in main memory. logits: [L, V] -> [N]"""
        targets = self.targets.to(logits.device)
        each = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return each[targets != IGNORED].double().cpu()


def passages(batches: Iterable[Batch], num_tokens: int, device: torch.device) -> list[Passage]:
    """Passages from rows spread over the batches, with `num_tokens` scored tokens in total.

    A row is cut to 128 positions, beginning shortly before its first scored one, so that several rows count. A row
    without a scored token is skipped.
    """
    rows = [row for batch in batches for row in zip(batch.input_ids, batch.attention_mask, batch.targets, strict=True)]
    stride = max(1, len(rows) // -(-num_tokens // _LONGEST))
    texts: list[Passage] = []
    for number in [number for start in range(stride) for number in range(start, len(rows), stride)]:
        ids, mask, targets = rows[number]
        scored = (targets[: int(mask.sum())] != IGNORED).nonzero().squeeze(-1)
        if num_tokens <= 0 or not scored.numel():
            continue
        begin = max(0, int(scored[0]) - _LEAD)
        in_reach = scored[scored < begin + _LONGEST][:num_tokens]
        end = int(in_reach[-1]) + 1
        texts.append(Passage(ids[begin:end].unsqueeze(0).to(device), targets[begin:end].to(device)))
        num_tokens -= int(in_reach.numel())
    return texts


def num_scored(texts: Sequence[Passage]) -> int:
    return sum(text.num_scored for text in texts)


def num_positions(texts: Sequence[Passage]) -> int:
    return sum(text.ids.shape[1] for text in texts)


@torch.no_grad()
def mean_loss(model: Any, texts: Sequence[Passage]) -> float:
    """Mean cross-entropy of a model over the passages; infinity if it is not finite."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    for text in texts:
        logits = model(input_ids=text.ids.to(device), use_cache=False).logits[0].float()
        total += float(text.losses(logits).sum())
    model.train(was_training)
    return finite(total / num_scored(texts))


def finite(loss: float) -> float:
    """The loss, or infinity if it is not finite, so that losses can be compared."""
    return loss if math.isfinite(loss) else math.inf
