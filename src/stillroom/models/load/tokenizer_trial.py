"""Try a tokenizer on short texts before it is used: does it encode and decode them, in a size that can be?

A tokenizer's files come from elsewhere. A part of them that is damaged may panic at the first text, and a normaliser
may write a million letters for one.
"""

from __future__ import annotations

import string
from typing import Any

from stillroom.errors import BrokenAtStart

_LONGEST = 1000  # characters for a text or a token of a few
_TEXTS = (*string.printable, "\u00e9", "\u4e2d", "The quick brown fox jumps over the lazy dog, 10 times.\n")
_NUM_DECODED = 256


def try_tokenizer(tokenizer: Any, name: str) -> None:
    """Raise what the tokenizer raises, or BrokenAtStart where it blows up a text."""
    if not getattr(tokenizer, "is_fast", False):
        return
    normalizer = tokenizer.backend_tokenizer.normalizer
    for text in _TEXTS if normalizer is not None else ():
        for step in _steps(normalizer):  # one at a time: each is bounded by its own file, a chain of them is not
            text = step.normalize_str(text)
            _check(text, "normalizer", name)
    tokenizer(_TEXTS[-1], add_special_tokens=False)
    ids = sorted(set(tokenizer.get_vocab().values()))
    for token in ids[:: max(1, len(ids) // _NUM_DECODED)]:
        _check(tokenizer.decode([token]), "decoder", name)


def _steps(normalizer: Any) -> list[Any]:
    """The parts of a sequence of normalisers, itself where it is none."""
    return list(normalizer) if type(normalizer).__name__ == "Sequence" else [normalizer]


def _check(text: str, part: str, name: str) -> None:
    if len(text) > _LONGEST:
        raise BrokenAtStart(
            f"the {part} of the tokenizer of {name} writes {len(text):,} characters for a few",
            where="tokenizer.json",
            advice=["get its files from a place you trust"],
        )
