"""Compare what was written with what it was written from, by logits on real text.

Two differences are told apart. What the form itself costs: weights in half precision or eight bits give other
answers. And what should be nothing: the file read back must give the logits of the very weights
that it is meant to hold.

# L positions of a row, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillroom.builtin.corpus import own_text, topics
from stillroom.config.schema import DataConfig
from stillroom.data import fixed_rows, open_eval, opening_ids
from stillroom.errors import CannotSave, ConfigError, DataError
from stillroom.remote import is_url

NUM_ROWS, LENGTH = 4, 64
_MAX_RECORDS = 32
# Mean KL in nats. The largest difference of a logit is no measure here: a router that chooses another expert at one
# position moves it far.
_ROUNDED = {"float32": 1e-6, "float16": 0.01, "bfloat16": 0.1, "q8_0": 0.1}

Row = list[int]


@dataclass(frozen=True)
class Difference:
    """How far logits differ from expected ones."""

    largest: float
    kl: float  # mean over positions, of the expected distribution from the other
    tokens: int


def rows_of(spec: str, tokenizer: Any) -> list[Row]:
    """A few rows of a text that was named."""
    config = DataConfig(train=spec, max_length=LENGTH, max_records=_MAX_RECORDS)
    rows = open_eval(spec, tokenizer, config).evaluation
    return [rows.row(int(index)).tolist()[:LENGTH] for index in fixed_rows(rows, NUM_ROWS, 1)]


def own_rows(tokenizer: Any) -> list[Row]:
    """A few rows of the text that every Python brings."""
    documents = list(topics()) or list(own_text())
    chosen = documents[:: max(1, len(documents) // NUM_ROWS)][:NUM_ROWS]
    opening = list(opening_ids(tokenizer, "auto"))
    texts = tokenizer([document.text[: 16 * LENGTH] for document in chosen], add_special_tokens=False)["input_ids"]
    return [[*opening, *ids][:LENGTH] for ids in texts]


def choose_rows(named: str | None, of_run: Sequence[str], tokenizer: Any) -> tuple[list[Row], str]:
    """Rows to compare on, and where they are from: the named text, else the run's own, else Python's."""
    if named is not None:
        return rows_of(named, tokenizer), named
    for spec in of_run:
        if spec.startswith(("builtin:", "hf:")) or is_url(spec):
            continue  # the first is read as below; others are fetched only where the user names them
        try:
            rows = rows_of(spec, tokenizer)
        except (DataError, ConfigError):  # moved or gone since: any text will do
            continue
        if rows:
            return rows, spec
    return own_rows(tokenizer), "the reference pages of this Python"


@torch.no_grad()
def logits_of(network: Any, rows: Sequence[Row]) -> list[Tensor]:
    """The logits of each row, on the CPU and in FP32. [L, V] each"""
    device = next(network.parameters()).device
    answers = [network(input_ids=torch.tensor([row], device=device), use_cache=False).logits[0] for row in rows]
    return [logits.float().cpu() for logits in answers]


def difference(expected: Sequence[Tensor], given: Sequence[Tensor]) -> Difference:
    """How far the given logits differ. A value that is not finite is an infinite difference."""
    wanted, found = torch.cat(list(expected)).double(), torch.cat(list(given)).double()
    size = min(wanted.shape[1], found.shape[1])  # a format may leave out padding of the head, or add it
    wanted, found = wanted[:, :size], found[:, :size]
    apart = (wanted - found).abs().max()
    largest = float(apart) if bool(torch.isfinite(apart)) else math.inf
    kl = float(_kl(torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)).mean())
    return Difference(largest, kl if math.isfinite(kl) else math.inf, len(wanted))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of each row as a sum of terms that are not negative. [L, V] -> [L]

    The terms of sum p d, d = log p - log q, have both signs and the size of d, and cancel to about d^2 / 2: of nearly
    equal distributions rounding remains, which may be below zero. Both sum to 1, so sum p (d + e^-d - 1) is the same
    number, and e^-d - 1 >= -d.
    """
    apart = log_p - log_q
    return (log_p.exp() * (apart + torch.expm1(-apart))).sum(-1)


def refuse_rounded(form: str, cost: Difference) -> None:
    """Refuse a form that changes the model too much."""
    bound = _ROUNDED[form]
    if cost.kl <= bound and math.isfinite(cost.largest):
        return
    raise CannotSave(
        f"in {form} the model answers differently: mean KL {cost.kl:.3g} (bound {bound:g}), largest difference of a "
        f"logit {cost.largest:.3g}; nothing was written",
        advice=["export in float32", "bfloat16 has the range of float32 where float16 overflows"],
    )


def refuse_changed(what: str, change: Difference, bound: float) -> None:
    """Refuse a file whose logits, read back, are not those of the weights it is meant to hold."""
    if change.largest <= bound:
        return
    raise CannotSave(
        f"{what}, read back, gives other logits: the largest difference is {change.largest:.3g} (bound {bound:g}); "
        "nothing was written",
        advice=["try --format hf", "if that works, this architecture is not written rightly: please report it"],
    )
