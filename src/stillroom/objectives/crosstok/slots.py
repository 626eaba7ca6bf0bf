"""The spans of a batch as slots: one for each position of the student's rows, as no row has more spans than that.

So sums over spans have a shape that is known without asking the device, and both sides find a span under one number.

Legend: B rows, L positions of the student's rows, N and M scored positions of student and teacher, S = B * L slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.types import Batch


@dataclass(frozen=True)
class SpanSlots:
    """The slot of each scored position of both sides; positions in no span have the slot S."""

    num_slots: int
    student: Tensor  # [N]
    teacher: Tensor  # [M]
    is_exact: Tensor  # [S], bool

    @staticmethod
    def of(batch: Batch) -> SpanSlots:
        other = batch.other
        if other is None or batch.spans is None or other.spans is None or batch.is_exact is None:
            raise ConfigError(
                "a batch without the teacher's rows has no spans to compare",
                where="objectives",
                advice=["open the data with both tokenizers", "use objectives.kd for models with one tokenizer"],
            )
        num_slots = batch.input_ids.numel()
        width = batch.input_ids.shape[1]
        student, teacher = (_slots(one, width, num_slots) for one in (batch, other))
        exact = batch.is_exact.reshape(-1).index_select(0, batch.positions)
        flags = torch.zeros(num_slots + 1, dtype=torch.long, device=student.device)
        flags = flags.index_add(0, student, exact.long())[:-1]
        return SpanSlots(num_slots, student, teacher, flags > 0)

    def sum_student(self, values: Tensor) -> Tensor:
        """The sum of values [N, ...] over each span. [S, ...]"""
        return self._sum(self.student, values)

    def sum_teacher(self, values: Tensor) -> Tensor:
        return self._sum(self.teacher, values)

    def _sum(self, slots: Tensor, values: Tensor) -> Tensor:
        room = torch.zeros(self.num_slots + 1, *values.shape[1:], dtype=values.dtype, device=values.device)
        return room.index_add(0, slots, values)[:-1]

    @property
    def is_span(self) -> Tensor:
        """[S]"""
        return self.sum_student(torch.ones_like(self.student)) > 0

    def first_positions(self, is_wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """For each (wanted) span, in order, the scored position of student and teacher that its first token is at."""
        found = []
        for slots in (self.student, self.teacher):
            is_first = slots != torch.cat([slots.new_full((1,), -1), slots[:-1]])
            is_first &= slots < self.num_slots
            if is_wanted is not None:
                is_first &= torch.cat([is_wanted, is_wanted.new_zeros(1)]).index_select(0, slots)
            found.append(is_first.nonzero().squeeze(-1))
        return found[0], found[1]


def num_spans(batches: Iterable[Batch]) -> int:
    """Spans of several batches: a span is a run of positions with one number."""
    return sum(int((_is_first(batch)).sum()) for batch in batches if batch.spans is not None)


def num_exact(batches: Iterable[Batch]) -> int:
    return sum(int((_scored(batch) & batch.is_exact).sum()) for batch in batches if batch.is_exact is not None)


def _slots(batch: Batch, width: int, num_slots: int) -> Tensor:
    assert batch.spans is not None
    numbers = batch.spans.reshape(-1).index_select(0, batch.positions)
    slots = batch.positions // batch.input_ids.shape[1] * width + numbers
    return torch.where(numbers >= 0, slots, num_slots)


def _scored(batch: Batch) -> Tensor:
    assert batch.spans is not None
    is_scored = torch.zeros_like(batch.spans, dtype=torch.bool).reshape(-1)
    return is_scored.index_fill(0, batch.positions, True).view_as(batch.spans) & (batch.spans >= 0)


def _is_first(batch: Batch) -> Tensor:
    assert batch.spans is not None
    before = torch.nn.functional.pad(batch.spans[:, :-1], (1, 0), value=-1)
    return _scored(batch) & (batch.spans != before)
