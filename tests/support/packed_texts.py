"""Random texts, and rows that hold several of them."""

from __future__ import annotations

import tiny
import torch

from stillroom.core.types import IGNORED, Batch

LENGTHS = ((9, 1, 6), (4, 11))  # of the texts of two rows


def texts() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randint(2, tiny.VOCAB, (length + 1,), generator=generator) for length in row] for row in LENGTHS]


def batch_of(rows: list[list[torch.Tensor]]) -> Batch:
    """Each row's texts, one after the other, padded on the right."""
    width = max(sum(len(text) - 1 for text in row) for row in rows)
    ids, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), IGNORED)
    segments = torch.full((len(rows), width), -1)
    for line, row in enumerate(rows):
        place = 0
        for number, text in enumerate(row):
            here = slice(place, place + len(text) - 1)
            ids[line, here], targets[line, here], segments[line, here] = text[:-1], text[1:], number
            place = here.stop
    mask = (segments >= 0).long()
    return Batch(ids, mask, targets, mask, tuple(f"row-{line}" for line in range(len(rows))), segments=segments)
