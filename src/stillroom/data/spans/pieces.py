"""For every token of one vocabulary, the tokens of another one that stand for its bytes.

Marks (begin, end, padding, unknown) are matched by their role, because their names differ. Any other token is one token
of the same bytes where there is one. Otherwise it is cut as the other tokenizer cuts it inside of a text; where that
tokenizer has no text for the bytes (half a character) or changes them, the longest tokens that fit are taken from the
left. A token that cannot be spelled at all has no pieces.

# V ids of the wanted vocabulary
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.data.spans.token_bytes import TokenBytes
from stillroom.errors import ConfigError

# What a mark of the wanted vocabulary takes, the first that there is. Models without a begin mark begin with the end
# mark, and models without padding are padded with it.
_ROLES = {"bos": ("bos", "eos"), "eos": ("eos", "bos"), "pad": ("pad", "eos", "unk"), "unk": ("unk",)}
# Put before a token, so that a tokenizer which marks the beginning of a text does not mark the token.
_ANCHORS = ("", "\n", ".", "a")


@dataclass(frozen=True)
class Pieces:
    """Which tokens of the held vocabulary each token of the wanted one consists of."""

    tokens: tuple[tuple[int, ...], ...]  # [V]
    is_token: tuple[bool, ...]  # [V], False for ids that the tokenizer does not use
    num_marks: int  # matched by role

    @property
    def num_copied(self) -> int:
        return sum(len(one) == 1 for one in self.tokens) - self.num_marks

    @property
    def num_averaged(self) -> int:
        return sum(len(one) > 1 for one in self.tokens)

    @property
    def num_unspelled(self) -> int:
        return sum(not one and is_token for one, is_token in zip(self.tokens, self.is_token, strict=True))


def by_bytes(table: TokenBytes) -> dict[bytes, int]:
    """The ordinary token of each byte string; of a character and <0xNN> the character."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for token in np.flatnonzero(table.is_known & ~table.is_special & (table.sizes > 0)).tolist():
        found[table.bytes_of(token)].append(token)
    return {spelled: min(ids, key=lambda one: (table.is_byte[one], one)) for spelled, ids in found.items()}


def pieces_of(wanted: Any, held: Any) -> Pieces:
    """The tokens of the tokenizer `wanted` in those of `held`. Raise where tokens do not say which bytes they are."""
    tables = TokenBytes.of(wanted, "teacher"), TokenBytes.of(held, "student")
    for table, role in zip(tables, ("teacher", "student"), strict=True):
        if table.implies_spaces:
            raise ConfigError(
                f"tokens of the {role} stand for a word with or without the space before it: they cannot be compared "
                "by their bytes",
                where="student.vocabulary",
                advice=["teach across tokenizers: --preset cross-tokenizer"],
            )
    spelling, known = tables[0], by_bytes(tables[1])
    marks = _marks(wanted, held)
    spelled = {token: spelling.bytes_of(token) for token in np.flatnonzero(spelling.is_known).tolist()}
    spelled = {token: text for token, text in spelled.items() if text and token not in marks}
    found: dict[int, tuple[int, ...]] = {token: (known[text],) for token, text in spelled.items() if text in known}
    rest = {token: text for token, text in spelled.items() if token not in found}
    cut = _cut(held, tables[1], sorted(set(rest.values())))
    longest = max(map(len, known), default=0)
    found |= {token: cut.get(text) or _longest_first(text, known, longest) for token, text in rest.items()}
    found |= {token: (own,) for token, own in marks.items()}
    num_ids = len(spelling.sizes)
    used = set(wanted.get_vocab().values())
    return Pieces(
        tuple(found.get(token, ()) for token in range(num_ids)),
        tuple(token in used for token in range(num_ids)),
        len(marks),
    )


def _marks(wanted: Any, held: Any) -> dict[int, int]:
    """The marks of the wanted vocabulary, and the held one's of the same role. The end mark comes first: it may be
    the padding too."""
    found: dict[int, int] = {}
    for role in ("eos", "bos", "unk", "pad"):
        token = getattr(wanted, f"{role}_token_id", None)
        own = [getattr(held, f"{one}_token_id", None) for one in _ROLES[role]]
        taken = next((one for one in own if one is not None), None)
        if token is not None and taken is not None:
            found.setdefault(int(token), int(taken))
    return found


def _cut(held: Any, table: TokenBytes, wanted: Sequence[bytes]) -> dict[bytes, tuple[int, ...]]:
    """The tokens that the tokenizer reads these bytes as, where they are a text and its tokens are exactly them."""
    texts = {}
    for one in wanted:
        try:
            texts[one] = one.decode("utf-8")
        except UnicodeDecodeError:
            continue
    found: dict[bytes, tuple[int, ...]] = {}
    for anchor in _ANCHORS:
        left = [one for one in texts if one not in found]
        if not left:
            break
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        answers = held([anchor + texts[one] for one in left], **options)["input_ids"]
        for one, ids in zip(left, answers, strict=True):
            pieces = _ending(list(ids), one, table)
            if pieces:
                found[one] = pieces
    return found


def _ending(ids: list[int], wanted: bytes, table: TokenBytes) -> tuple[int, ...]:
    """The last tokens that are together exactly these bytes; none where no cut is there or one is not known."""
    size = 0
    for first in range(len(ids) - 1, -1, -1):
        if not table.is_known[ids[first]]:
            return ()
        size += int(table.sizes[ids[first]])
        if size >= len(wanted):
            spelled = b"".join(table.bytes_of(one) for one in ids[first:])
            return tuple(ids[first:]) if spelled == wanted else ()
    return ()


def _longest_first(text: bytes, known: dict[bytes, int], longest: int) -> tuple[int, ...]:
    found: list[int] = []
    begin = 0
    while begin < len(text):
        ends = range(min(len(text), begin + longest), begin, -1)
        end = next((end for end in ends if text[begin:end] in known), begin)
        if end == begin:
            return ()
        found.append(known[text[begin:end]])
        begin = end
    return tuple(found)
