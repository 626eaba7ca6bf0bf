"""Choose the next token of each row from logits, on the CPU and in FP32.

Overflowing FP16 logits would end in a device assertion, and the random state of a run must not change: each row draws
from a generator of its own, so what a row gets does not depend on the rows beside it.

# B rows, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0: the likeliest token."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"nothing can be written at temperature {self.temperature:g}",
                where="--temperature",
                advice=["use a temperature of 0 (the likeliest token) or above"],
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"a share of {self.top_p:g} of the probability cannot be kept",
                where="--top-p",
                advice=["use a share above 0 and at most 1, where 1 keeps every token"],
            )

    def generators(self, num_rows: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(self.seed) for _ in range(num_rows)]


def choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """The next token of each row of logits [B, V]."""
    if sampling.temperature <= 0:
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        return chosen
    wide = logits.cpu().float()
    # The largest becomes 0: a tiny temperature would divide to infinity otherwise, and infinities differ by NaN.
    probs = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / sampling.temperature, dim=-1)
    if sampling.top_p < 1.0:
        probs = nucleus(probs, sampling.top_p)
    return [
        int(torch.multinomial(row, 1, generator=generator)) for row, generator in zip(probs, generators, strict=True)
    ]


def nucleus(probs: Tensor, share: float) -> Tensor:
    """Probabilities [B, V] without the tail: keep the fewest likeliest tokens that hold at least `share`.

    Not divided by what is kept: `multinomial` takes weights (Holtzman et al. 2020).
    """
    ordered, ids = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs).scatter(-1, ids, torch.where(before < share, ordered, 0.0))
