"""What a teacher's answers say of itself, where it has no network on this machine that could be scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stillroom.teachers.signals import RowAnswer
from stillroom.types import Batch


def label_yardsticks(
    answers: Sequence[RowAnswer], batches: Sequence[Batch], *, parameters: int | None, source: str
) -> dict[str, Any] | None:
    """Perplexity and bits per byte, from the log-probabilities of the targets; None where there are none."""
    scored = np.concatenate([row.label_log_probs for row in answers] or [np.zeros(0)])
    scored = scored[np.isfinite(scored)]
    num_bytes = sum(int(batch.target_bytes.sum()) for batch in batches)
    if not len(scored):
        return None
    nll = -float(scored.sum())
    return {
        "perplexity": math.exp(min(nll / len(scored), 700.0)),
        "bits_per_byte": nll / math.log(2) / num_bytes if num_bytes else None,
        "kl": 0.0,
        "agreement": 1.0,
        "parameters": parameters,
        "source": source,
    }
