"""Many short strings as one array of bytes: ten million names are no ten million Python objects."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stillroom.data.encode import num_shared


class _Strings(Sequence[str]):
    """A sequence of strings that is read one by one, with `_at`."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._at(number) for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._at(index)

    @abstractmethod
    def _at(self, index: int) -> str: ...


class Texts(_Strings):
    """Strings that begin alike, decoded when asked for. String i ends at ends[i] of the blob, without the prefix."""

    def __init__(self, prefix: str, blob: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.prefix, self.blob, self.ends = prefix, blob, ends

    @staticmethod
    def of(strings: Sequence[str]) -> Texts:
        low, high = (min(strings), max(strings)) if strings else ("", "")
        prefix = low[: num_shared(low, high)]
        tails = [text[len(prefix) :].encode("utf-8", "surrogatepass") for text in strings]
        ends = np.cumsum([len(tail) for tail in tails], dtype=np.int64)
        return Texts(prefix, np.frombuffer(b"".join(tails), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def _at(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        tail = self.blob[start : int(self.ends[index])].tobytes()
        return self.prefix + tail.decode("utf-8", "surrogatepass")


class JoinedTexts(_Strings):
    """The chosen strings of several `Texts`, which are numbered end to end. `read` hears which of them was read."""

    def __init__(
        self,
        parts: Sequence[Sequence[str]],
        chosen: npt.NDArray[np.integer[Any]],
        read: Callable[[int], object] | None = None,
    ) -> None:
        self._parts, self._chosen, self._read = parts, chosen, read
        self._firsts = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._chosen)

    def _at(self, index: int) -> str:
        number = int(self._chosen[index])
        part = int(np.searchsorted(self._firsts, number, side="right")) - 1
        text = self._parts[part][number - int(self._firsts[part])]
        if self._read is not None:
            self._read(part)
        return text
