"""The mix: named objectives, weighed by the lesson, divided once, scored alike in training and evaluation.

loss = sum over terms of weight * total / count, where the counts are those of the whole window (all micro-batches,
all ranks), agreed before any forward. So eight micro-batches give the gradient of one, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stillroom.config.objectives import KdConfig, ObjectivesConfig
from stillroom.config.sections import Ramp, ends
from stillroom.errors import ConfigError
from stillroom.objectives import divergence as family
from stillroom.objectives import tokens
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.head import score_head
from stillroom.objectives.inner_terms import Inner
from stillroom.objectives.kernel import KernelName, describe_kernel
from stillroom.objectives.sparse import SignalKind, check_pair
from stillroom.objectives.survey import survey
from stillroom.types import Batch, BothNeeds, Lesson, Score, Signal, StudentView

# What each divergence asks of the configuration beside the temperature.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "jsd": ("beta",),
    "skew_forward_kl": ("alpha",),
    "skew_reverse_kl": ("alpha",),
    "alpha_beta": ("alpha", "beta"),
    "taid": ("interpolation",),
}


@dataclass(frozen=True)
class Emphasis:
    """How much each position counts in the kd term and how softly it is taught; None: all alike."""

    weights: Tensor | None = None  # [N], mean 1 in each sequence
    temperatures: Tensor | None = None  # [N]


class Mix:
    """Distillation ("kd") and cross-entropy ("ce") on the scored targets of a batch, and what looks inside."""

    def __init__(
        self,
        config: ObjectivesConfig,
        *,
        kernel: KernelName | None = None,
        clamps: Clamps | None = None,
        inner: Inner | None = None,
    ) -> None:
        self._config = config
        self.inner = inner or Inner({}, nn.ModuleDict())
        self._clamps = clamps or Clamps()
        self._kernel: KernelName = kernel or config.kernel
        for settings in _extremes(config.kd):  # an unknown name, or a ramp that ends nowhere, is refused here
            family.make(config.kd.divergence, settings)

    def check_signal(self, kind: SignalKind, stored_temperature: float = 1.0) -> None:
        """Refuse, when the run is built, what a cached signal of this kind cannot serve."""
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
        """What a person should know of these objectives before hours are spent."""
        twice = "token weights look at both models' rows first: the head's logits are made twice"
        emphasis = (twice,) if self._config.kd.looks_at_rows else ()
        return self._kernel_note(device_type), *emphasis, *self.inner.notes

    def _kernel_note(self, device_type: str) -> str:
        kd = self._config.kd
        given = {name: getattr(kd, name) for name in _SETTINGS.get(kd.divergence, ())}
        settings = {name: 0.5 if isinstance(value, Ramp) else value for name, value in given.items()}
        return describe_kernel(self._kernel, family.make(kd.divergence, settings), device_type)

    def needs(self, lesson: Lesson) -> BothNeeds:
        """What the terms of this lesson ask of each model beyond its last hidden states."""
        return self.inner.needs(lesson)

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Targets of each objective in a window, known before any forward."""
        num_targets = sum(batch.num_scored for batch in batches)
        return {"kd": num_targets, "ce": num_targets, **self.inner.counts(batches)}

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, lesson: Lesson, counts: Mapping[str, float]
    ) -> Score:
        """The loss of one micro-batch, already divided by the counts of the window, and its terms.

        Without a signal (the teacher fell back) the weight of distillation moves to cross-entropy, and nothing is
        compared inside.
        """
        kd_weight = _share(lesson, counts, "kd")
        ce_weight = _share(lesson, counts, "ce")
        if signal is None:
            kd_weight, ce_weight = 0.0, ce_weight + kd_weight
        kd = self._config.kd
        names = _SETTINGS.get(kd.divergence, ())
        settings = {name: _setting(lesson, f"kd.{name}", getattr(kd, name)) for name in names}
        view, signal = self._clamps.on_view(view), self._clamps.on_signal(signal)
        temperature = _setting(lesson, "kd.temperature", kd.temperature)
        top_k = round(_setting(lesson, "kd.top_k", kd.top_k))
        emphasis = Emphasis()
        if kd.looks_at_rows and signal is not None and kd_weight != 0.0:
            emphasis = self._emphasise(view, signal, lesson, temperature, top_k)
        scored = score_head(
            view,
            signal,
            batch.scored_targets,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            divergence=family.make(kd.divergence, settings),
            temperature=temperature,
            kd_token_weights=emphasis.weights,
            token_temperature=emphasis.temperatures,
            top_k=top_k,
            rest_to_label=kd.on_wrong_teacher == "label_residual",
            label_margin=kd.label_margin if kd.on_wrong_teacher == "mft" else None,
            chunk_tokens=self._config.chunk_tokens,
            kernel=self._kernel,
        )
        loss, terms, counters = scored.loss, dict(scored.terms), dict(scored.counters)
        for name, found in self.inner.scores(view, signal, lesson).items():
            loss = loss + _share(lesson, counts, name) * found.total
            terms[name] = found.term
            counters |= found.counters
            counters["bad_teacher_rows"] = torch.maximum(counters["bad_teacher_rows"], found.num_bad)
        share = batch.num_scored / max(1.0, max(counts.values()))
        loss, was_cut = self._clamps.on_loss(loss, share)
        if was_cut is not None:
            counters["clamped_losses"] = was_cut
        return Score(loss, terms, counters)

    def _emphasise(self, view: StudentView, signal: Signal, lesson: Lesson, temperature: float, top_k: int) -> Emphasis:
        """Weights and temperatures of the positions, from a first look at both models' rows."""
        kd = self._config.kd
        facts = survey(view, signal, chunk_tokens=self._config.chunk_tokens, top_k=top_k)
        index = view.sequences
        if index is None:
            index = torch.zeros(facts.entropy.shape, dtype=torch.long, device=facts.entropy.device)
        sequences = tokens.Sequences(index, view.num_sequences)
        # A row whose teacher is no distribution is left to cross-entropy by the pass; here it must not spread.
        hellinger = facts.hellinger.nan_to_num(nan=0.0)
        weights = tokens.entropy_weights(facts.entropy, sequences) if kd.token_weight == "entropy" else None
        fraction = _setting(lesson, "kd.token_fraction", kd.token_fraction)
        if fraction < 1.0:
            criterion = facts.entropy if kd.token_criterion == "entropy" else hellinger
            chosen = tokens.top_fraction(criterion, sequences, fraction)
            weights = chosen if weights is None else weights * chosen
        strength = _setting(lesson, "kd.token_temperature", kd.token_temperature)
        if strength == 0.0:
            return Emphasis(weights)
        return Emphasis(weights, tokens.temperatures(hellinger, sequences, temperature, strength))


def _extremes(kd: KdConfig) -> list[dict[str, float]]:
    """The settings of the divergence at the two ends of whatever moves."""
    names = _SETTINGS.get(kd.divergence, ())
    return [{name: ends(getattr(kd, name))[place] for name in names} for place in (0, -1)]


def _share(lesson: Lesson, counts: Mapping[str, float], term: str) -> float:
    """What one target of a term weighs in the window. The only division by a count there is."""
    return lesson.weight(term) / max(1.0, counts[term])


def _setting(lesson: Lesson, name: str, configured: float | Ramp) -> float:
    """The curriculum's value; what the config says where the curriculum is silent."""
    if name in lesson.settings:
        return lesson.settings[name]
    if isinstance(configured, Ramp):
        raise ConfigError(f"objectives.{name} moves, but the lesson does not say where it is now")
    return configured
