"""Tokenized documents as flat arrays, in memory or read from the token store.

# T tokens of all documents end to end, D documents
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from stillroom.errors import DataError

if TYPE_CHECKING:
    from stillroom.data.spans.paired import Paired

Ints = npt.NDArray[np.int64]
_CHUNK = 1 << 22  # tokens counted at a time: bounds memory for any number of documents


class Tokens(Protocol):
    """An array [T] that is read by slices: an ndarray, or a stream over the parts of the token store."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class Encoded:
    """Documents as flat arrays. Document d is the tokens bounds[d] to bounds[d + 1]."""

    ids: Tokens  # [T], int32
    num_bytes: Tokens  # [T], int32, text bytes of each token
    is_scored: Tokens  # [T], bool
    bounds: Ints  # [D + 1]
    names: Sequence[str]  # D
    groups: Sequence[str]  # D, documents of a group are held out together
    has_prompt: Sequence[bool] | npt.NDArray[np.bool_] = ()  # D, a chat or a prompt with an answer; empty: none is
    paired: Paired | None = None  # the same documents in the teacher's tokens, where it has a tokenizer of its own

    def __post_init__(self) -> None:
        num_tokens, num_documents = len(self.ids), len(self.names)
        is_whole = len(self.num_bytes) == len(self.is_scored) == num_tokens and len(self.groups) == num_documents
        is_bounded = len(self.bounds) == num_documents + 1 and self.bounds[0] == 0 and self.bounds[-1] == num_tokens
        if not (is_whole and is_bounded and len(self.has_prompt) in (0, num_documents)):
            raise DataError(f"{num_tokens} tokens of {num_documents} documents: the arrays do not belong together")

    @property
    def num_documents(self) -> int:
        return len(self.names)

    @property
    def num_scored(self) -> int:
        return int(self.num_scored_before(np.array([len(self.ids)]))[0])

    @property
    def prompts(self) -> npt.NDArray[np.bool_]:
        """[D] Which documents are a chat or a prompt with an answer."""
        return np.array(self.has_prompt, np.bool_) if len(self.has_prompt) else np.zeros(self.num_documents, np.bool_)

    def num_scored_before(self, places: Ints) -> Ints:
        """The number of scored tokens before each place. The places never fall."""
        counts, seen = np.zeros(len(places), np.int64), 0
        for start, is_scored in self._chunks():
            first, last = np.searchsorted(places, [start, start + len(is_scored)], side="right")
            # A place at the start of the chunk has its count from the chunk before; at 0 it is 0.
            running = np.cumsum(is_scored, dtype=np.int64)
            counts[first:last] = seen + running[places[first:last] - start - 1]
            seen += int(running[-1])
        return counts

    def _chunks(self) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        for start in range(0, len(self.is_scored), _CHUNK):
            yield start, self.is_scored[start : start + _CHUNK]
