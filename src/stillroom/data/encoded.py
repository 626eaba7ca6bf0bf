"""Tokenized documents as flat arrays, in memory or read from the token store.

# T tokens of all documents end to end, D documents
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from stillroom.errors import DataError

if TYPE_CHECKING:
    from stillroom.data.spans.paired import Paired

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.integer[Any]]  # in as few bytes as they fit into
_CHUNK = 1 << 22  # tokens counted at a time: bounds memory for any number of documents


class Tokens(Protocol):
    """An array [T] that is read by slices: an ndarray, or a stream over files of the token store."""

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
        return int(self.num_scored_between(np.array([0]), np.array([len(self.ids)]))[0])

    @property
    def prompts(self) -> npt.NDArray[np.bool_]:
        """[D] Which documents are a chat or a prompt with an answer."""
        return np.array(self.has_prompt, np.bool_) if len(self.has_prompt) else np.zeros(self.num_documents, np.bool_)

    def documents_at(self, places: Ints) -> Ints:
        """The document that each token is in."""
        return documents_at(self.bounds, places)

    def num_scored_between(self, begins: Ints, ends: Ints) -> Ints:
        """The number of scored tokens from each begin to its end."""
        return num_true_between(self.is_scored, begins, ends)


def documents_at(bounds: Ints, places: Ints, guess: int = 0) -> Ints:
    """The document that each place is in. Fast where they are one in each, beginning with document `guess`."""
    end = guess + len(places)
    is_guessed = end < len(bounds) and bool((bounds[guess:end] <= places).all())
    if is_guessed and bool((places < bounds[guess + 1 : end + 1]).all()):
        return np.arange(guess, end)
    documents: Ints = np.searchsorted(bounds, places, side="right")
    documents -= 1
    return documents


def num_true_between(flags: Tokens, begins: Ints, ends: Ints) -> Ints:
    """How many flags are set from each begin to its end. Flags before the first begin are not read."""
    low = int(begins.min()) if len(begins) else 0
    counts = _num_true_from(flags, ends, low)
    counts -= _num_true_from(flags, begins, low)
    return counts


def _num_true_from(flags: Tokens, places: Ints, low: int) -> Ints:
    """How many flags are set from `low` to each place."""
    counts = np.zeros(len(places), np.int64)
    if (places[1:] < places[:-1]).any():
        order = np.argsort(places, kind="stable")
        counts[order] = _num_true_from(flags, places[order], low)
        return counts
    seen, high = 0, int(places[-1]) if len(places) else low
    for start in range(low, high, _CHUNK):
        running = np.cumsum(flags[start : min(start + _CHUNK, high)], dtype=np.int64)
        first, last = np.searchsorted(places, [start, start + len(running)], side="right")
        # A place at the start of the chunk has its count from the chunk before; at `low` it is 0.
        counts[first:last] = seen + running[places[first:last] - start - 1]
        seen += int(running[-1])
    return counts
