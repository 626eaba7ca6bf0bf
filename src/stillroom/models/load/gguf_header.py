"""Read the header of a GGUF file: what it says of itself, and whether it is whole.

The loader of transformers reads what it knows and leaves out the rest without a word. So look first: a file that was
cut short, that is a part of several, or whose rotary frequencies are scaled would load as something else.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from stillroom.errors import BrokenAtStart

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMS = 8
_LONG = 64  # an array of more entries is passed over: tokens and merges
_AGAIN = "get the file again"


@dataclass(frozen=True)
class Omitted:
    """A long array, of which only the length is kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    num_elements: int
    kind: int  # as ggml numbers its types
    offset: int  # from the beginning of the file


@dataclass(frozen=True)
class GgufHeader:
    """The fields of a file, without its long arrays, and where its tensors lie."""

    path: Path
    num_bytes: int
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    @property
    def num_tokens(self) -> int:
        """The tokens that it lists; 0 where it has no tokenizer."""
        tokens = self.fields.get("tokenizer.ggml.tokens", [])
        return tokens.count if isinstance(tokens, Omitted) else len(tokens)

    def own(self, key: str) -> Any:
        """A field of the architecture, such as `rope.scaling.type`."""
        return self.fields.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Raise if the file is no GGUF file, or ends in the middle of its header."""
    try:
        stamp = path.stat()
        return _read(path, stamp.st_size, stamp.st_mtime_ns)
    except OSError as error:
        raise BrokenAtStart(f"{path} cannot be read: {error.strerror}", advice=["check its permissions"]) from error


@lru_cache(maxsize=8)
def _read(path: Path, num_bytes: int, _stamp: int) -> GgufHeader:
    with path.open("rb") as opened:
        begin = opened.read(len(MAGIC))
        if begin != MAGIC:
            raise BrokenAtStart(
                f"{path} is no GGUF file: it begins with {begin!r}, not with {MAGIC!r}", advice=[_AGAIN]
            )
        reader = _Reader(opened, path, num_bytes)
        version = reader.number("I")
        if version not in _VERSIONS:
            raise BrokenAtStart(
                f"{path} is GGUF of version {version} or of another byte order: versions 2 and 3, little-endian, "
                "are read",
                advice=["convert it again with a present llama.cpp"],
            )
        num_tensors, num_fields = reader.number("Q"), reader.number("Q")
        fields = dict(reader.field() for _ in range(reader.plausible(num_fields)))
        found = dict(reader.tensor() for _ in range(reader.plausible(num_tensors)))
        alignment = int(fields.get("general.alignment", 32)) or 1
        data = -(-opened.tell() // alignment) * alignment
    tensors = {name: GgufTensor(count, kind, data + offset) for name, (count, kind, offset) in found.items()}
    return GgufHeader(path, num_bytes, fields, tensors)


class _Reader:
    """Reads values one after another. A length beyond the end of the file is an error before anything is read."""

    def __init__(self, opened: BinaryIO, path: Path, num_bytes: int) -> None:
        self._opened, self._path, self._num_bytes = opened, path, num_bytes

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack(f"<{code}", self._bytes(size))[0]

    def plausible(self, count: int) -> int:
        """A count of things that take at least a byte each."""
        if count > self._num_bytes:
            raise self._cut_short()
        return count

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode("utf-8", "replace")

    def field(self) -> tuple[str, Any]:
        name = self.text()
        return name, self._value(self.number("I"))

    def tensor(self) -> tuple[str, tuple[int, int, int]]:
        name, num_dims, count = self.text(), self.number("I"), 1
        if num_dims > _MOST_DIMS:
            raise self._damaged(f"{name!r} has {num_dims:,} dimensions")
        for _ in range(num_dims):
            count *= self.number("Q")
        return name, (count, self.number("I"), self.number("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise self._damaged(f"a field of type {kind}")
        return self.number(_NUMBERS[kind])

    def _array(self) -> list[Any] | Omitted:
        kind, count = self.number("I"), self.plausible(self.number("Q"))
        if kind in _NUMBERS and count > _LONG:
            self._bytes(count * struct.calcsize(_NUMBERS[kind]))
            return Omitted(count)
        values = [self._value(kind) for _ in range(count)]
        return values if count <= _LONG else Omitted(count)

    def _bytes(self, count: int) -> bytes:
        if count > self._num_bytes - self._opened.tell():
            raise self._cut_short()
        return self._opened.read(count)

    def _cut_short(self) -> BrokenAtStart:
        return BrokenAtStart(
            f"{self._path} was cut short or is damaged: its header goes beyond its end at {self._num_bytes:,} bytes",
            advice=[_AGAIN],
        )

    def _damaged(self, what: str) -> BrokenAtStart:
        return BrokenAtStart(f"{self._path} is damaged: its header has {what}", advice=[_AGAIN])
