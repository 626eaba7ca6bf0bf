"""Sum the terms of a step for each source of the training data. A micro-batch holds rows of one source.

Of a source that is learned from the labels alone only the terms that need no teacher are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stillroom.core.types import Batch, Score
from stillroom.data.loader import MixedRows
from stillroom.training.run import Run

Sums = dict[str, Tensor]  # by source and term


def source_of(batch: Batch) -> str:
    """The source of a batch; empty where the training data has one, or the batch several."""
    return batch.sources[0] if len(set(batch.sources)) == 1 else ""


def add_score(sums: Sums, batch: Batch, score: Score) -> None:
    if source := source_of(batch):
        for term, value in score.terms.items():
            key = _key(source, term)
            sums[key] = sums[key] + value.total if key in sums else value.total


def shared(run: Run, summed: dict[str, Tensor], zero: Tensor) -> dict[str, Tensor]:
    """The sums of a step under the names of all processes, 0 for one that this process lacks.

    A process may have no batch of a source, or none that the teacher is asked about.
    """
    return {name: summed.get(name, zero) for name in run.parallel.names(summed)}


def source_counts(run: Run, window: Sequence[Batch]) -> dict[str, int]:
    """What the terms of each source are divided by, under keys that no term has."""
    counts: dict[str, int] = {}
    for name in run.config.source_names:
        own = [batch for batch in window if source_of(batch) == name]
        counts |= {_key(name, term): count for term, count in run.mix.counts(own).items()}
    return counts


def source_means(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """For each source with targets in the window, its number of targets and the mean of each term."""
    means: dict[str, dict[str, float]] = {}
    for key, total in sums.items():
        if count := counts[key]:
            name, _, term = key.rpartition("\n")
            means.setdefault(name, {"targets": counts[_key(name, "ce")]})[term] = total / count
    return means


def source_rows(run: Run, cursor: int) -> list[dict[str, Any]]:
    """What the summary says of each source: `epochs` is how often it was seen after `cursor` windows."""
    rows = run.corpus.train
    if not isinstance(rows, MixedRows):
        return []
    epochs = run.loader.epochs(cursor)
    return [
        {
            "name": part.name,
            "weight": part.weight,
            "objectives": "labels" if part.name in run.config.data.label_sources else "all",
            "rows": len(part.rows),
            "targets": part.rows.num_targets,
            "epochs": round(epochs * part.rows_per_epoch / len(part.rows), 4),
        }
        for part in rows.parts
    ]


def _key(source: str, term: str) -> str:
    return f"{source}\n{term}"  # a term is a word, so no term has such a name
