"""The interface of a divergence between rows of probabilities.

Legend: ... rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stillroom.numerics import Softmax


@dataclass(frozen=True)
class Slopes:
    """The value of a divergence for each row, dD/dlog q and, if wanted, dD/dlog p.

    A multiple of q may be added to the student's slope (of p to the teacher's): the softmax removes it.
    """

    value: Tensor  # [...]
    student: Tensor  # [..., V]
    teacher: Tensor | None  # [..., V]
    is_pulled: bool = False  # the student's slope sums to 0, so it is the gradient of the logits


class Divergence(Protocol):
    """A distance between teacher and student rows.

    `evaluate` may overwrite the `scores` it is given, to save memory, but not the `probs`.
    """

    @property
    def name(self) -> str: ...

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes: ...
