"""The mix: named objectives, weighed by the lesson, divided once, scored alike in training and evaluation.

loss = sum over terms of weight * total / count, where the counts are those of the whole window (all micro-batches,
all ranks), agreed before any forward. So eight micro-batches give the gradient of one, whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stillroom.config.schema import ObjectivesConfig, Ramp
from stillroom.errors import ConfigError
from stillroom.objectives import divergence as family
from stillroom.objectives.clamps import Clamps
from stillroom.objectives.head import score_head
from stillroom.objectives.inner_terms import Inner
from stillroom.objectives.kernel import KernelName
from stillroom.objectives.sparse import SignalKind, check_pair
from stillroom.types import Batch, BothNeeds, Lesson, Score, Signal, StudentView


class Mix:
    """Distillation ("kd") and cross-entropy ("ce") on the scored targets of a batch, and what looks inside."""

    def __init__(
        self,
        config: ObjectivesConfig,
        *,
        kernel: KernelName = "auto",
        clamps: Clamps | None = None,
        inner: Inner | None = None,
    ) -> None:
        self._config = config
        self.inner = inner or Inner({}, nn.ModuleDict())
        self._clamps = clamps or Clamps()
        self._kernel = kernel
        family.make(config.kd.divergence)  # an unknown name is refused when the run is built

    def check_signal(self, kind: SignalKind, stored_temperature: float = 1.0) -> None:
        """Refuse, when the run is built, what a cached signal of this kind cannot serve."""
        kd = self._config.kd
        if kind != "dense" and isinstance(kd.temperature, Ramp):
            raise ConfigError(
                "a cached teacher answers at one temperature, and objectives.kd.temperature moves",
                advice=[f"set objectives.kd.temperature = {stored_temperature:g}", "use the live teacher"],
            )
        temperature = stored_temperature if isinstance(kd.temperature, Ramp) else kd.temperature
        check_pair(kind, kd.divergence, temperature, stored_temperature)

    def needs(self, lesson: Lesson) -> BothNeeds:
        """What the terms of this lesson ask of each model beyond its last hidden states."""
        return self.inner.needs(lesson)

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Targets of each objective in a window, known before any forward."""
        num_targets = sum(batch.num_scored for batch in batches)
        return {"kd": num_targets, "ce": num_targets, **self.inner.counts(batches)}

    def score(
        self, view: StudentView, signal: Signal | None, targets: Tensor, lesson: Lesson, counts: Mapping[str, float]
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
        beta = _setting(lesson, "kd.beta", kd.beta)
        scored = score_head(
            self._clamps.on_view(view),
            self._clamps.on_signal(signal),
            targets,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            divergence=family.make(kd.divergence, {"beta": beta}),
            temperature=_setting(lesson, "kd.temperature", kd.temperature),
            top_k=int(lesson.settings.get("kd.top_k", kd.top_k)),
            chunk_tokens=self._config.chunk_tokens,
            kernel=self._kernel,
        )
        loss, terms, counters = scored.loss, dict(scored.terms), dict(scored.counters)
        for name, found in self.inner.scores(view, signal, lesson).items():
            loss = loss + _share(lesson, counts, name) * found.total
            terms[name] = found.term
            counters |= found.counters
            counters["bad_teacher_rows"] = torch.maximum(counters["bad_teacher_rows"], found.num_bad)
        share = targets.numel() / max(1.0, max(counts.values()))
        loss, was_cut = self._clamps.on_loss(loss, share)
        if was_cut is not None:
            counters["clamped_losses"] = was_cut
        return Score(loss, terms, counters)


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
