"""The teacher's side of a part: the same documents in its tokens, and the spans of both.

Spans are numbered from the first tokens of their document, so that any choice of documents can be put together.

# U tokens of the teacher, S spans, D documents
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.data.encode import TokenizedRecord
from stillroom.data.encoded import Ints, Numbers
from stillroom.data.spans.common import Coverage, Spans

_COVERAGE = tuple(Coverage.__dataclass_fields__)

Document = tuple[TokenizedRecord, TokenizedRecord, Spans, Coverage]


@dataclass(frozen=True)
class PairPart:
    """What stands beside the student's tokens of a part."""

    ids: npt.NDArray[Any]  # [U]
    num_bytes: npt.NDArray[Any]  # [U]
    is_scored: npt.NDArray[np.bool_]  # [U]
    lengths: npt.NDArray[np.int32]  # [D]
    num_spans: npt.NDArray[np.int32]  # [D]
    student_firsts: npt.NDArray[np.int32]  # [S]
    student_ends: npt.NDArray[np.int32]  # [S]
    teacher_firsts: npt.NDArray[np.int32]  # [S]
    teacher_ends: npt.NDArray[np.int32]  # [S]
    sizes: npt.NDArray[np.int32]  # [S]
    is_exact: npt.NDArray[np.bool_]  # [S]
    coverage: npt.NDArray[np.int64]  # [D * 6], the numbers of `Coverage` of each document
    release: Callable[[], None] = lambda: None

    @staticmethod
    def names() -> tuple[str, ...]:
        return tuple(one.name for one in fields(PairPart) if one.name != "release")

    @staticmethod
    def of(documents: Sequence[Document], narrow: Callable[..., npt.NDArray[Any]]) -> PairPart:
        """`narrow` gives numbers a smaller dtype where they fit."""
        nothing = np.empty(0, np.int32)
        teachers = [teacher for _, teacher, _, _ in documents]
        spans = Spans.joined([own for _, _, own, _ in documents])
        places = {name: getattr(spans, name).astype(np.int32) for name in Spans.__dataclass_fields__}
        return PairPart(
            ids=narrow(np.concatenate([nothing, *(one.ids for one in teachers)]), np.uint16),
            num_bytes=narrow(np.concatenate([nothing, *(one.num_bytes for one in teachers)]), np.uint8),
            is_scored=np.concatenate([nothing.astype(np.bool_), *(one.is_scored for one in teachers)]),
            lengths=np.array([len(one.ids) for one in teachers], np.int32),
            num_spans=np.array([len(own) for _, _, own, _ in documents], np.int32),
            **{**places, "is_exact": spans.is_exact},
            coverage=np.array([[getattr(one, name) for name in _COVERAGE] for *_, one in documents], np.int64).ravel(),
        )


def chosen_spans(parts: Sequence[PairPart], chosen: Numbers, student: Ints, teacher: Ints) -> tuple[Spans, Coverage]:
    """The spans of chosen documents, numbered over all parts, that begin at these tokens of both sides. [D] each."""
    counts = np.concatenate([np.empty(0, np.int32), *(part.num_spans for part in parts)])
    firsts = np.cumsum(counts, dtype=np.int64) - counts
    own = counts[chosen].astype(np.int64)
    before = np.cumsum(own) - own
    places = np.arange(int(own.sum())) + np.repeat(firsts[chosen] - before, own)

    def column(name: str, dtype: type[Any]) -> npt.NDArray[Any]:
        whole: npt.NDArray[Any] = np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])
        found: npt.NDArray[Any] = whole[places].astype(dtype)
        return found

    spans = Spans(
        column("student_firsts", np.int64) + np.repeat(student, own),
        column("student_ends", np.int64) + np.repeat(student, own),
        column("teacher_firsts", np.int64) + np.repeat(teacher, own),
        column("teacher_ends", np.int64) + np.repeat(teacher, own),
        column("sizes", np.int64),
        column("is_exact", np.bool_),
    )
    table = np.concatenate([np.empty(0, np.int64), *(part.coverage for part in parts)]).reshape(-1, len(_COVERAGE))
    for part in parts:
        part.release()
    return spans, Coverage(*table[chosen].sum(axis=0).tolist())
