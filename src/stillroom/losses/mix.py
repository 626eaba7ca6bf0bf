"""The mix: the weighted sum of the objectives, the same in training and evaluation.

loss = sum over terms of weight * total / count. The counts are those of the whole window (all micro-batches, all
processes), known before any forward. So eight micro-batches give the gradient of one, whatever their lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from stillroom.config.schema import OBJECTIVES, ObjectivesConfig, ObjectiveSection, Ramp, Scalar, ends
from stillroom.config.schema import Recipe as Recipe
from stillroom.core.errors import ConfigError
from stillroom.core.types import (
    Batch,
    BothNeeds,
    DenseSignal,
    LossWeights,
    Needs,
    PairedSignal,
    Score,
    Signal,
    StudentView,
    Term,
    is_rollout,
)
from stillroom.losses import divergences
from stillroom.losses.head.kernel import KernelName, describe_kernel
from stillroom.losses.head.loss import score_head
from stillroom.losses.head.rows import SignalKind, check_pair
from stillroom.losses.head.token_stats import survey

# -- what an objective is ----------------------------------------------------------------------------------
#
# An objective is made once, when both models are known, by the recipe registered under its name
# (`config/schema.py`). The mix loops over the objectives and divides; it knows none by name.


Shares = Mapping[str, float]  # of each term: what one target of it weighs in the loss of the whole window


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a model that an objective is made from."""

    num_layers: int
    width: int


@dataclass(frozen=True)
class TokenMatch:
    """The pairs of tokens of two vocabularies that stand for the same bytes, and what is left over on each side."""

    student_ids: Sequence[int]
    teacher_ids: Sequence[int]
    student_rest: int  # ordinary tokens without a partner
    teacher_rest: int
    problem: str = ""  # why tokens of these vocabularies cannot be compared by their bytes
    student_groups: Sequence[int] = ()  # the group of each id: tokens that begin a text alike
    teacher_groups: Sequence[int] = ()
    num_groups: int = 0


@dataclass(frozen=True)
class Plan:
    """The arguments of a recipe. Random numbers drawn in it depend on the run's seed alone."""

    name: str
    section: ObjectiveSection
    student: ModelDims
    teacher: ModelDims | None  # None where no term of the run needs the teacher
    kept: Sequence[int] | None = None  # the teacher's layers that a cut student consists of
    matched: TokenMatch | None = None  # tokens of the same bytes, where each model has its own tokenizer
    chunk_tokens: int = 0  # positions the head handles at once; 0: chosen


class Objective:
    """One or several terms of the loss. A subclass overrides `score` and whatever else differs.

    `asked` is what it needs of both models while it has a weight. `modules` are networks trained with the student:
    they are in checkpoints, have the projectors' learning rate, stay FP32, and are not part of the exported student.
    """

    def __init__(self, name: str, section: ObjectiveSection) -> None:
        self.name = name
        self.section = section
        self.terms: tuple[str, ...] = (name,)
        self.asked = BothNeeds()
        self.modules: Mapping[str, nn.Module] = {}

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """The settings that a curriculum may change."""
        return self.section.settings

    def setting(self, loss_weights: LossWeights, name: str) -> float:
        """Return the value that the loss weights give a setting, else the configured one."""
        key, configured = f"{self.name}.{name}", self.settings[name]
        if key in loss_weights.settings:
            return loss_weights.settings[key]
        if isinstance(configured, Ramp):
            raise ConfigError(f"objectives.{key} moves, but the loss weights do not say where it is now")
        return configured

    def has_weight(self, loss_weights: LossWeights) -> bool:
        return any(loss_weights.weight(term) != 0.0 for term in self.terms)

    def is_scored(self, loss_weights: LossWeights, signal: Signal | None) -> bool:
        """Whether it is computed now: not at weight 0, and not without a signal if it needs the teacher."""
        return self.has_weight(loss_weights) and (signal is not None or not self.section.needs_teacher)

    def is_for(self, batch: Batch) -> bool:
        """Whether it says anything about a batch: on text that the student wrote only the teacher does."""
        return self.section.needs_teacher or not is_rollout(batch)

    def needs(self, loss_weights: LossWeights) -> BothNeeds:
        """What it needs of each model besides the last hidden states."""
        return self.asked if self.has_weight(loss_weights) else BothNeeds()

    def counts(self, batches: Sequence[Batch]) -> Mapping[str, int]:
        """What each term's total over a window is divided by, known before any forward: scored positions by default."""
        return dict.fromkeys(self.terms, num_scored(batches))

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        """Compute the loss of a micro-batch, and its unweighted terms."""
        raise NotImplementedError

    def scored(self, total: Tensor, count: Tensor, share: float, counters: Mapping[str, Tensor] | None = None) -> Score:
        """The score of a single term from its sum, which carries the gradient, and its count."""
        return Score(share * total, {self.name: Term(total.detach(), count)}, counters or {})

    def check_signal(self, kind: SignalKind, stored_temperature: float) -> None:
        """Raise for settings that a cached signal of this kind cannot serve."""

    def notes(self, device_type: str) -> tuple[str, ...]:
        """Notes for the log, written when the run starts."""
        return ()


def num_scored(batches: Iterable[Batch]) -> int:
    return sum(batch.num_scored for batch in batches)


def union(asked: Iterable[BothNeeds]) -> BothNeeds:
    """The union of several needs."""
    needs = list(asked)
    return BothNeeds(_union([both.student for both in needs]), _union([both.teacher for both in needs]))


def _union(needs: Sequence[Needs]) -> Needs:
    return Needs(
        frozenset(layer for need in needs for layer in need.hidden_layers),
        frozenset(layer for need in needs for layer in need.attention_layers),
    )


# -- the objectives of a run -------------------------------------------------------------------------------


def register(name: str, recipe: Recipe) -> None:
    """Make an objective available as `objectives.<name>` in this process. Packages use an entry point instead."""
    OBJECTIVES.register(name, recipe)


@dataclass(frozen=True)
class Planned:
    """The objectives of a run other than `kd` and `ce`, and notes for the log."""

    objectives: tuple[Objective, ...] = ()
    notes: tuple[str, ...] = ()
    projectors: nn.ModuleDict = field(init=False)  # all modules of the objectives, by name

    def __post_init__(self) -> None:
        named = {f"{one.name}_{key}": module for one in self.objectives for key, module in one.modules.items()}
        object.__setattr__(self, "projectors", nn.ModuleDict(named))

    def find(self, name: str) -> Objective | None:
        return next((objective for objective in self.objectives if objective.name == name), None)


def plan_objectives(
    config: ObjectivesConfig,
    student: ModelDims,
    teacher: ModelDims | None,
    *,
    seed: int = 0,
    kept: Sequence[int] | None = None,
    matched: TokenMatch | None = None,
) -> Planned:
    """Make the objectives that the configuration uses. Raise if the models cannot serve them.

    The order is that of registration, then of the configuration, so the seed gives each the same random numbers.
    """
    used = [name for name in config.weights if name not in ("kd", "ce")]
    own = [name for name in OBJECTIVES.loaded() if name in used]
    made = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in dict.fromkeys((*own, *used)):
            plan = Plan(name, config.sections[name], student, teacher, kept, matched, config.chunk_tokens)
            one = OBJECTIVES.find(name).make(plan)
            if not isinstance(one, Objective) or one.name != name or not one.terms:
                raise ConfigError(
                    f"what was made for objectives.{name} is not an objective of that name",
                    where=type(one).__qualname__,
                    advice=[
                        "return an Objective(plan.name, plan.section) from `make`: docs/guides/extending.md shows one"
                    ],
                )
            made.append(one)
    return Planned(tuple(made))


# -- weights and temperatures of positions in the kd term --------------------------------------------------
#
# They depend on statistics of both models' distributions. Everything is relative to the position's own sequence
# (median, mean, rank). A sequence is never split over micro-batches, so eight micro-batches equal one; the published
# methods compare within the batch. Weights have mean 1 in each sequence, so the counts that divide the loss are known
# before any forward.
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


# -- distillation (kd) and cross-entropy (ce) --------------------------------------------------------------
#
# They are two terms of one objective, because they share the student's logits, and because the weight of kd moves to
# ce for a row whose teacher is not a distribution and for a batch without a signal.


# Counters: the cross-entropy of a batch in which it has no weight, and its number of positions.
LABEL_LOSS, NUM_LABELS = "label_loss", "num_labels"
# By how much the label leads with on_wrong_teacher = "mft": clearly, and the rest of the row still says something.
_LABEL_MARGIN = 0.2
FALLBACK_LOSS = "fallback_loss"  # counter: cross-entropy of positions without a usable teacher, taught by their labels


class KdAndCe(Objective):
    """Distillation and cross-entropy on the scored targets of a batch. Its settings are those of `objectives.kd`."""

    def __init__(self, config: ObjectivesConfig, kernel: KernelName | None = None) -> None:
        super().__init__("kd", config.kd)
        self.terms = ("kd", "ce")
        self._config = config
        self._kernel: KernelName = kernel or config.kernel
        names = divergences.settings_of(config.kd.divergence)
        for end in (0, -1):  # raises if an end of a ramp is out of bounds
            divergences.make(config.kd.divergence, {name: ends(getattr(config.kd, name))[end] for name in names})

    def is_scored(self, loss_weights: LossWeights, signal: Signal | None) -> bool:
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
        kd = self._config.kd
        given = {name: getattr(kd, name) for name in divergences.settings_of(kd.divergence)}
        settings = {name: 0.5 if isinstance(value, Ramp) else value for name, value in given.items()}
        kernel = describe_kernel(self._kernel, divergences.make(kd.divergence, settings), device_type)
        twice = "token weights look at both models' rows first: the head's logits are made twice"
        return kernel, *((twice,) if kd.needs_both_logits else ())

    def score(
        self, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights, shares: Shares
    ) -> Score:
        """Without a signal (the teacher is suspended) the weight of kd moves to ce.

        Not on the student's own text: its tokens are no labels, so only what the teacher says weighs there.
        """
        kd_weight, ce_weight = shares["kd"], shares["ce"]
        is_own_text = is_rollout(batch)
        if is_own_text:
            kd_weight, ce_weight = kd_weight if signal is not None else 0.0, 0.0
        elif signal is None:
            kd_weight, ce_weight = 0.0, ce_weight + kd_weight
        kd = self._config.kd
        settings = {name: self.setting(loss_weights, name) for name in divergences.settings_of(kd.divergence)}
        temperature = self.setting(loss_weights, "temperature")
        top_k = round(self.setting(loss_weights, "top_k"))
        token_weights: Tensor | None = None
        token_temperatures: Tensor | None = None
        if kd.needs_both_logits and signal is not None and kd_weight != 0.0:
            found = self._emphasise(view, signal, loss_weights, temperature, top_k)
            token_weights, token_temperatures = found
        scored = score_head(
            view,
            signal,
            batch.scored_targets,
            kd_weight=kd_weight,
            ce_weight=ce_weight,
            divergence=divergences.make(kd.divergence, settings),
            temperature=temperature,
            kd_token_weights=token_weights,
            token_temperature=token_temperatures,
            top_k=top_k,
            rest_to_label=kd.on_wrong_teacher == "label_residual",
            label_margin=_LABEL_MARGIN if kd.on_wrong_teacher == "mft" else None,
            falls_back=not is_own_text,
            chunk_tokens=self._config.chunk_tokens,
            kernel=self._kernel,
        )
        counters, labels = dict(scored.counters), scored.unweighted_ce
        if labels is not None:
            counters |= {LABEL_LOSS: labels.total, NUM_LABELS: labels.count}
        if scored.fallback is not None:
            counters[FALLBACK_LOSS] = scored.fallback.total
        return Score(scored.loss, scored.terms, counters)

    def _emphasise(
        self, view: StudentView, signal: Signal, loss_weights: LossWeights, temperature: float, top_k: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute weights [N] (mean 1 in each sequence) and temperatures [N]; None: the same for all positions."""
        kd = self._config.kd
        stats = survey(view, signal, chunk_tokens=self._config.chunk_tokens, top_k=top_k)
        index = view.sequences
        if index is None:
            index = torch.zeros(stats.entropy.shape, dtype=torch.long, device=stats.entropy.device)
        sequences = Sequences(index, view.num_sequences)
        # The head pass moves a row with a bad teacher to cross-entropy; here its NaN must not reach other rows.
        hellinger = stats.hellinger.nan_to_num(nan=0.0)
        weights = entropy_weights(stats.entropy, sequences) if kd.token_weight == "entropy" else None
        fraction = self.setting(loss_weights, "token_fraction")
        if fraction < 1.0:
            criterion = stats.entropy if kd.token_criterion == "entropy" else hellinger
            chosen = top_fraction(criterion, sequences, fraction)
            weights = chosen if weights is None else weights * chosen
        strength = self.setting(loss_weights, "token_temperature")
        if strength == 0.0:
            return weights, None
        return weights, temperatures(hellinger, sequences, temperature, strength)


# -- optional clamps on logits and loss --------------------------------------------------------------------
#
# Older guides recommend them. They are off by default, because both do harm.
#
# A clamp of +-c on the logits bounds the largest probability over V tokens by 1 / (1 + (V - 1) e^-2c), so every
# token's cross-entropy has a floor. A clamp on the loss makes its gradient zero above the bound. Raise if the floor
# is above the bound: every gradient would be zero.


def perplexity_floor(logit_clamp: float, vocab_size: int) -> float:
    """The lowest perplexity that logits within +-logit_clamp can express over a vocabulary."""
    return 1.0 + (vocab_size - 1) * math.exp(-2.0 * logit_clamp)


@dataclass(frozen=True)
class Clamps:
    """Bounds on logits and loss; 0 means none."""

    logits: float = 0.0
    loss: float = 0.0

    def check(self, vocab_size: int) -> list[str]:
        """Notes for the log. Raise if every gradient would be zero."""
        notes = []
        if self.logits:
            floor = perplexity_floor(self.logits, vocab_size)
            if self.loss and math.log(floor) >= self.loss:
                raise ConfigError(
                    f"logits within +-{self.logits:g} cannot bring the loss of {vocab_size:,} tokens below "
                    f"{math.log(floor):.3g}, and the loss is cut at {self.loss:g}: every gradient would be zero",
                    where="guard.logit_clamp, guard.loss_clamp",
                    advice=[
                        "--set guard.logit_clamp=0 --set guard.loss_clamp=0",
                        "FP16 does not need either: `presets`",
                    ],
                )
            notes.append(
                f"logits are clamped to +-{self.logits:g}: over {vocab_size:,} tokens no perplexity below "
                f"{floor:.4g} can be reached, and clamped logits have no gradient"
            )
        if self.loss:
            notes.append(f"the loss is clamped at {self.loss:g}: batches above it have no gradient")
        return notes

    def on_view(self, view: StudentView) -> StudentView:
        return replace(view, head=replace(view.head, clamp=self.logits)) if self.logits else view

    def on_signal(self, signal: Signal | None) -> Signal | None:
        if not self.logits or not isinstance(signal, DenseSignal | PairedSignal):
            return signal
        return replace(signal, head=replace(signal.head, clamp=self.logits))

    def on_loss(self, loss: Tensor, share: float) -> tuple[Tensor, Tensor | None]:
        """The clamped loss of a micro-batch that is `share` of its window, and whether it was cut (0 or 1)."""
        if not self.loss:
            return loss, None
        bound = self.loss * share
        return loss.clamp(max=bound), (loss.detach() > bound).float()


# -- the mix -----------------------------------------------------------------------------------------------


class Mix:
    """The objectives of a run: `kd` and `ce`, and those that were planned."""

    def __init__(
        self,
        config: ObjectivesConfig,
        *,
        kernel: KernelName | None = None,
        clamps: Clamps | None = None,
        planned: Planned | None = None,
    ) -> None:
        self.planned = planned or Planned()
        self.objectives: tuple[Objective, ...] = (KdAndCe(config, kernel), *self.planned.objectives)
        self._clamps = clamps or Clamps()
        _check_terms(self.objectives)

    @property
    def projectors(self) -> nn.ModuleDict:
        """Networks trained with the student; not part of it."""
        return self.planned.projectors

    def check_signal(self, kind: SignalKind, stored_temperature: float = 1.0) -> None:
        """Raise for settings that a cached signal of this kind cannot serve."""
        for objective in self.objectives:
            objective.check_signal(kind, stored_temperature)

    def notes(self, device_type: str) -> tuple[str, ...]:
        """Notes of the objectives for the log, written when the run starts."""
        return (*(note for one in self.objectives for note in one.notes(device_type)), *self.planned.notes)

    def needs(self, loss_weights: LossWeights) -> BothNeeds:
        """What the terms with a weight need of each model besides its last hidden states."""
        return union(objective.needs(loss_weights) for objective in self.objectives)

    def counts(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Targets of each term in a window, known before any forward."""
        return {term: count for one in self.objectives for term, count in one.counts(batches).items()}

    def score(
        self,
        view: StudentView,
        signal: Signal | None,
        batch: Batch,
        loss_weights: LossWeights,
        counts: Mapping[str, float],
    ) -> Score:
        """The loss of one micro-batch, already divided by the counts of the window, and its terms."""
        view, signal = self._clamps.on_view(view), self._clamps.on_signal(signal)
        scores = []
        for objective in self.objectives:
            if objective.is_scored(loss_weights, signal) and objective.is_for(batch):
                # The only division by a count.
                shares = {term: loss_weights.weight(term) / max(1.0, counts[term]) for term in objective.terms}
                scores.append(objective.score(view, signal, batch, loss_weights, shares))
        first, *others = scores
        loss, terms, counters = first.loss, dict(first.terms), dict(first.counters)
        for score in others:
            loss = loss + score.loss
            terms |= score.terms
            _add_counters(counters, score.counters)
        self._check_answer(terms)
        # The clamp is per target, whatever a term counts.
        loss, was_cut = self._clamps.on_loss(loss, batch.num_scored / max(1.0, counts["ce"]))
        if was_cut is not None:
            counters["clamped_losses"] = was_cut
        return Score(loss, terms, counters)

    def _check_answer(self, terms: Mapping[str, Term]) -> None:
        known = {term for objective in self.objectives for term in objective.terms}
        if strange := sorted(set(terms) - known):
            raise ConfigError(
                f"an objective scored {', '.join(strange)}, which none announces",
                where="objectives",
                advice=["list every name in the objective's `terms`"],
            )


def _check_terms(objectives: Sequence[Objective]) -> None:
    """Raise unless each term belongs to one objective, which counts it."""
    announced = [term for objective in objectives for term in objective.terms]
    twice = {term for term in announced if announced.count(term) > 1}
    uncounted = {term for objective in objectives for term in objective.terms if term not in objective.counts([])}
    if twice or uncounted:
        raise ConfigError(
            "two objectives have a term of the same name, or one does not count its own: "
            + ", ".join(sorted(twice | uncounted)),
            where="objectives",
            advice=["name a term for its objective, and give it a count in `counts`"],
        )


def _add_counters(counters: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add the counters of another objective. Rows with a bad teacher are the same for all: take the maximum."""
    for name, count in more.items():
        if name not in counters:
            counters[name] = count
        elif name == "bad_teacher_rows":
            counters[name] = torch.maximum(counters[name], count)
        else:
            counters[name] = counters[name] + count
