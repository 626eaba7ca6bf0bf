"""The interface of a row kernel: it computes values of a chunk's rows and overwrites their logits with gradients.

Legend: C rows of a chunk, V vocabulary, K kept ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stillroom.objectives.divergences.base import Divergence
from stillroom.types import SampledSignal, TopKSignal


@dataclass(frozen=True)
class Logits:
    """A chunk's products hidden @ weight.T, and what the head does to them afterwards."""

    raw: Tensor  # [C, V], scratch: a kernel may leave the gradient with respect to `raw` here
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    clamp: float | None = None

    def rows(self, part: slice) -> Logits:
        return Logits(self.raw[part], self.bias, self.scale, self.softcap, self.clamp)


TeacherRows = Logits | TopKSignal | SampledSignal


@dataclass(frozen=True)
class RowRecord:
    """Inputs and outputs of a kernel for each row. All of length C.

    `kd_weights` and `ce_weights` multiply a row's values in the loss. A row whose teacher is no distribution is marked
    in `is_bad`, has a kd of 0, and its kd weight is added to its ce weight.
    """

    targets: Tensor
    temperatures: Tensor
    kd_weights: Tensor
    ce_weights: Tensor
    kd: Tensor  # out
    ce: Tensor  # out
    is_bad: Tensor  # out, bool
    clamped: Tensor | None = None  # out, how many of the student's logits were cut; only with a clamp
    corrected: Tensor | None = None  # out, 1 where the teacher was corrected towards the label; only with a margin

    def rows(self, part: slice) -> RowRecord:
        return RowRecord(
            self.targets[part],
            self.temperatures[part],
            self.kd_weights[part],
            self.ce_weights[part],
            self.kd[part],
            self.ce[part],
            self.is_bad[part],
            None if self.clamped is None else self.clamped[part],
            None if self.corrected is None else self.corrected[part],
        )


@dataclass(frozen=True)
class RowPlan:
    """What a pass over rows computes."""

    divergence: Divergence | None  # None: no kd term
    has_ce: bool
    is_unit_temperature: bool  # every row has T = 1, known without reading the device
    wants_student: bool  # gradients with respect to the student's logits
    wants_teacher: bool
    top_k: int = 0  # keep only so many of a dense teacher's tokens, and the mass of the rest
    rest_to_label: bool = False  # what a top-k teacher leaves over goes to the label
    label_margin: float | None = None  # by how much the label leads where a dense teacher's likeliest token is another


class RowKernel(Protocol):
    """Fills `rows.kd`, `rows.ce`, `rows.is_bad`; leaves gradients in `raw` of student (and teacher) if wanted."""

    @property
    def name(self) -> str: ...

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None: ...
