"""A part of the token store: some thousand documents as arrays, in one file that is written whole or not at all.

The file: 8 bytes magic, CRC-32 of all that follows it, length of the header, the header (JSON), then the arrays, each
at a multiple of 64 bytes so that it can be mapped. One wrong byte anywhere gives another sum.

# T tokens of a part, D documents
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.data.encode import TokenizedRecord
from stillroom.data.records import BadRecord, Tally
from stillroom.data.store.pair_part import Document, PairPart
from stillroom.data.store.texts import Texts
from stillroom.files import write_atomically

DIGEST_BYTES = 16
_MAGIC = b"STLTOK01"
_ALIGNMENT = 64
_START = struct.Struct("<II")  # CRC-32, bytes of the header
_READ_BYTES = 1 << 22
_PAIR = "other."  # before the names of the teacher's arrays
_ARRAYS = ("ids", "num_bytes", "is_scored", "lengths", "has_prompt", "digests", "share_hashes")


class Damaged(ValueError):
    """Raised for a part that is not what was written; the message says how."""


@dataclass(frozen=True)
class Part:
    """Documents in the order of their file. A record in which the tokenizer sees nothing has length 0."""

    ids: npt.NDArray[Any]  # [T], uint16 or int32
    num_bytes: npt.NDArray[Any]  # [T], uint8 or int32
    is_scored: npt.NDArray[np.bool_]  # [T]
    lengths: npt.NDArray[np.int32]  # [D]
    has_prompt: npt.NDArray[np.bool_]  # [D]
    digests: npt.NDArray[np.bytes_]  # [D] of 16 bytes: of the record's key, what a split goes by
    share_hashes: npt.NDArray[np.uint64]  # [D], what `data.train_share` goes by
    names: Texts  # D
    tally: Tally
    mapped: mmap.mmap | None = None  # the file that the arrays are read from
    pair: PairPart | None = None  # the same documents in the teacher's tokens, where it has a tokenizer of its own

    def __len__(self) -> int:
        return len(self.lengths)

    def release(self) -> None:
        """Give back the memory of pages that were read. They are read again when they are needed.

        One byte that is read may map megabytes: the kernel maps the whole block of its cache that has the byte.
        """
        if self.mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    @staticmethod
    def of(documents: Sequence[TokenizedRecord], tally: Tally) -> Part:
        nothing = np.empty(0, np.int32)
        keys = [document.record.key for document in documents]
        return Part(
            ids=_narrow(np.concatenate([nothing, *(document.ids for document in documents)]), np.uint16),
            num_bytes=_narrow(np.concatenate([nothing, *(document.num_bytes for document in documents)]), np.uint8),
            is_scored=np.concatenate([nothing.astype(np.bool_), *(document.is_scored for document in documents)]),
            lengths=np.array([len(document.ids) for document in documents], np.int32),
            has_prompt=np.array([document.has_prompt for document in documents], np.bool_),
            digests=digests_of(keys),
            share_hashes=hashes_of(digests_of([f"share:{key}" for key in keys])),
            names=Texts.of([document.record.id for document in documents]),
            tally=tally,
        )

    @staticmethod
    def of_pairs(documents: Sequence[Document], tally: Tally) -> Part:
        """Documents in the tokens of two models."""
        students = Part.of([student for student, *_ in documents], tally)
        return replace(students, pair=PairPart.of(documents, _narrow))


def _narrow(values: npt.NDArray[np.int32], dtype: type[np.unsignedinteger[Any]]) -> npt.NDArray[Any]:
    """The same values in a smaller dtype if all of them fit."""
    is_small = not len(values) or (values.min() >= 0 and values.max() <= np.iinfo(dtype).max)
    return values.astype(dtype) if is_small else values


def digests_of(keys: Sequence[str]) -> npt.NDArray[np.bytes_]:
    """[D] The first 16 bytes of the sha256 of each key."""
    joined = b"".join(hashlib.sha256(key.encode("utf-8")).digest()[:DIGEST_BYTES] for key in keys)
    return np.frombuffer(joined, dtype=f"S{DIGEST_BYTES}")


def hashes_of(digests: npt.NDArray[np.bytes_]) -> npt.NDArray[np.uint64]:
    """[D] The first 8 bytes of each digest as a number: `builtin.corpus.hash_share` times 2^64."""
    return np.ascontiguousarray(digests).view(">u8").reshape(-1, 2)[:, 0].astype(np.uint64)


# -- the file --------------------------------------------------------------------------------------------


def write_part(path: Path, part: Part) -> int:
    """Write a part and return the size of the file."""
    arrays = {name: getattr(part, name) for name in _ARRAYS} | {"blob": part.names.blob, "ends": part.names.ends}
    if part.pair is not None:
        arrays |= {f"{_PAIR}{name}": getattr(part.pair, name) for name in PairPart.names()}
    sections, place = {}, 0
    for name, array in arrays.items():
        sections[name] = [array.dtype.str, len(array), place]
        place += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({"sections": sections, "prefix": part.names.prefix, "tally": tally_values(part.tally)}).encode()
    header += b" " * (-(len(_MAGIC) + _START.size + len(header)) % _ALIGNMENT)
    pieces = [header]
    for array in arrays.values():
        raw = np.ascontiguousarray(array).tobytes()
        pieces.append(raw + b"\0" * (-len(raw) % _ALIGNMENT))
    body = struct.pack("<I", len(header)) + b"".join(pieces)
    contents = _MAGIC + struct.pack("<I", zlib.crc32(body)) + body
    write_atomically(path, contents)
    return len(contents)


def check_part(path: Path) -> None:
    """Read the file and compare its sum. Raise `Damaged` with the reason."""
    with path.open("rb") as file:
        start = file.read(len(_MAGIC) + 4)
        if len(start) < len(_MAGIC) + 4 or not start.startswith(_MAGIC):
            raise Damaged("it does not begin as a part of the token store does")
        found = 0
        while chunk := file.read(_READ_BYTES):
            found = zlib.crc32(chunk, found)
    (expected,) = struct.unpack("<I", start[len(_MAGIC) :])
    if found != expected:
        raise Damaged(f"its checksum is {found:08x} and was {expected:08x} when it was written")


def open_part(path: Path) -> Part:
    """Map a part that was checked."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    first = len(_MAGIC) + _START.size
    _, size = _START.unpack(mapped[len(_MAGIC) : first])
    header = json.loads(mapped[first : first + size])
    arrays: dict[str, Any] = {
        name: np.frombuffer(mapped, dtype=np.dtype(dtype), count=count, offset=first + size + place)
        for name, (dtype, count, place) in header["sections"].items()
    }
    names = Texts(header["prefix"], arrays.pop("blob"), arrays.pop("ends"))
    beside = {name.removeprefix(_PAIR): arrays.pop(name) for name in [*arrays] if name.startswith(_PAIR)}
    part = Part(**arrays, names=names, tally=tally_of(header["tally"]), mapped=mapped)
    part.release()
    return replace(part, pair=PairPart(**beside, release=part.release)) if beside else part


def tally_values(tally: Tally) -> dict[str, Any]:
    """A tally as JSON values."""
    return {
        "counters": dict(tally.counters),
        "notes": tally.notes,
        "bad": [[bad.where, bad.why] for bad in tally.bad],
        "shapes": dict(tally.shapes),
    }


def tally_of(value: dict[str, Any]) -> Tally:
    """A tally from `tally_values`."""
    bad = [BadRecord(where, why) for where, why in value["bad"]]
    return Tally(Counter(value["counters"]), list(value["notes"]), bad, Counter(value["shapes"]))
