"""Yardsticks: numbers about a model that no objective, weight or curriculum can move.

Every yardstick is a ratio of sums, so it is the same whatever the batches were, and one formula serves the point
estimate and each bootstrap resample. Sums are kept for each document: tokens of one document are not independent,
so the documents are what is drawn (Efron and Tibshirani 1993, percentile intervals).

Legend: F columns of sums, U units that are drawn, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TOP_K = 5
NUM_BINS = 15  # of confidence, equally wide (Guo et al. 2017)
NUM_RESAMPLES = 1000
COVERAGE = 0.95
MAX_UNITS = 1000
MIN_DOCUMENTS = 8  # with fewer, resampling says next to nothing: of two there are three different resamples
_SEED = 20150
_MAX_NLL = math.log(1e30)  # above this a perplexity is no longer a number worth printing

# What is summed for each document; after these come NUM_BINS counts, confidences and hits.
COLUMNS = (
    "nll",  # of the targets that could be scored
    "targets",
    "bytes",  # of those targets
    "unscored",  # targets whose probability is not finite
    "kl",
    "agree",  # the likeliest token is the teacher's
    "found",  # the teacher's likeliest token is among the student's TOP_K
    "shared",  # TOP_K of both, the share in common
    "accepted",  # sum over tokens of min(p, q), which is 1 - total variation
    "compared",  # positions at which both models gave a distribution
    "uncompared",
)
NUM_COLUMNS = len(COLUMNS) + 3 * NUM_BINS
_PLACE = {name: place for place, name in enumerate(COLUMNS)}


class Ledger:
    """Sums by document, in the order in which documents were met."""

    def __init__(self) -> None:
        self._sums: dict[str, Floats] = {}

    def add(self, documents: Sequence[str], table: Floats) -> None:
        """Add a table [rows, F] whose rows belong to the named documents."""
        for document, row in zip(documents, table, strict=True):
            known = self._sums.get(document)
            self._sums[document] = row.copy() if known is None else known + row

    @property
    def num_documents(self) -> int:
        return len(self._sums)

    @property
    def totals(self) -> Floats:
        if not self._sums:
            return np.zeros(NUM_COLUMNS)
        total: Floats = np.stack(list(self._sums.values())).sum(axis=0)
        return total

    def total(self, column: str) -> float:
        return float(self.totals[_PLACE[column]])

    def values(self) -> dict[str, float | None]:
        """Each yardstick, or None where nothing was there to measure it with."""
        totals = self.totals
        is_compared = totals[_PLACE["compared"]] > 0
        return {
            name: None if name in AGAINST_TEACHER and not is_compared else float(value)
            for name, value in ratios(totals).items()
        }

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % percentile interval of each yardstick that has a value; nothing below MIN_DOCUMENTS documents."""
        if self.num_documents < MIN_DOCUMENTS:
            return {}
        sums = np.stack(list(self._sums.values()))
        if len(sums) > MAX_UNITS:
            # Beyond a thousand documents, every thousandth is drawn together: the interval stays, the cost is bounded.
            units = np.zeros((MAX_UNITS, NUM_COLUMNS))
            np.add.at(units, np.arange(len(sums)) % MAX_UNITS, sums)
            sums = units
        resampled = ratios(_draws(len(sums)) @ sums)
        tail = (1.0 - COVERAGE) / 2
        measured = {name for name, value in self.values().items() if value is not None}
        return {
            name: (_order(values, tail), _order(values, 1.0 - tail))
            for name, values in resampled.items()
            if name in measured
        }


AGAINST_TEACHER = frozenset({"kl", "agreement", "top5_agreement", "top5_overlap", "acceptance"})


def ratios(totals: Floats) -> dict[str, Floats]:
    """The yardsticks of sums [..., F]; NaN where a denominator is 0."""
    column: Mapping[str, Floats] = {name: totals[..., place] for name, place in _PLACE.items()}
    bins = totals[..., len(COLUMNS) :].reshape(*totals.shape[:-1], 3, NUM_BINS)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        nll = column["nll"] / column["targets"]
        # Sum over bins of |hits - confidence|: each bin's gap weighted by its share of the targets.
        gap = np.abs(bins[..., 2, :] - bins[..., 1, :]).sum(axis=-1)
        return {
            "perplexity": np.where(nll >= _MAX_NLL, np.inf, np.exp(nll)),
            "bits_per_byte": column["nll"] / math.log(2) / column["bytes"],
            "kl": column["kl"] / column["compared"],
            "agreement": column["agree"] / column["compared"],
            "top5_agreement": column["found"] / column["compared"],
            "top5_overlap": column["shared"] / column["compared"],
            "acceptance": column["accepted"] / column["compared"],
            "calibration_error": gap / column["targets"],
        }


@lru_cache(maxsize=4)
def _draws(num_units: int) -> Floats:
    """How often each unit is in each resample. [R, U], the same for the same number of units."""
    chances = np.full(num_units, 1.0 / num_units)
    drawn: Floats = np.random.default_rng(_SEED).multinomial(num_units, chances, size=NUM_RESAMPLES).astype(np.float64)
    return drawn


def _order(values: Floats, share: float) -> float:
    """An order statistic: no interpolation, so that an infinite perplexity stays infinite and is not made NaN."""
    return float(np.quantile(values, share, method="inverted_cdf"))
