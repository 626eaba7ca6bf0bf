"""Small tokenizers of every kind, trained here: byte-level, unigram and BPE with bytes, WordPiece, characters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MORE = [
    "caf\u00e9 na\u00efve \u65e5\u672c\u8a9e \u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440",
    "def f(x):\n    return x",
    "\ufb01ne \u1e9b\u0323",
]


def _texts() -> list[str]:
    return [*tiny.sentences(120, 3), *_MORE]


def _wrapped(raw: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **names)


def byte_level(*, prefix: bool = False, size: int = 330, normalizer: Any = None) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(_texts(), trainer)
    return _wrapped(raw)


def unigram(*, fallback: bool = True, normalizer: Any = None) -> PreTrainedTokenizerFast:
    seed = Tokenizer(models.Unigram())
    seed.pre_tokenizer = pre_tokenizers.Metaspace()
    if normalizer is not None:
        seed.normalizer = normalizer
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False)
    seed.train_from_iterator(_texts(), trainer)
    pieces = sorted((token, score) for token, score in _scores(seed) if token not in _SPECIAL)  # trained in any order
    vocabulary = [*((token, 0.0) for token in _SPECIAL), *((one, -20.0) for one in _BYTES if fallback), *pieces]
    raw = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=fallback))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(raw)


def _scores(raw: Tokenizer) -> list[tuple[str, float]]:
    return [(token, score) for token, score in json.loads(raw.to_str())["model"]["vocab"]]


def llama_like() -> PreTrainedTokenizerFast:
    """BPE with byte fallback, and a space written before every text by the normalizer, as Llama 2's."""
    seed = Tokenizer(models.BPE())
    seed.pre_tokenizer = pre_tokenizers.Metaspace()
    seed.train_from_iterator(_texts(), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    trained = json.loads(seed.to_str())["model"]
    tokens = [*_SPECIAL, *_BYTES, *(token for token in trained["vocab"] if token not in _SPECIAL)]
    merges = [tuple(one) if isinstance(one, list) else tuple(one.split(" ")) for one in trained["merges"]]
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)}, merges,
        unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    raw = Tokenizer(model)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(raw)


def word_piece(*, lower: bool) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=lower)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(cleanup=False)
    raw.train_from_iterator(
        _texts(), trainers.WordPieceTrainer(vocab_size=200, special_tokens=_SPECIAL, show_progress=False)
    )
    return _wrapped(raw)


def characters() -> PreTrainedTokenizerFast:
    """One token for each character; those it has not seen are unknown."""
    seen = sorted({character for text in _texts() for character in text})
    raw = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate([*_SPECIAL, *seen])}, unk_token="<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return _wrapped(raw)


def spaceless() -> PreTrainedTokenizerFast:
    """Characters without white space: it is lost."""
    seen = sorted({character for text in _texts() for character in text if not character.isspace()})
    raw = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate([*_SPECIAL, *seen])}, unk_token="<unk>")
    )
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    raw.decoder = decoders.Fuse()
    return _wrapped(raw)


BUILDERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level with a prefix space": lambda: byte_level(prefix=True, size=300),
    "byte-level lower case": lambda: byte_level(normalizer=normalizers.Lowercase(), size=310),
    "byte-level NFKC": lambda: byte_level(normalizer=normalizers.NFKC(), size=320),
    "byte-level NFC": lambda: byte_level(normalizer=normalizers.NFC(), size=320),
    "unigram with bytes": unigram,
    "unigram NFKC": lambda: unigram(
        fallback=False, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    ),
    "BPE with bytes": llama_like,
    "WordPiece": lambda: word_piece(lower=False),
    "WordPiece lower case": lambda: word_piece(lower=True),
    "characters": characters,
}
EXACT = ("byte-level", "byte-level with a prefix space", "unigram with bytes", "BPE with bytes")


@cache
def built(name: str) -> PreTrainedTokenizerFast:
    return BUILDERS[name]()
