"""The tokenizer as metadata of a GGUF file: byte-level BPE, and BPE of SentencePiece's kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stillroom.errors import ConfigError

_SPACE = "\u2581"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
# How texts are split before merging: llama.cpp knows ways by name, not by pattern.
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}


def add_words(writer: Any, library: Any, tokenizer: Any, num_rows: int, notes: list[str]) -> None:
    """Add vocabulary, merges, special tokens and chat template. Vocabularies are padded to the model's rows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    record = json.loads(backend.to_str()) if backend is not None else {}
    model = record.get("model") or {}
    if model.get("type") != "BPE":
        kind = model.get("type") or type(tokenizer).__name__
        raise ConfigError(
            f"a tokenizer of the kind {kind} is not written as GGUF",
            where="--format gguf",
            advice=["--format hf writes every tokenizer"],
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    is_byte_level = "ByteLevel" in json.dumps(record.get("pre_tokenizer"))
    words, kinds = _vocabulary(library, tokenizer, model, record, num_rows)
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_tokenizer_pre(_split_name(record, notes) if is_byte_level else "default")
    writer.add_token_list(words)
    if not is_byte_level:
        writer.add_token_scores(_scores(words, merges))
        writer.add_add_space_prefix(_adds_space(tokenizer))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{role}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{role}_token_id")(int(number))
    whole = list(tokenizer("a")["input_ids"])
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and whole[:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and whole[-1:] == [tokenizer.eos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _vocabulary(
    library: Any, tokenizer: Any, model: Mapping[str, Any], record: Mapping[str, Any], num_rows: int
) -> tuple[list[str], list[int]]:
    """Each row of the model as a token and its kind."""
    kind = library.TokenType
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in record.get("added_tokens") or ()}
    special = set(tokenizer.all_special_ids)
    tokens, kinds = [], []
    for number in range(max(num_rows, len(words))):
        word = words.get(number)
        tokens.append(word if word is not None else f"[PAD{number}]")
        if word is None:
            kinds.append(kind.UNUSED)
        elif number in added or number in special:
            is_control = number in special or added[number]["special"]
            is_unknown = number == tokenizer.unk_token_id and word == model.get("unk_token")
            kinds.append(kind.UNKNOWN if is_unknown else kind.CONTROL if is_control else kind.USER_DEFINED)
        elif model.get("byte_fallback") and len(word) == 6 and word.startswith("<0x"):
            kinds.append(kind.BYTE)
        else:
            kinds.append(kind.NORMAL)
    return tokens, [int(one) for one in kinds]


def _scores(words: Sequence[str], merges: Sequence[str]) -> list[float]:
    """llama.cpp merges the pair with the highest score: an earlier merge has a higher one."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(word, len(merges))) for word in words]


def _adds_space(tokenizer: Any) -> bool:
    first = str(tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"][:1])[0])
    return first.startswith(_SPACE)


def _split_name(record: Mapping[str, Any], notes: list[str]) -> str:
    """The name llama.cpp has for this way of splitting; its default if it has none, with a note."""
    split = record.get("pre_tokenizer") or {}
    steps = split.get("pretokenizers") or [split]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = (steps[0].get("pattern") or {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
    if pattern in _SPLITS:
        return _SPLITS[pattern]
    notes.append("llama.cpp has no name for the way this tokenizer splits texts: its default is named, and may differ")
    return "default"
