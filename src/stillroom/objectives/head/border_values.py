"""Checks of tensor values: labels and ids inside the vocabulary, masses that sum to 1.

They are computed on the tensors' device and read in one copy. The mix does not call them: its labels and its teacher's
answers are checked where they are made, because a training step may read from the device only once.

A stored row with NaN or infinite mass is accepted: a broken teacher writes such rows, and the pass counts them and
scores them by their labels.

Legend: N positions, V vocabulary, K kept ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.config.sections import LEAST_TEMPERATURE
from stillroom.errors import ConfigError
from stillroom.objectives.head.sparse import without_empty_tail
from stillroom.types import SampledSignal, Signal, TopKSignal

_SLACK = 0.02  # how far the masses of a stored row may be from 1: BF16 log-probs of a flat row are off by as much


@dataclass(frozen=True)
class _Finding:
    """Rows that break a rule, and how to say it of one of them."""

    argument: str
    is_bad: Tensor  # [N], bool
    say: Callable[[int], str]
    advice: tuple[str, ...]


def check_values(
    labels: Tensor,
    signal: Signal | None,
    token_weights: Tensor | None,
    token_temperature: Tensor | None,
    num_tokens: int,
    positions: Tensor,
) -> None:
    """Refuse values that no pass can use. `positions` [N] are the places of the rows in the caller's tensors."""
    if labels.numel() == 0:
        return
    findings = [_label_finding(labels, num_tokens)]
    if token_weights is not None:
        findings.append(_number_finding("token_weights", token_weights, 0.0, "weights are finite and 0 or above"))
    if token_temperature is not None:
        advice = f"temperatures are finite and {LEAST_TEMPERATURE:g} or above"
        findings.append(_number_finding("token_temperature", token_temperature, LEAST_TEMPERATURE, advice))
    if isinstance(signal, TopKSignal):
        findings += _top_k_findings(signal, num_tokens)
    elif isinstance(signal, SampledSignal):
        findings += _sampled_findings(signal, num_tokens)
    broken = torch.stack([finding.is_bad.any() for finding in findings]).tolist()
    for finding, is_broken in zip(findings, broken, strict=True):
        if is_broken:
            (row, *_) = finding.is_bad.nonzero().squeeze(-1).tolist()
            (place,) = positions[row : row + 1].tolist()
            raise ConfigError(
                f"position {place:,}: {finding.say(row)}", where=finding.argument, advice=list(finding.advice)
            )


def _label_finding(labels: Tensor, num_tokens: int) -> _Finding:
    return _Finding(
        "labels",
        (labels < 0) | (labels >= num_tokens),
        lambda row: f"the label {labels[row].tolist():,} lies outside the vocabulary of {num_tokens:,} tokens",
        ("-100 where a position is not scored", "vocab_size or the head's weight is that of another tokenizer"),
    )


def _number_finding(name: str, values: Tensor, least: float, advice: str) -> _Finding:
    is_bad = ~(values >= least)
    if values.dtype.is_floating_point:
        is_bad = is_bad | ~values.isfinite()
    return _Finding(name, is_bad, lambda row: f"{name} holds {values[row].tolist():g}", (advice,))


def _id_finding(ids: Tensor, num_tokens: int) -> _Finding:
    is_outside = (ids < 0) | (ids >= num_tokens)
    return _Finding(
        "teacher.ids",
        is_outside.any(-1),
        lambda row: f"the id {ids[row][is_outside[row]].tolist()[0]:,} lies outside the vocabulary of {num_tokens:,}",
        ("ids of the student's own vocabulary",),
    )


def _top_k_findings(signal: TopKSignal, num_tokens: int) -> Iterator[_Finding]:
    signal = without_empty_tail(signal, num_tokens)
    ordered = signal.ids.sort(-1).values
    mass = signal.log_probs.double().exp().sum(-1) + signal.tail_log_mass.double().exp()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.ids",
        (ordered[:, 1:] == ordered[:, :-1]).any(-1),
        lambda row: "an id stands in the row twice",
        ("distinct ids, as torch.topk gives them",),
    )
    yield _Finding(
        "teacher.log_probs, teacher.tail_log_mass",
        mass.isfinite() & (mass > 0) & ((mass - 1).abs() > _SLACK),
        lambda row: f"kept tokens and tail have a mass of {mass[row].tolist():.4g} instead of 1",
        (
            "natural logarithms of probabilities at the temperature of the call, not probabilities and not logits",
            "tail_log_mass: the log of the mass that the kept tokens leave over (stillroom.numerics.tail_log_mass)",
        ),
    )


def _sampled_findings(signal: SampledSignal, num_tokens: int) -> Iterator[_Finding]:
    weights, entropy = signal.weights.double(), signal.entropy.double()
    mass = weights.sum(-1)
    is_usable = (mass + entropy).isfinite()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.weights",
        is_usable & ((weights < 0).any(-1) | ((mass - 1).abs() > _SLACK)),
        lambda row: f"weights from {weights[row].min().tolist():.4g} up, with a sum of {mass[row].tolist():.4g}",
        ("weights of 0 or above that sum to 1 in each row",),
    )
    most = math.log(num_tokens)
    yield _Finding(
        "teacher.entropy",
        is_usable & ((entropy < -_SLACK) | (entropy > most + _SLACK)),
        lambda row: (
            f"an entropy of {entropy[row].tolist():.4g} nats, where {num_tokens:,} tokens allow 0 to {most:.4g}"
        ),
        ("the entropy of the teacher's whole distribution at the temperature of the call, in nats",),
    )
