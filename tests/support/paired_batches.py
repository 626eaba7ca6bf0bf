"""Batches of two tokenizers, and models of random weights that answer them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pair_tokenizers
import tiny
import torch

from stillroom.config.schema import DataConfig
from stillroom.core.types import Batch, HeadWeights, PairedSignal, StudentView
from stillroom.data import Corpus, open_data

PAIR = ("byte-level", "BPE with bytes")


def corpus(folder: Path, student: str = PAIR[0], teacher: str = PAIR[1], **over: Any) -> Corpus:
    path = tiny.save_text(folder / "paired.jsonl", 60, seed=5)
    config = DataConfig(train=str(path), **{"max_length": 24, **over})
    return open_data(config, pair_tokenizers.built(student), teacher_tokenizer=pair_tokenizers.built(teacher))


@dataclass(frozen=True)
class Heads:
    """Hidden states and heads of both sides for a batch."""

    view: StudentView
    signal: PairedSignal

    def rows(self, batch: Batch, rows: slice) -> Heads:
        """What belongs to some rows of the batch."""
        assert batch.other is not None
        ours = _in_rows(batch, rows)
        theirs = _in_rows(batch.other, rows)
        taps = {name: tap[rows] for name, tap in self.view.taps.items()}
        view = replace(self.view, hidden=self.view.hidden[ours], taps=taps)
        told = {name: tap[rows] for name, tap in self.signal.taps.items()}
        return Heads(view, replace(self.signal, hidden=self.signal.hidden[theirs], taps=told))


def _in_rows(batch: Batch, rows: slice) -> torch.Tensor:
    lines = batch.positions // batch.input_ids.shape[1]
    return (lines >= rows.start) & (lines < rows.stop)


@cache
def sizes(name: str) -> int:
    return len(pair_tokenizers.built(name))


def heads(
    batch: Batch, *, dtype: torch.dtype = torch.float32, pair: tuple[str, str] = PAIR, width: int = 12, seed: int = 0
) -> Heads:
    """Random hidden states and taps [B, L, D]; what the heads read is a function of the row alone."""
    assert batch.other is not None
    generator = torch.Generator().manual_seed(seed)

    def side(own: Batch, size: int, width: int) -> tuple[torch.Tensor, HeadWeights, dict[str, torch.Tensor]]:
        states = torch.randn(*own.input_ids.shape, width, generator=generator, dtype=torch.float64)
        weight = torch.randn(size, width, generator=generator, dtype=torch.float64)
        states, weight = states.to(dtype), weight.to(dtype)
        hidden = states.reshape(-1, width).index_select(0, own.positions)
        return hidden.requires_grad_(), HeadWeights(weight.requires_grad_()), {"hidden.0": states.requires_grad_()}

    view = StudentView(*side(batch, sizes(pair[0]), width), positions=batch.positions)
    hidden, head, taps = side(batch.other, sizes(pair[1]), width + 4)
    signal = PairedSignal(hidden.detach(), HeadWeights(head.weight.detach()), {n: t.detach() for n, t in taps.items()})
    return Heads(view, signal)
