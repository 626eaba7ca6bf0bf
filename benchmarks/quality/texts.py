"""The texts of the experiments: the standard library, the C++ headers of torch as a niche far from it.

Both lie on every machine that can run the laboratory, so nothing is downloaded. What is held out is decided by the
name of the package (Python) or folder (C++), halved into dev and test by the same rule: learning rates and
checkpoints are chosen on dev, and only test is reported. `cpp-near` has the training text of `cpp`, and other files of
the same folders held out. One byte-level tokenizer serves all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stillroom import builtin as stdlib
from stillroom.data import Encoder, Record, Rows, Tally, pack

CACHE = Path(__file__).parent / ".cache"
VOCAB = 512
LENGTH = 64
BATCH = 16
TOKENS_A_STEP = LENGTH * BATCH
EVAL_TOKENS = 61_440  # of dev and of test alike: 960 rows
NICHE_SHARE = 1 / 16  # of the generalist's text, and of the tokenizer's
_HELD_OUT_SHARE = 0.15
_MAX_BYTES = 200_000  # longer headers are tables written by a generator
_NEAR_DOCUMENTS = 0.26  # those after the share to train on, held out as `cpp-near`: no teacher has seen them
_NICHE_DOCUMENTS = 0.2  # of the headers to train on: the niche is scarce by design, and encoding all takes a minute
_SKIPPED = ("ATen/ops", "google", "sleef", "ittnotify")


@dataclass(frozen=True)
class Domain:
    """Rows to train on and two disjoint held-out sets."""

    train: Rows
    dev: Rows
    test: Rows


def _headers() -> Iterator[stdlib.Document]:
    root = Path(torch.__file__).parent / "include"
    for path in sorted(root.rglob("*.h")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_SKIPPED) and path.stat().st_size <= _MAX_BYTES:
            yield stdlib.Document(name, path.parent.relative_to(root).as_posix(), path.read_text(errors="replace"))


def _side(document: stdlib.Document, domain: str) -> str:
    place = stdlib.hash_share(f"{domain}:{document.group}")
    if domain == "python":
        if stdlib.split_of(document.group) == "train":
            return "train"
    elif place >= _HELD_OUT_SHARE:
        return "train"
    return "dev" if stdlib.hash_share(f"half:{document.group}") < 0.5 else "test"


@functools.cache
def documents(domain: str) -> dict[str, list[stdlib.Document]]:
    """The documents of a domain by side: train, dev, test."""
    found = [*stdlib.topics(), *stdlib.modules()] if domain == "python" else list(_headers())
    if not found:
        raise SystemExit(f"this installation carries no {domain} text: the experiments have nothing to learn from")
    sides: dict[str, list[stdlib.Document]] = {"train": [], "dev": [], "test": []}
    if domain == "cpp-near":
        sides["train"] = documents("cpp")["train"]
        for document in found:
            is_near = _NICHE_DOCUMENTS <= stdlib.hash_share(document.name) < _NEAR_DOCUMENTS
            if is_near and _side(document, "cpp") == "train":
                sides["dev" if stdlib.hash_share(f"half:{document.name}") < 0.5 else "test"].append(document)
        return sides
    for document in found:
        side = _side(document, domain)
        if domain == "python" or side != "train" or stdlib.hash_share(document.name) < _NICHE_DOCUMENTS:
            sides[side].append(document)
    return sides


@functools.cache
def tokenizer() -> Any:
    """Byte-level BPE over the training text of both domains, the niche at its share of the generalist's text."""
    folder = CACHE / f"tokenizer-{VOCAB}"
    if not (folder / "tokenizer.json").exists():
        _train_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _train_tokenizer() -> Any:
    home = [document.text for document in documents("python")["train"]]
    wanted = sum(map(len, home)) * NICHE_SHARE
    niche: list[str] = []
    for document in documents("cpp")["train"]:
        if sum(map(len, niche)) < wanted:
            niche.append(document.text)
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([*home, *niche], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|endoftext|>", pad_token="<|pad|>")


@functools.cache
def domain(name: str) -> Domain:
    """The rows of `python` or `cpp`: full blocks only, so that every step has the same number of targets."""
    sides = {}
    for side, found in documents(name).items():
        records = [Record(document.name, ((document.text, True),), document.name, document.group) for document in found]
        rows = pack(Encoder(tokenizer(), Tally())(records), "blocks", LENGTH, Tally())
        full = [row for row in range(len(rows)) if len(rows.row(row)) == LENGTH + 1]
        if side != "train":
            # Spread evenly over all held-out documents, as the product's own evaluation does.
            wanted = min(len(full), EVAL_TOKENS // LENGTH)
            full = [full[number * len(full) // wanted] for number in range(wanted)]
        sides[side] = choose(rows, full)
    return Domain(**sides)


def choose(rows: Rows, numbers: list[int] | np.ndarray) -> Rows:
    """Some rows, in the given order."""
    picked = np.asarray(numbers, dtype=np.int64)
    return Rows(rows._encoded, rows._starts[picked], rows._ends[picked], names_offsets=True)


@functools.cache
def transfer_set(name: str, num_tokens: int) -> Rows:
    """`num_tokens` of a domain's training text: rows drawn from all of it, a smaller set inside every larger one."""
    rows = domain(name).train
    order = np.random.default_rng(0).permutation(len(rows))
    return choose(rows, order[: num_tokens // LENGTH] if num_tokens else order)
