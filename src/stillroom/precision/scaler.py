"""The dynamic loss scale, as plain numbers.

FP16 gradients below 6e-8 are zero and above 65,504 infinite. Multiplying the loss by a power of two moves
them into the middle. The scale falls at once when something overflows and rises slowly when nothing does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LossScale:
    """State in, state out: `after_overflow` and `after_good_step` return the next state."""

    scale: float = 65536.0
    good_steps: int = 0
    growth_steps: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24

    def after_overflow(self) -> LossScale:
        return replace(self, scale=max(self.scale / 2, self.floor), good_steps=0)

    def after_good_step(self) -> LossScale:
        if self.good_steps + 1 < self.growth_steps:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * 2, self.ceiling), good_steps=0)

    @property
    def is_at_floor(self) -> bool:
        return self.scale <= self.floor
