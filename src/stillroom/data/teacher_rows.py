"""The teacher's rows that stand beside a student's, as rows of their own."""

from __future__ import annotations

from collections.abc import Sequence

from stillroom.data.encoded import Ints
from stillroom.data.packing import Rows
from stillroom.errors import ConfigError
from stillroom.types import Batch


class TeacherRows(Rows):
    """Row r is what a teacher with a tokenizer of its own reads beside row r of the student."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_packed(self) -> bool:
        return self._rows.is_packed

    @property
    def lengths(self) -> Ints:
        return self._rows.other_lengths

    def batch(self, indices: Sequence[int] | Ints, *, index: int = 0) -> Batch:
        return other_of(self._rows.batch(indices, index=index))


def other_of(batch: Batch) -> Batch:
    """The teacher's side of a batch."""
    if batch.other is None:
        raise ConfigError(
            "the teacher has a tokenizer of its own, and a batch has no rows for it",
            where="data.train",
            advice=["open the data with both tokenizers"],
        )
    return batch.other
