"""Split documents by hashes of their contents, as records in memory or as files of the token store.

# D documents
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stillroom.core.errors import DataError
from stillroom.data.records import Record, Tally
from stillroom.data.store import StoredFile, digests_of, encoded_documents, end_to_end, hashes_of, numbers, whole_column
from stillroom.data.tokenize import Encoded, Encoder, Numbers

_SHARE_FOR_ENOUGH = 5  # to hold out enough documents, take at most one of this many

Digests = npt.NDArray[np.bytes_]
Flags = npt.NDArray[np.bool_]


class Documents(Protocol):
    """Documents that can be split and tokenized. Digests are the first 16 bytes of a sha256."""

    def __len__(self) -> int: ...
    def contents(self) -> Digests:
        """[D] A digest of each document's content."""

    def groups(self) -> Digests:
        """[D] A digest of each document's group, or of its content if it has none."""

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        """[D] What `data.train_share` goes by."""

    def take(self, is_taken: Flags) -> Documents: ...
    def encoded(self, encode: Encoder) -> Encoded: ...


@dataclass(frozen=True)
class ReadDocuments:
    """Records in memory."""

    records: Sequence[Record]

    def __len__(self) -> int:
        return len(self.records)

    def contents(self) -> Digests:
        return digests_of([record.key for record in self.records])

    def groups(self) -> Digests:
        return digests_of([record.group or record.key for record in self.records])

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        """Embedded documents are hashed by name, others by content."""
        names = [f"share:{record.id if record.group else record.key}" for record in self.records]
        return hashes_of(digests_of(names))

    def take(self, is_taken: Flags) -> ReadDocuments:
        return ReadDocuments([record for record, taken in zip(self.records, is_taken, strict=True) if taken])

    def encoded(self, encode: Encoder) -> Encoded:
        return encode(self.records)


@dataclass(frozen=True)
class StoredDocuments:
    """Documents of the token store, tokenized already. They come from files and belong to no group."""

    files: Sequence[StoredFile]
    chosen: Numbers  # documents, numbered over all files, in rising order

    @staticmethod
    def of(files: Sequence[StoredFile]) -> StoredDocuments:
        return StoredDocuments(files, numbers(sum(len(file) for file in files)))

    def __len__(self) -> int:
        return len(self.chosen)

    def contents(self) -> Digests:
        digests = whole_column(self.files, "digests")
        return digests if len(self.chosen) == len(digests) else digests[self.chosen]

    def groups(self) -> Digests:
        return self.contents()

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        return whole_column(self.files, "share_hashes")[self.chosen]

    def take(self, is_taken: Flags) -> StoredDocuments:
        return StoredDocuments(self.files, self.chosen[is_taken])

    def encoded(self, encode: Encoder) -> Encoded:
        encode.note_limits()
        encoded = encoded_documents(self.files, self.chosen)
        encode.note_lost(len(self) - encoded.num_documents)
        return encode.found(encoded)


@dataclass(frozen=True)
class SourceDocuments:
    """Documents of several sources, one source after the other. A source of which nothing is left keeps its place."""

    sources: Sequence[Documents]

    def __len__(self) -> int:
        return sum(len(documents) for documents in self.sources)

    def contents(self) -> Digests:
        return _joined([documents.contents() for documents in self.sources], digests_of([]))

    def groups(self) -> Digests:
        return _joined([documents.groups() for documents in self.sources], digests_of([]))

    def share_hashes(self) -> npt.NDArray[np.uint64]:
        return _joined([documents.share_hashes() for documents in self.sources], np.empty(0, np.uint64))

    def take(self, is_taken: Flags) -> SourceDocuments:
        ends = np.cumsum([len(documents) for documents in self.sources])
        flags = np.split(is_taken, ends[:-1])
        return SourceDocuments([one.take(own) for one, own in zip(self.sources, flags, strict=True)])

    def encoded(self, encode: Encoder) -> Encoded:
        several = [documents.encoded(encode) for documents in self.sources if len(documents)]
        return end_to_end(several) if several else encode([])


def _joined(arrays: Sequence[npt.NDArray[Any]], nothing: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The arrays end to end. One array is not copied: of many documents the digests alone are large."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([nothing, *arrays])


def held_out(groups: Digests, share: float, spec: str, *, enough: int = 1) -> Flags:
    """[D] Which documents are held out, by the hash of each one's group or content; neither side is empty.

    Equal contents share a hash, so they are never on both sides. Hold out the hashes below `share`; if those are fewer
    than `enough` contents, hold out the next lowest too, up to a fifth of all. The split is a function of the contents,
    and a smaller share is a subset of a larger one.
    """
    shares = _as_shares(hashes_of(groups))
    is_below: Flags = shares < share
    below = groups[is_below]
    if num_distinct(below, enough) >= enough and not is_below.all():
        return is_below
    num_below = len(np.unique(below))
    distinct, first = np.unique(groups, return_index=True)
    if len(distinct) < 2:
        raise DataError(
            f"{spec} holds one document only, so nothing of it can be held out",
            advice=["give held-out data of its own as data.eval", "give more text"],
        )
    in_order = distinct[np.lexsort((distinct, shares[first]))]
    num_wanted = max(1, min(enough, len(distinct) // _SHARE_FOR_ENOUGH), num_below)
    return np.isin(groups, in_order[: min(num_wanted, len(distinct) - 1)])


def num_distinct(groups: Digests, enough: int) -> int:
    """The number of distinct digests; if `enough` are among the first ones, the number among those."""
    among_first = len(np.unique(groups[: 100 * enough]))
    return among_first if among_first >= enough else len(np.unique(groups))


def share_of(hashes: npt.NDArray[np.uint64], share: float) -> Flags:
    """[D] The documents whose hash is below `share`, at least one: a smaller share is a subset of a larger one."""
    shares = _as_shares(hashes)
    is_taken: Flags = shares <= max(share, shares.min())
    return is_taken


def hold_out(
    records: Sequence[Record], share: float, spec: str, *, enough: int = 1
) -> tuple[list[Record], list[Record]]:
    """`held_out` of records: (training, held out)."""
    documents = ReadDocuments(records)
    is_held = held_out(documents.groups(), share, spec, enough=enough)
    return list(documents.take(~is_held).records), list(documents.take(is_held).records)


def note_overlap(train: Documents, evaluation: Documents, tally: Tally) -> None:
    if count := int(np.isin(evaluation.contents(), train.contents()).sum()):
        tally.counters["overlapping_records"] += count
        tally.note(f"{count:,} of {len(evaluation):,} evaluation records also stand in the training data")


def _as_shares(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = hashes.astype(np.float64)
    shares /= 2.0**64
    return shares
