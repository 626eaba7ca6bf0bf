"""Quantiles of lengths, for `stillroom data` and the log."""

from __future__ import annotations

from typing import Any

import numpy as np

from stillroom.data.corpus import Corpus

QUANTILES = {"shortest": 0, "first_decile": 0.1, "median": 0.5, "ninth_decile": 0.9, "longest": 1}


def length_quantiles(counts: Any) -> dict[str, int]:
    """Quantiles of lengths, each of them one that occurs."""
    if not len(counts):
        return {}
    found = np.quantile(counts, list(QUANTILES.values()), method="nearest").tolist()
    return {name: int(value) for name, value in zip(QUANTILES, found, strict=True)}


def row_lengths(corpus: Corpus) -> dict[str, dict[str, int]]:
    """Quantiles of the rows' lengths in tokens, by side."""
    sides = {"train": corpus.train, "eval": corpus.evaluation}
    return {side: length_quantiles(rows.lengths) for side, rows in sides.items() if len(rows)}
