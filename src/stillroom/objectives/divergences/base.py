"""What a divergence is: maths on rows of log-probabilities.

Legend: ... rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stillroom.numerics import Softmax


@dataclass(frozen=True)
class Slopes:
    """A divergence at some rows: its value, dD/dlog q and, where asked for, dD/dlog p.

    A multiple of q in the student's slope (of p in the teacher's) may be added or left out: the softmax removes it.
    """

    value: Tensor  # [...]
    student: Tensor  # [..., V]
    teacher: Tensor | None  # [..., V]
    is_pulled: bool = False  # the student's slope sums to 0, so it is the gradient of its logits as it stands


class Divergence(Protocol):
    """A distance between teacher and student rows.

    `evaluate` may overwrite the `scores` it is given (each temporary of a vocabulary counts), never the `probs`.
    """

    @property
    def name(self) -> str: ...

    def evaluate(self, student: Softmax, teacher: Softmax, *, wants_teacher: bool) -> Slopes: ...
