"""What an entry of the token store is found by: the content of the file, the tokenizer, and the settings.

An entry must never be shared by two ways of reading. So all settings of `[data]` count but those named here, which
choose what is read or act after tokenizing: a setting that is added later counts by itself. Of the sources only the
layout counts, so that a file is found again in any mixture.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from stillroom.config.data import DataConfig, Layout
from stillroom.data.bos import opening_ids
from stillroom.data.encode import Tokenizer

FORMAT = 2  # of the parts, and of how records are made and tokenized: raise it when either changes
SPANS = 1  # how spans of two tokenizers are found and kept: raise it when that changes
_AFTER_TOKENIZING = frozenset(
    {
        "train",
        "eval",
        "eval_share",
        "train_share",
        "streaming",
        "max_length",
        "packing",
        "group_by_length",
        "order",
        "short_first_share",
        "max_bad_share",
        "cache",
        "day",  # in the variant of the entry, where a template prints it
    }
)
_ORIGIN = ("is_local", "local_files_only", "name_or_path", "revision", "trust_remote_code", "token", "cache_dir")
_PACKAGES = ("tokenizers", "transformers")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokenizer_digest(tokenizer: Tokenizer) -> str | None:
    """A hash of everything a tokenizer would save, its class and the libraries. None if it cannot be saved."""
    save: Any = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        return None
    kind = type(tokenizer)
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}".encode())
    with tempfile.TemporaryDirectory(prefix="stillroom-") as folder:
        try:
            save(folder)
        except (NotImplementedError, OSError, TypeError, ValueError):  # a class without files, or with objects in them
            return None
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                contents = _without_origin(path)
                digest.update(f"{path.relative_to(folder).as_posix()}:{len(contents)}:".encode() + contents)
    facts = {
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "chat_template": tokenizer.chat_template,
        "eos": tokenizer.eos_token_id,
        "opening": opening_ids(tokenizer, "auto"),
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def tokenizers_digest(tokenizer: Tokenizer, teacher: Tokenizer | None) -> str | None:
    """That of one tokenizer, or of two with the way their spans are found."""
    if teacher is None:
        return tokenizer_digest(tokenizer)
    both = tokenizer_digest(tokenizer), tokenizer_digest(teacher)
    return None if None in both else f"spans {SPANS}: {both[0]} {both[1]}"


def _without_origin(path: Path) -> bytes:
    """A saved file, without the fields that say where the tokenizer was read from."""
    contents = path.read_bytes()
    if path.name != "tokenizer_config.json":
        return contents
    settings = json.loads(contents)
    return json.dumps({name: settings[name] for name in sorted(settings) if name not in _ORIGIN}).encode()


def entry_key(content: str, *, name: str, variant: str, tokenizer: str, config: DataConfig) -> str:
    """`name` is what the records are named after, `variant` how its records differ from those of the whole file.

    `config` has one source: its layout is that of the entry.
    """
    (source,) = config.sources
    settings = config.model_dump(mode="json", exclude={*_AFTER_TOKENIZING, *Layout.model_fields})
    layout = source.model_dump(mode="json", include=set(Layout.model_fields))
    facts = [FORMAT, content, name, variant, tokenizer, settings, layout]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]
