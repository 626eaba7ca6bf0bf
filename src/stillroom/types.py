"""The values that pass between rooms.

Frozen records with no behaviour beyond their own arithmetic. Nothing here imports torch at run time, so
the pure rooms (curriculum, schedule, guard) can be used and tested with plain numbers.

Legend for shapes: B rows, L positions, N scored positions of a batch, V vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100  # a target that is not scored, as in transformers

_EMPTY: Mapping[str, Any] = MappingProxyType({})


# -- data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows of tokens. `targets[b, l]` is the token that follows position l, or IGNORED.

    What follows from the tensors is computed once, in main memory, where the batch is made, and moves with it: asking
    costs the device nothing. `dataclasses.replace` computes it anew, so it never belongs to other targets.
    """

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L], 1 where there is a token
    targets: Tensor  # [B, L]
    target_bytes: Tensor  # [B, L], bytes of text each target stands for; 0 where it is not scored
    sample_ids: tuple[str, ...]  # B names, for reports and quarantine
    index: int = 0  # which micro-batch of the run this is
    documents: tuple[str, ...] = ()  # B documents the rows start in: what a bootstrap draws as a whole
    other: Batch | None = None  # the same text as another tokenizer reads it
    positions: Tensor = field(init=False)  # [N], flat places of the scored positions in [B, L], in row order
    scored_targets: Tensor = field(init=False)  # [N]
    keys: tuple[str, ...] = field(init=False)  # B digests of what each row holds, whatever batch it stands in

    def __post_init__(self) -> None:
        device, flat = self.targets.device, self.targets.reshape(-1).cpu()
        positions = (flat != IGNORED).nonzero().squeeze(-1)
        object.__setattr__(self, "positions", positions.to(device))
        object.__setattr__(self, "scored_targets", flat.index_select(0, positions).to(device))
        object.__setattr__(self, "keys", _content_keys(self))

    @property
    def num_scored(self) -> int:
        return len(self.positions)

    def to(self, device: Any) -> Batch:
        moved = copy(self)
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Batch):
                object.__setattr__(moved, one.name, value.to(device))
            elif hasattr(value, "to"):  # a tensor
                object.__setattr__(moved, one.name, value.to(device, non_blocking=True))
        return moved

    def without_targets(self) -> Batch:
        """The same rows with no target to score."""
        return replace(
            self,
            targets=self.targets.new_full(self.targets.shape, IGNORED),
            target_bytes=self.target_bytes.new_zeros(self.target_bytes.shape),
            other=self.other.without_targets() if self.other is not None else None,
        )


def _content_keys(batch: Batch) -> tuple[str, ...]:
    """A digest of each row's tokens and targets. Padding is no part of it, nor are the row's name and neighbours."""
    ids, targets = batch.input_ids.cpu().long().numpy(), batch.targets.cpu().long().numpy()
    is_used = (batch.attention_mask.cpu().numpy() != 0) | (targets != IGNORED)
    return tuple(
        hashlib.blake2b(ids[row][used].tobytes() + targets[row][used].tobytes(), digest_size=16).hexdigest()
        for row, used in enumerate(is_used)
    )


# -- what models answer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What the objectives of a lesson ask a model to produce beside its last hidden states."""

    hidden_layers: frozenset[int] = frozenset()
    attention_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BothNeeds:
    """What a lesson asks of each side: layers of the student and of the teacher are counted apart."""

    student: Needs = Needs()
    teacher: Needs = Needs()


@dataclass(frozen=True)
class HeadWeights:
    """The last layer of a language model: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # real vocabulary where the weight has padding rows
    clamp: float | None = None  # logits beyond +-clamp are cut, and their gradient with them: only when asked for
    product_dtype: torch.dtype | None = None  # half dtype that a mixed mode gives the operands of the head's products

    @property
    def is_identity(self) -> bool:
        """An empty weight: the model gave its own logits instead of hidden states."""
        return int(self.weight.numel()) == 0

    @property
    def num_real(self) -> int:
        return self.vocab_size or int(self.weight.shape[0])


@dataclass(frozen=True)
class StudentView:
    """The student's answer to a batch, at the scored positions only."""

    hidden: Tensor  # [N, D]
    head: HeadWeights
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)  # hidden.<layer> [B, L, D], attention.<layer>
    positions: Tensor | None = None  # [N], flat places of the scored positions in [B, L]: where taps count
    sequences: Tensor | None = None  # [N], which row of the batch each position belongs to; None: all to one
    num_sequences: int = 1


@dataclass(frozen=True)
class DenseSignal:
    """The teacher's full answer, as hidden states and the head that turns them into logits."""

    hidden: Tensor  # [N, D]
    head: HeadWeights
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class TopKSignal:
    """The teacher's K likeliest tokens and the exact mass of all others, at one temperature."""

    ids: Tensor  # [N, K]
    log_probs: Tensor  # [N, K]
    tail_log_mass: Tensor  # [N]
    temperature: float = 1.0
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class SampledSignal:
    """An unbiased sample of the teacher's distribution: sum over weights is 1 for each position."""

    ids: Tensor  # [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor  # [N], of the full distribution, so that the logged value is a KL
    temperature: float = 1.0
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


Signal = DenseSignal | TopKSignal | SampledSignal


# -- objectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """What the curriculum says now: a weight for each term and the settings of the objectives."""

    phase: str
    weights: Mapping[str, float]
    settings: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    unaided: frozenset[str] = frozenset({"ce"})  # terms that do without the teacher

    def weight(self, term: str) -> float:
        return self.weights.get(term, 0.0)

    @property
    def asks_teacher(self) -> bool:
        """Whether any term now needs the teacher."""
        return any(weight != 0.0 for name, weight in self.weights.items() if name not in self.unaided)


@dataclass(frozen=True)
class Term:
    """One objective over some positions: an unweighted FP32 sum and how many positions are in it."""

    total: Tensor  # scalar
    count: Tensor  # scalar

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp_min(1)


@dataclass(frozen=True)
class Score:
    """The weighted objective of a micro-batch, ready for backward, and the terms it is made of."""

    loss: Tensor  # scalar, already divided by the counts of the whole window
    terms: Mapping[str, Term]
    counters: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)

    @staticmethod
    def average(scores: Sequence[Score]) -> Score:
        """The mean of scores of the same batch against several answers of a teacher; counters add up."""
        first, *others = scores
        if not others:
            return first
        share = 1.0 / len(scores)
        loss = sum((score.loss for score in others), first.loss) * share
        terms = {
            name: Term(sum((score.terms[name].total for score in others), term.total) * share, term.count)
            for name, term in first.terms.items()
        }
        counters = {
            name: sum((score.counters[name] for score in others), count) for name, count in first.counters.items()
        }
        return Score(loss, terms, counters)


@dataclass(frozen=True)
class TermRecord:
    """One term as people read it: raw mean, weight, raw times weight, and share of the sum."""

    raw: float
    weight: float
    scaled: float
    share: float

    @staticmethod
    def table(means: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, TermRecord]:
        scaled = {name: mean * weights.get(name, 0.0) for name, mean in means.items()}
        whole = sum(abs(value) for value in scaled.values())
        return {
            name: TermRecord(
                raw=mean,
                weight=weights.get(name, 0.0),
                scaled=scaled[name],
                share=abs(scaled[name]) / whole if whole > 0 and math.isfinite(whole) else 0.0,
            )
            for name, mean in means.items()
        }


# -- the guard's words -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What one attempted optimizer step looked like, read from the device once.

    `grad_norm` is the norm of the true gradient (unscaled, before clipping). `group_norms` has one entry
    for each parameter group. Values may be NaN or infinite: that is what the guard is for.
    """

    step: int
    loss: float
    grad_norm: float
    num_targets: int
    loss_scale: float = 1.0
    terms: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    group_norms: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    is_scaled: bool = False  # whether a smaller loss scale can be tried
    is_scale_at_floor: bool = False
    bad_teacher_rows: int = 0
    phase: str = ""
    attempt: int = 0  # how often this very window was tried before
    counters: Mapping[str, float] = field(default_factory=lambda: _EMPTY)  # what was clamped, where clamps are on
    samples: Mapping[str, float] = field(default_factory=lambda: _EMPTY)  # how much of the last update arrived


@dataclass(frozen=True)
class Examination:
    """A closer look at a suspicious step, from a path that is allowed to be slow."""

    weights_finite: bool
    moments_finite: bool
    canary_loss: float  # plain cross-entropy on a fixed batch, now
    canary_reference: float  # the same at the last good snapshot
    canary_best: float = float("inf")  # the lowest it ever was, before training included
    weights_reached: bool = True  # no weight is larger than the updates so far can have made it


Action = Literal["keep", "retry", "examine", "skip", "rollback", "fallback", "reset", "halt"]


@dataclass(frozen=True)
class Verdict:
    """What to do with an attempted step, and why."""

    action: Action
    reason: str = ""
    exit_code: int = 0  # with halt
    backs_off: bool = False  # with rollback: whether the learning rate should give way for a while
