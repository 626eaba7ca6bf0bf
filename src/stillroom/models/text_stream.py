"""Turn tokens into text one by one, so that the pieces joined are the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8  # tokens decoded before a new one
_BROKEN = "\ufffd"  # what bytes that are no character yet are decoded to


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens as they were written: without special tokens, and no space taken out before a full stop."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """The text that tokens add to a prompt, in pieces.

    Decoded alone, a token may lose its leading space, so it is decoded behind some tokens that have text. A character
    may be split over tokens, so a piece that ends in a broken one is held back until the next token, or the end.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids, self._before = self._context(prompt)
        self._is_held = False

    def add(self, token: int) -> str:
        """The text that a token adds; empty while it is held back."""
        self._ids.append(token)
        whole = self._decoded(self._ids)
        self._is_held = whole.endswith(_BROKEN)
        return "" if self._is_held else self._given(whole)

    def rest(self) -> str:
        """What was held back."""
        return self._given(self._decoded(self._ids)) if self._is_held else ""

    def _given(self, whole: str) -> str:
        text = whole[num_shared(whole, self._before) :]
        self._ids, self._before = self._context(self._ids)
        self._is_held = False
        return text

    def _context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """The last tokens and their text: so many that they have one, and do not begin within a character."""
        for size in range(_CONTEXT, len(ids), _CONTEXT):
            text = self._decoded(ids[-size:])
            if text.strip() and not text.startswith(_BROKEN):
                return list(ids[-size:]), text
        return list(ids), self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        return decoded(self._tokenizer, ids)


def num_shared(one: str, two: str) -> int:
    """How many characters two texts share at their beginning."""
    pairs = zip(one, two, strict=False)
    return next((place for place, (mine, yours) in enumerate(pairs) if mine != yours), min(len(one), len(two)))
