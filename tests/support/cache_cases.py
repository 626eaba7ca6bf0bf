"""Rows of random tokens and a teacher made of two matrices: caches of it are written in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiny
import torch

from stillroom.core.types import IGNORED, Batch, HeadWeights
from stillroom.data import Encoded, Rows
from stillroom.teachers.cache.manifest import Manifest
from stillroom.teachers.cache.reader import Cache
from stillroom.teachers.cache.writer import NeededRow, needed_rows, open_store, write_missing
from stillroom.teachers.signals import RowAnswer, SignalSpec, reduce_row

VOCAB = 97
HYBRID = SignalSpec("hybrid", 4, 6)
IDENTITY = {"weights": "w", "config": "c", "adapter": "none", "quantisation": "none", "dtype": "float32"}


def rows_of(lengths: Sequence[int], seed: int = 0, *, prompt: int = 0) -> Rows:
    """A row of so many inputs for each length; the first `prompt` targets of each are not scored."""
    generator = np.random.default_rng(seed)
    sizes = np.array([length + 1 for length in lengths])
    ids = generator.integers(0, VOCAB, sizes.sum()).astype(np.int32)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    is_scored = np.concatenate([np.arange(size) > prompt for size in sizes])
    names = tuple(f"row {seed}.{number}" for number in range(len(sizes)))
    encoded = Encoded(ids, np.ones_like(ids), is_scored, bounds, names, names)
    return Rows(encoded, bounds[:-1], bounds[1:], pad_id=1)


class Matrices:
    """Answers a row from its tokens, one row at a time, and counts what it is asked."""

    def __init__(self, spec: SignalSpec = HYBRID, *, batch_tokens: int = 64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.spec = spec
        self.batch_tokens = batch_tokens
        self.num_asked = 0
        self._embedding = torch.randn(VOCAB, 8, generator=generator)
        self.head = HeadWeights(torch.randn(VOCAB, 8, generator=generator) * 1.5)

    def answer_rows(self, batch: Batch, specs: Sequence[SignalSpec] = ()) -> list[list[RowAnswer]]:
        self.num_asked += len(batch.keys)
        return [self.answers(batch, spec) for spec in specs]

    def answers(self, batch: Batch, spec: SignalSpec | None = None) -> list[RowAnswer]:
        answers = []
        for ids, targets, key in zip(batch.input_ids, batch.targets, batch.keys, strict=True):
            chosen = (targets != IGNORED).nonzero().squeeze(-1)
            hidden = self._embedding[ids].cumsum(0)[chosen] / (chosen[:, None] + 1).sqrt()
            answers.append(reduce_row(hidden, self.head, targets[chosen], spec or self.spec, key))
        return answers


def manifest(spec: SignalSpec = HYBRID, *, shard_tokens: int = 60, **over: object) -> Manifest:
    return Manifest(spec, VOCAB, "tokens", {**IDENTITY, **over}, {"teacher": "matrices"}, shard_tokens)


def write(
    folder: Path, rows: Rows, spec: SignalSpec = HYBRID, teacher: Matrices | None = None, shard_tokens: int = 60
) -> Cache:
    """A finished cache of all rows."""
    open_store(folder, manifest(spec, shard_tokens=shard_tokens))
    assert write_missing(folder, needed(rows), teacher or Matrices(spec))
    return Cache(folder)


def needed(*many: Rows) -> list[NeededRow]:
    return needed_rows((rows, range(len(rows))) for rows in many)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def same(one: RowAnswer, other: RowAnswer) -> bool:
    names = ("ids", "log_probs", "tail", "entropy", "label", "drawn")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def spoil(path: Path, place: int) -> None:
    """Change one bit of one byte; a negative place counts from the end."""
    held = bytearray(path.read_bytes())
    held[place] ^= 0x10
    path.write_bytes(bytes(held))


def save_world(folder: Path) -> Path:
    """A trained teacher, a student and few rows of text, as a user would have them."""
    tiny.save_trained(folder / "teacher", width=32, num_layers=1, steps=60)
    tiny.save_model(folder / "student", "llama", width=16, num_layers=1, seed=2)
    tiny.save_text(folder / "train.jsonl", count=60)
    return folder
