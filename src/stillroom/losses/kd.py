"""Distillation ("kd") and cross-entropy ("ce"): two terms of one pass over the head.

They are one objective, because they share the student's logits, and because the weight of kd moves to ce for a row
whose teacher is not a distribution and for a batch without a signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.config.objectives import KdConfig, ObjectivesConfig
from stillroom.config.sections import Ramp, ends
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, Lesson, Score, Signal, StudentView
from stillroom.losses import divergences
from stillroom.losses.head.kernel import KernelName, describe_kernel
from stillroom.losses.head.loss import score_head
from stillroom.losses.head.rows import SignalKind, check_pair
from stillroom.losses.head.token_stats import survey
from stillroom.losses.objective import Objective

# -- token weights ---------------------------------------------------------------------------------
# Weights and temperatures of positions in the kd term, from statistics of both models' distributions.
#
# Everything is relative to the position's own sequence (median, mean, rank). A sequence is never split over micro-
# batches, so eight micro-batches equal one; the published methods compare within the batch. Weights have mean 1 in
# each sequence, so the counts that divide the loss are known before any forward.
#
# Nothing here carries gradient.
#
# Legend: N scored positions, S sequences.


_LEAST = 1e-6  # of a Hellinger distance: below it two rows are the same


@dataclass(frozen=True)
class Sequences:
    """The sequence of each scored position."""

    index: Tensor  # [N]
    count: int

    def size(self, like: Tensor) -> Tensor:
        """Scored positions of each sequence. [S]"""
        return torch.zeros(self.count, dtype=like.dtype, device=like.device).index_add_(
            0, self.index, torch.ones_like(like)
        )

    def mean(self, values: Tensor) -> Tensor:
        """[N]: each position gets the mean of its sequence."""
        sums = torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add_(0, self.index, values)
        return (sums / self.size(values).clamp_min(1.0))[self.index]

    def rank(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Positions in ascending order within their sequences [N], and each position's rank there, from 0 [N]."""
        by_value = values.argsort(stable=True)
        order = by_value[self.index[by_value].argsort(stable=True)]
        size = self.size(values).long()
        start = size.cumsum(0) - size
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - start[self.index[order]]
        return order, rank

    def median(self, values: Tensor) -> Tensor:
        """[N]: each position gets the lower median of its sequence."""
        order, _ = self.rank(values)
        size = self.size(values).long()
        middle = size.cumsum(0) - size + (size - 1).clamp_min(0) // 2
        return values[order[middle.clamp_max(len(order) - 1)]][self.index]


def temperatures(hellinger: Tensor, sequences: Sequences, base: float, strength: float) -> Tensor:
    """T_i = base * exp(-strength * tanh(log(s_i / median s))): lower temperatures for harder positions.

    Inverse difficulty temperature scaling of AdaKD (Xie et al. 2026), who use strength 0.5. [N]
    """
    distance = hellinger.clamp_min(_LEAST)
    ratio = distance / sequences.median(distance)
    return base * torch.exp(-strength * torch.tanh(ratio.log()))


def entropy_weights(entropy: Tensor, sequences: Sequences) -> Tensor:
    """The student's entropy over its mean in the sequence: certain positions weigh little. [N]"""
    mean = sequences.mean(entropy)
    return torch.where(mean > 0, entropy / mean.clamp_min(torch.finfo(mean.dtype).tiny), torch.ones_like(mean))


def top_fraction(criterion: Tensor, sequences: Sequences, fraction: float) -> Tensor:
    """n / k on the k = ceil(fraction * n) positions of each sequence where the criterion is largest, else 0. [N]"""
    size = sequences.size(criterion)
    kept = torch.ceil(size * fraction - 1e-6).clamp_min(1.0)
    _, rank = sequences.rank(-criterion)
    is_kept = rank < kept[sequences.index]
    return torch.where(is_kept, (size / kept)[sequences.index], torch.zeros_like(criterion))


# Counters: the cross-entropy of a batch in which it has no weight, and its number of positions.
LABEL_LOSS, NUM_LABELS = "label_loss", "num_labels"
FALLBACK_LOSS = "fallback_loss"  # counter: cross-entropy of positions without a usable teacher, taught by their labels


@dataclass(frozen=True)
class Emphasis:
    """Weight and temperature of each position in the kd term; None: the same for all."""

    weights: Tensor | None = None  # [N], mean 1 in each sequence
    temperatures: Tensor | None = None  # [N]


class KdAndCe(Objective):
    """Distillation and cross-entropy on the scored targets of a batch. Its settings are those of `objectives.kd`."""

    def __init__(self, config: ObjectivesConfig, kernel: KernelName | None = None) -> None:
        super().__init__("kd", config.kd)
        self.terms = ("kd", "ce")
        self._config = config
        self._kernel: KernelName = kernel or config.kernel
        for settings in _extremes(config.kd):  # raises if an end of a ramp is out of bounds
            divergences.make(config.kd.divergence, settings)

    def is_scored(self, lesson: Lesson, signal: Signal | None) -> bool:
        """Always, so that the head has a gradient even where both weights are 0."""
        return True

    def check_signal(self, kind: SignalKind, stored_temperature: float) -> None:
        kd = self._config.kd
        if kind != "dense" and isinstance(kd.temperature, Ramp):
            raise ConfigError(
                "a cached teacher answers at one temperature, and objectives.kd.temperature moves",
                advice=[f"set objectives.kd.temperature = {stored_temperature:g}", "use the live teacher"],
            )
        if kind != "dense" and kd.token_temperature != 0.0:
            raise ConfigError(
                "a cached teacher answers at one temperature, objectives.kd.token_temperature gives each token its own",
                advice=["set objectives.kd.token_temperature = 0", "use the live teacher"],
            )
        temperature = stored_temperature if isinstance(kd.temperature, Ramp) else kd.temperature
        check_pair(kind, kd.divergence, temperature, stored_temperature)

    def notes(self, device_type: str) -> tuple[str, ...]:
        twice = "token weights look at both models' rows first: the head's logits are made twice"
        return self._kernel_note(device_type), *((twice,) if self._config.kd.needs_both_logits else ())

    def _kernel_note(self, device_type: str) -> str:
        kd = self._config.kd
        given = {name: getattr(kd, name) for name in divergences.settings_of(kd.divergence)}
        settings = {name: 0.5 if isinstance(value, Ramp) else value for name, value in given.items()}
        return describe_kernel(self._kernel, divergences.make(kd.divergence, settings), device_type)

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, shares: Mapping[str, float]
    ) -> Score:
        """Without a signal (the teacher is suspended) the weight of kd moves to ce."""
        kd_weight, ce_weight = shares["kd"], shares["ce"]
        if signal is None:
            kd_weight, ce_weight = 0.0, ce_weight + kd_weight
        kd = self._config.kd
        settings = {name: self.setting(lesson, name) for name in divergences.settings_of(kd.divergence)}
        temperature = self.setting(lesson, "temperature")
        top_k = round(self.setting(lesson, "top_k"))
        emphasis = Emphasis()
        if kd.needs_both_logits and signal is not None and kd_weight != 0.0:
            emphasis = self._emphasise(view, signal, lesson, temperature, top_k)
        scored = score_head(
            view,
            signal,
            batch.scored_targets,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            divergence=divergences.make(kd.divergence, settings),
            temperature=temperature,
            kd_token_weights=emphasis.weights,
            token_temperature=emphasis.temperatures,
            top_k=top_k,
            rest_to_label=kd.on_wrong_teacher == "label_residual",
            label_margin=kd.label_margin if kd.on_wrong_teacher == "mft" else None,
            chunk_tokens=self._config.chunk_tokens,
            kernel=self._kernel,
        )
        counters, labels = dict(scored.counters), scored.unweighted_ce
        if labels is not None:
            counters |= {LABEL_LOSS: labels.total, NUM_LABELS: labels.count}
        if scored.fallback is not None:
            counters[FALLBACK_LOSS] = scored.fallback.total
        return Score(scored.loss, scored.terms, counters)

    def _emphasise(self, view: StudentView, signal: Signal, lesson: Lesson, temperature: float, top_k: int) -> Emphasis:
        """Weights and temperatures of the positions, from statistics of both models' distributions."""
        kd = self._config.kd
        stats = survey(view, signal, chunk_tokens=self._config.chunk_tokens, top_k=top_k)
        index = view.sequences
        if index is None:
            index = torch.zeros(stats.entropy.shape, dtype=torch.long, device=stats.entropy.device)
        sequences = Sequences(index, view.num_sequences)
        # The head pass moves a row with a bad teacher to cross-entropy; here its NaN must not reach other rows.
        hellinger = stats.hellinger.nan_to_num(nan=0.0)
        weights = entropy_weights(stats.entropy, sequences) if kd.token_weight == "entropy" else None
        fraction = self.setting(lesson, "token_fraction")
        if fraction < 1.0:
            criterion = stats.entropy if kd.token_criterion == "entropy" else hellinger
            chosen = top_fraction(criterion, sequences, fraction)
            weights = chosen if weights is None else weights * chosen
        strength = self.setting(lesson, "token_temperature")
        if strength == 0.0:
            return Emphasis(weights)
        return Emphasis(weights, temperatures(hellinger, sequences, temperature, strength))


def _extremes(kd: KdConfig) -> list[dict[str, float]]:
    """The settings of the divergence at both ends of their ramps."""
    names = divergences.settings_of(kd.divergence)
    return [{name: ends(getattr(kd, name))[place] for name in names} for place in (0, -1)]
