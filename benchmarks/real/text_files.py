"""The texts: English that lies on every machine, in files that the runs are given.

Trained on: pages of the language reference and docstrings of the standard library. Held out: docstrings of other
packages (dev, which learning rates are chosen on, and test, which is reported), split by the name of the package as
the laboratory does; and C++ headers of torch (far), which nothing here resembles. Each document is cut after its first
characters, so that many documents make up a few thousand tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "quality"))

import texts as laboratory
from arms import COMPUTE_TOKENS, DEV_BATCHES, FAR_TOKENS, LENGTH, ROWS, TEST_TOKENS, TOKENS

from stillroom import builtin as stdlib

_CHARACTERS = 6_000
_SLACK = 2 * LENGTH  # the last block of a file may be short


@dataclass(frozen=True)
class Texts:
    """The files, each of JSON lines."""

    train: Path  # what the arms at equal tokens read
    more: Path  # the same and as much again, for plain training at equal compute
    dev: Path
    test: Path
    far: Path


def write_texts(folder: Path, tokenizer: Any) -> Texts:
    """Write the files that are missing. Documents are taken in the order of a hash of their names."""
    made = Texts(*(folder / f"{name}.jsonl" for name in ("train", "more", "dev", "test", "far")))
    sides: dict[str, list[stdlib.Document]] = {"train": [], "dev": [], "test": []}
    for document in (*stdlib.topics(), *stdlib.docstrings()):
        sides[_side(document.group)].append(document)
    far = [document for side in ("dev", "test") for document in laboratory.documents("cpp")[side]]
    folder.mkdir(parents=True, exist_ok=True)
    for path, documents, tokens in (
        (made.train, sides["train"], TOKENS + _SLACK),
        (made.more, sides["train"], COMPUTE_TOKENS + _SLACK),
        (made.dev, sides["dev"], DEV_BATCHES * ROWS * LENGTH + _SLACK),
        (made.test, sides["test"], TEST_TOKENS),
        (made.far, far, FAR_TOKENS),
    ):
        if not path.exists():
            _write(path, documents, tokens, tokenizer)
    return made


def _side(group: str) -> str:
    if stdlib.split_of(group) == "train":
        return "train"
    return "dev" if stdlib.hash_share(f"half:{group}") < 0.5 else "test"


def _write(path: Path, documents: Iterable[stdlib.Document], tokens: int, tokenizer: Any) -> None:
    lines, left = [], tokens
    for document in sorted(documents, key=lambda one: stdlib.hash_share(one.name)):
        if left <= 0:
            break
        text = document.text[:_CHARACTERS]
        lines.append(json.dumps({"id": document.name, "text": text}))
        left -= len(tokenizer(text, verbose=False)["input_ids"])
    if left > 0:
        raise SystemExit(f"{path.name} wants {tokens:,} tokens, and this Python has {left:,} fewer of such text")
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)
