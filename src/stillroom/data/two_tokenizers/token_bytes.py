"""The bytes that each token of a vocabulary stands for.

A byte-level vocabulary spells bytes by GPT-2's table of characters; SentencePiece writes a space as U+2581 and a
single byte as <0xNN>; WordPiece marks what continues a word by a prefix; added tokens are literal. Which of these holds
is read from the tokenizer's decoder, because that turns tokens back into text. `places.py` compares the bytes with the
text that was tokenized, so a wrong table cannot place a token wrongly.

# V ids, N tokens of a text, X bytes
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stillroom.core.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBES = ("a", "e", "t", "o", "i", "s", "n")


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token, end to end: token i has flat[starts[i] : starts[i] + sizes[i]]."""

    flat: Bytes  # [X]
    starts: Ints  # [V]
    sizes: Ints  # [V]
    is_known: npt.NDArray[np.bool_]  # [V], False for the unknown token and for ids without a token
    is_byte: npt.NDArray[np.bool_]  # [V], <0xNN>
    is_special: npt.NDArray[np.bool_]  # [V]
    implies_spaces: bool  # a new word says that a space was before it, and its own bytes have none

    @staticmethod
    def of(tokenizer: Any, role: str = "tokenizer") -> TokenBytes:
        """Read a tokenizer. Raise if it cannot say where its tokens stand in a text."""
        check_usable(tokenizer, role)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
        num_ids = max([*vocabulary.values(), *added], default=-1) + 1
        spell = _Speller.of(tokenizer)
        spelled = [b""] * num_ids
        is_known, is_byte, is_special = (np.zeros(num_ids, np.bool_) for _ in range(3))
        for token, index in vocabulary.items():
            spelled[index] = str(token).encode("utf-8", "replace") if index in added else spell(token)
            is_known[index], is_byte[index] = True, spell.has_bytes and bool(_BYTE_TOKEN.fullmatch(token))
        for index, token in added.items():
            spelled[index], is_known[index], is_special[index] = str(token).encode(), True, bool(token.special)
        unknown = tokenizer.unk_token_id
        if unknown is not None and unknown != tokenizer.eos_token_id and 0 <= unknown < num_ids:
            is_known[unknown] = False
        sizes = np.array([len(one) for one in spelled], np.int64)
        flat = np.frombuffer(b"".join(spelled), np.uint8)
        implies = _tells_words_apart(tokenizer) and not _spells_spaces(spelled)
        return TokenBytes(flat, np.cumsum(sizes) - sizes, sizes, is_known, is_byte, is_special, implies)

    def spelled(self, ids: Ints) -> tuple[Bytes, Ints]:
        """The bytes of these tokens end to end, and how many each has. [X], [N]"""
        sizes = self.sizes[ids]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        places = np.repeat(self.starts[ids] - (ends - sizes), sizes) + np.arange(total)
        return self.flat[places], sizes

    def bytes_of(self, token: int) -> bytes:
        return self.flat[self.starts[token] : self.starts[token] + self.sizes[token]].tobytes()


def check_usable(tokenizer: Any, role: str) -> None:
    """Raise unless the tokenizer is a fast one, whose end mark is a separate token."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"the {role}'s tokenizer ({name}) does not say where its tokens stand in a text",
            where=f"{role}.model",
            advice=["use a model with a tokenizer.json", "use a teacher with the student's tokenizer"],
        )
    vocabulary = tokenizer.get_vocab()
    for kind in ("bos_token", "eos_token"):
        token, index = getattr(tokenizer, kind, None), getattr(tokenizer, f"{kind}_id", None)
        if token is None:
            continue
        is_lost = index is None or vocabulary.get(str(token)) != index
        if is_lost or (index == tokenizer.unk_token_id and str(token) != str(tokenizer.unk_token)):
            raise ConfigError(
                f"{kind} of the {role}'s tokenizer ({name}) is {str(token)!r}, which is not a token of its vocabulary",
                where=f"{role}.model",
                advice=[f"fix {kind} in the tokenizer's files", "use the tokenizer the model was made with"],
            )


@dataclass(frozen=True)
class _Speller:
    """How a decoder turns one token into bytes."""

    is_byte_level: bool
    has_bytes: bool
    replaced: tuple[tuple[str, str], ...]
    prefix: str = ""
    suffix: str = ""

    @staticmethod
    def of(tokenizer: Any) -> _Speller:
        parts = list(_decoders(tokenizer.backend_tokenizer.decoder))
        kinds = {part.get("type") for part in parts}
        replaced = [(_pattern(part), str(part["content"])) for part in parts if part.get("type") == "Replace"]
        if "Metaspace" in kinds:
            marks = [part.get("replacement", _SPACE_MARK) for part in parts if part.get("type") == "Metaspace"]
            replaced += [(str(mark), " ") for mark in marks]
        prefixes = [str(part["prefix"]) for part in parts if part.get("type") == "WordPiece"]
        suffixes = [str(part["suffix"]) for part in parts if part.get("type") == "BPEDecoder"]
        return _Speller(
            "ByteLevel" in kinds,
            "ByteFallback" in kinds,
            tuple((old, new) for old, new in replaced if old),
            next(iter(prefixes), ""),
            next(iter(suffixes), ""),
        )

    def __call__(self, token: str) -> bytes:
        if self.is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if self.has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self.prefix:
            token = token.removeprefix(self.prefix)
        if self.suffix:
            token = token.removesuffix(self.suffix)
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")


def _decoders(decoder: Any) -> Iterator[dict[str, Any]]:
    """The settings of a decoder, or of each one of a sequence."""
    if decoder is None:
        return
    state = json.loads(decoder.__getstate__())
    yield from state.get("decoders", [state])


def _pattern(part: dict[str, Any]) -> str:
    pattern = part.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters and the bytes they stand for: printable ones themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _tells_words_apart(tokenizer: Any) -> bool:
    """Whether two letters with a space between them are other tokens than without it."""

    def ids(text: str) -> Sequence[int]:
        return list(tokenizer([text], add_special_tokens=False)["input_ids"][0])

    return all(ids(f"{one} {other}") != ids(f"{one}{other}") for one, other in itertools.pairwise(_PROBES))


def _spells_spaces(spelled: Sequence[bytes]) -> bool:
    """Whether any token of more than a space begins or ends with one, or is one: then spaces are never implied."""
    return any(one[:1] == b" " or one[-1:] == b" " for one in spelled)
