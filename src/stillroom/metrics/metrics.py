"""Metrics of a model that do not depend on objective, weights or curriculum.

Every metric is a ratio of sums, so it does not depend on the batches, and one formula gives the point estimate and
each bootstrap resample. Sums are kept by document and documents are resampled, because tokens of one document are not
independent (Efron and Tibshirani 1993, percentile intervals).

Legend: F columns of sums, U resampled units, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TOP_K = 5
NUM_BINS = 15  # of equal width in confidence (Guo et al. 2017)
NUM_RESAMPLES = 1000
COVERAGE = 0.95
MAX_UNITS = 1000
MIN_DOCUMENTS = 8  # with fewer there are too few different resamples: of two documents, three
_SEED = 20150
_Z = 1.959964  # of a 95 % interval
_MAX_NLL = math.log(1e30)  # above this the perplexity is given as infinite

# The sums of each document; NUM_BINS counts, confidences and hits follow.
COLUMNS = (
    "nll",  # of the targets that could be scored
    "targets",
    "bytes",  # of those targets
    "unscored",  # targets whose probability is not finite
    "kl",
    "agree",  # the top token is the teacher's
    "in_top_k",  # the teacher's top token is among the student's TOP_K
    "shared",  # share of TOP_K that both have
    "accepted",  # sum over tokens of min(p, q), which is 1 - total variation
    "compared",  # positions at which both models gave a distribution
    "uncompared",
    "span_kl",  # of spans that two tokenizers share
    "span_bytes",
)
NUM_COLUMNS = len(COLUMNS) + 3 * NUM_BINS
_PLACE = {name: place for place, name in enumerate(COLUMNS)}


class Ledger:
    """Sums by document, in the order in which documents were added."""

    def __init__(self) -> None:
        self._sums: dict[str, Floats] = {}

    def add(self, documents: Sequence[str], table: Floats) -> None:
        """Add a table [len(documents), F] of sums."""
        for document, sums in zip(documents, table, strict=True):
            before = self._sums.get(document)
            self._sums[document] = sums.copy() if before is None else before + sums

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
        """Each metric; None for a comparison without compared positions."""
        totals = self.totals
        is_compared = totals[_PLACE["compared"]] > 0
        unmeasured = frozenset({"kl_per_byte"}) if not totals[_PLACE["span_bytes"]] else frozenset()
        return {
            name: None if name in AGAINST_TEACHER and not is_compared else float(value)
            for name, value in ratios(totals).items()
            if name not in unmeasured
        }

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % percentile interval of each metric with a value; empty below MIN_DOCUMENTS documents."""
        if self.num_documents < MIN_DOCUMENTS:
            return {}
        sums = np.stack(list(self._sums.values()))
        if len(sums) > MAX_UNITS:
            # Above MAX_UNITS documents, resample groups of every MAX_UNITS-th document, to bound the cost.
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
    """The metrics of sums [..., F]; NaN where a denominator is 0."""
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
            "top5_agreement": column["in_top_k"] / column["compared"],
            "top5_overlap": column["shared"] / column["compared"],
            "acceptance": column["accepted"] / column["compared"],
            "calibration_error": gap / column["targets"],
            "kl_per_byte": column["span_kl"] / math.log(2) / column["span_bytes"],
        }


def ratio_interval(numerators: Floats, denominators: Floats) -> tuple[float, float] | None:
    """The 95 % percentile interval of a ratio of sums over units [U]; None below MIN_DOCUMENTS units."""
    if len(numerators) < MIN_DOCUMENTS:
        return None
    drawn, tail = _draws(len(numerators)), (1.0 - COVERAGE) / 2
    values = (drawn @ numerators) / (drawn @ denominators)
    return _order(values, tail), _order(values, 1.0 - tail)


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): right for few questions and shares near 0 and 1."""
    share, squared = hits / total, _Z * _Z / total
    middle = (share + squared / 2) / (1 + squared)
    width = _Z * math.sqrt(share * (1 - share) / total + squared / (4 * total)) / (1 + squared)
    return max(0.0, middle - width), min(1.0, middle + width)


@lru_cache(maxsize=4)
def _draws(num_units: int) -> Floats:
    """How often each unit is in each resample. [R, U]; depends only on the number of units."""
    chances = np.full(num_units, 1.0 / num_units)
    drawn: Floats = np.random.default_rng(_SEED).multinomial(num_units, chances, size=NUM_RESAMPLES).astype(np.float64)
    return drawn


def _order(values: Floats, share: float) -> float:
    """An order statistic without interpolation, which would turn an infinite perplexity into NaN."""
    return float(np.quantile(values, share, method="inverted_cdf"))
