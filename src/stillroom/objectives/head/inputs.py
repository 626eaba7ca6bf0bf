"""What a caller of the fused head gives: a teacher's answer in one of three forms, and values for each position.

Legend: N positions, V real vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.objectives.head.sparse import select_rows
from stillroom.types import DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, TopKSignal


@dataclass(frozen=True)
class DenseTeacher:
    """The teacher's last hidden states and the head that turns them into logits."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # real vocabulary where the weight has padding rows
    taps: Mapping[str, Tensor] = field(default_factory=dict)  # kept with the answer; the head does not read them
    clamp: float | None = None  # logits beyond +-clamp are cut

    @property
    def head(self) -> HeadWeights:
        return HeadWeights(self.weight, self.bias, self.scale, self.softcap, self.vocab_size, self.clamp)


@dataclass(frozen=True)
class TopKTeacher:
    """The teacher's K likeliest tokens and the log mass of all others, at the temperature of the call."""

    ids: Tensor  # [N, K], distinct in each row
    log_probs: Tensor  # [N, K]
    tail_log_mass: Tensor  # [N]


@dataclass(frozen=True)
class SampledTeacher:
    """Sampled tokens of the teacher with weights that sum to 1, at the temperature of the call."""

    ids: Tensor  # [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor  # [N]


Teacher = DenseTeacher | TopKTeacher | SampledTeacher | Signal


def as_signal(teacher: Teacher | None, temperature: float) -> Signal | None:
    """The teacher's answer as objectives read it. Stored answers are at the temperature of the call."""
    if isinstance(teacher, DenseTeacher):
        return DenseSignal(teacher.hidden, teacher.head, teacher.taps)
    if isinstance(teacher, TopKTeacher):
        return TopKSignal(teacher.ids, teacher.log_probs, teacher.tail_log_mass, temperature)
    if isinstance(teacher, SampledTeacher):
        return SampledSignal(teacher.ids, teacher.weights, teacher.entropy, temperature)
    return teacher


@dataclass(frozen=True)
class Positions:
    """What belongs to each position: the student's hidden state, its label and what the teacher says there."""

    hidden: Tensor  # [N, D]
    labels: Tensor  # [N]
    signal: Signal | None
    weights: Tensor | None  # [N]
    temperatures: Tensor | None  # [N]

    def view(self, head: HeadWeights) -> StudentView:
        return StudentView(self.hidden, head)

    def select(self, index: Tensor) -> Positions:
        """The positions of an ascending index; all of them are these."""
        if index.numel() == self.labels.numel():
            return self
        signal = self.signal
        if isinstance(signal, DenseSignal):
            signal = replace(signal, hidden=signal.hidden.index_select(0, index))
        elif isinstance(signal, TopKSignal | SampledSignal):
            signal = select_rows(signal, index)
        return Positions(
            self.hidden.index_select(0, index),
            self.labels[index],
            signal,
            None if self.weights is None else self.weights[index],
            None if self.temperatures is None else self.temperatures[index],
        )


def flattened(
    hidden: Tensor, labels: Tensor, signal: Signal | None, weights: Tensor | None, temperatures: Tensor | None
) -> Positions:
    """Join leading axes that are those of the student's hidden states. What has others is left for `check_pass`."""
    if not isinstance(hidden, Tensor) or hidden.ndim == 0:
        raise ConfigError(f"student_hidden is a {type(hidden).__name__} without axes", where="student_hidden",
                          advice=["hidden states [N, D] at the positions of the labels"])  # fmt: skip
    leading = hidden.shape[:-1]

    def flat(tensor: Any, num_own: int = 0) -> Any:
        if not isinstance(tensor, Tensor) or tensor.shape[: tensor.ndim - num_own] != leading:
            return tensor
        return tensor.reshape(math.prod(leading), *tensor.shape[tensor.ndim - num_own :])

    match signal:
        case DenseSignal():
            signal = replace(signal, hidden=flat(signal.hidden, 1))
        case TopKSignal():
            signal = replace(signal, ids=flat(signal.ids, 1), log_probs=flat(signal.log_probs, 1),
                             tail_log_mass=flat(signal.tail_log_mass))  # fmt: skip
        case SampledSignal():
            signal = replace(signal, ids=flat(signal.ids, 1), weights=flat(signal.weights, 1),
                             entropy=flat(signal.entropy))  # fmt: skip
    return Positions(flat(hidden, 1), flat(labels), signal, flat(weights), flat(temperatures))
