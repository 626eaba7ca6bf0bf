"""Lines about tokenizing: how far it is and how fast, at most one in a quarter of a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stillroom.data.store.making import Made

_SECONDS_BETWEEN = 15.0


class Progress:
    """Counts what was made of one file, and tells."""

    def __init__(self, name: str, num_bytes: int | None, tell: Callable[[str], object]) -> None:
        self._name, self._num_bytes, self._tell = name, num_bytes, tell
        self._begun = self._told = time.monotonic()
        self._num_read = self._num_records = self._num_tokens = self._num_kept = 0
        self._num_at_once = 1

    def kept(self) -> None:
        """A part of an earlier start was found."""
        self._num_kept += 1

    def read(self, num_characters: int) -> None:
        self._num_read += num_characters

    def made(self, parts: Sequence[Made], num_at_once: int) -> None:
        self._num_at_once = num_at_once
        self._num_records += sum(part.num_records for part in parts)
        self._num_tokens += sum(part.num_tokens for part in parts)
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN:
            self._told = now
            self._tell(f"tokenizing {self._name}: {self._extent()} read, {self._rate(now)}")

    def end(self) -> None:
        resumed = f"; {self._num_kept:,} parts were there from an earlier start" if self._num_kept else ""
        self._tell(f"tokenized {self._name}: {self._rate(time.monotonic())}{resumed}")

    def _extent(self) -> str:
        if self._num_bytes is None:
            return f"{self._num_read:,} characters"
        return f"about {min(0.99, self._num_read / max(self._num_bytes, 1)):.0%}"

    def _rate(self, now: float) -> str:
        seconds = max(now - self._begun, 1e-3)
        processes = f"{self._num_at_once} processes" if self._num_at_once > 1 else "one process"
        return (
            f"{self._num_records:,} records, {self._num_tokens:,} tokens, {self._num_tokens / seconds:,.0f} tokens/s "
            f"with {processes}"
        )
