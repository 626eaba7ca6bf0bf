"""Optional clamps on logits and loss, as older guides recommend. Off by default, because both do harm.

A clamp of +-c on the logits bounds the largest probability over V tokens by 1 / (1 + (V - 1) e^-2c), so every token's
cross-entropy has a floor. A clamp on the loss makes its gradient zero above the bound. Raise if the floor is above the
bound: every gradient would be zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.types import DenseSignal, PairedSignal, Signal, StudentView


def perplexity_floor(logit_clamp: float, vocab_size: int) -> float:
    """The lowest perplexity that logits within +-logit_clamp can express over a vocabulary."""
    return 1.0 + (vocab_size - 1) * math.exp(-2.0 * logit_clamp)


@dataclass(frozen=True)
class Clamps:
    """Bounds on logits and loss; 0 means none."""

    logits: float = 0.0
    loss: float = 0.0

    def check(self, vocab_size: int) -> list[str]:
        """Notes for the log. Raise if every gradient would be zero."""
        notes = []
        if self.logits:
            floor = perplexity_floor(self.logits, vocab_size)
            if self.loss and math.log(floor) >= self.loss:
                raise ConfigError(
                    f"logits within +-{self.logits:g} cannot bring the loss of {vocab_size:,} tokens below "
                    f"{math.log(floor):.3g}, and the loss is cut at {self.loss:g}: every gradient would be zero",
                    where="guard.logit_clamp, guard.loss_clamp",
                    advice=[
                        "--set guard.logit_clamp=0 --set guard.loss_clamp=0",
                        "FP16 does not need either: `presets`",
                    ],
                )
            notes.append(
                f"logits are clamped to +-{self.logits:g}: over {vocab_size:,} tokens no perplexity below "
                f"{floor:.4g} can be reached, and clamped logits have no gradient"
            )
        if self.loss:
            notes.append(f"the loss is clamped at {self.loss:g}: batches above it have no gradient")
        return notes

    def on_view(self, view: StudentView) -> StudentView:
        return replace(view, head=replace(view.head, clamp=self.logits)) if self.logits else view

    def on_signal(self, signal: Signal | None) -> Signal | None:
        if not self.logits or not isinstance(signal, DenseSignal | PairedSignal):
            return signal
        return replace(signal, head=replace(signal.head, clamp=self.logits))

    def on_loss(self, loss: Tensor, share: float) -> tuple[Tensor, Tensor | None]:
        """The clamped loss of a micro-batch that is `share` of its window, and whether it was cut (0 or 1)."""
        if not self.loss:
            return loss, None
        bound = self.loss * share
        return loss.clamp(max=bound), (loss.detach() > bound).float()
