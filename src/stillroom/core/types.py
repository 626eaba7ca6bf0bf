"""The values that packages pass to each other.

Frozen records. Nothing here imports torch at run time: curriculum, schedule and guard are tested with plain numbers.

Legend for shapes: B rows, L positions, N scored positions of a batch, V vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100  # a target that is not scored, as in transformers
ROLLOUTS = "rollouts"  # the source of rows that the student wrote

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Detail(str):
    """A note that nobody needs to act on: the log keeps it, a terminal shows it with --verbose only."""


# -- data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows of tokens. `targets[b, l]` is the token that follows position l, or IGNORED.

    `positions`, `scored_targets` and `keys` are computed once, in main memory, when the batch is made, and move with
    it, so reading them costs no synchronisation. `dataclasses.replace` computes them again.
    """

    input_ids: Tensor  # [B, L]
    attention_mask: Tensor  # [B, L], 1 where there is a token
    targets: Tensor  # [B, L]
    target_bytes: Tensor  # [B, L], text bytes of each target; 0 where it is not scored
    sample_ids: tuple[str, ...]  # B names, for reports and quarantine
    index: int = 0  # which micro-batch of the run this is
    documents: tuple[str, ...] = ()  # B documents the rows start in: the units of a bootstrap
    other: Batch | None = None  # the same text with another tokenizer
    segments: Tensor | None = None  # [B, L], which piece of its row a position is in, -1 is padding; None: one piece
    sources: tuple[str, ...] = ()  # B sources the rows come from, where the training data has several
    spans: Tensor | None = None  # [B, L], in the row, span that the target is in, the same in `other`; -1: none
    is_exact: Tensor | None = None  # [B, L], its span is one token in both, of the same bytes
    positions: Tensor = field(init=False)  # [N], flat indices of the scored positions in [B, L], in row order
    scored_targets: Tensor = field(init=False)  # [N]
    keys: tuple[str, ...] = field(init=False)  # B digests of the rows' contents, the same in any batch

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

    def parts(self, num_parts: int) -> Iterator[Batch]:
        """Consecutive rows of the batch as at most `num_parts` batches of about equal size."""
        num_rows = len(self.input_ids)
        size = -(-num_rows // num_parts)
        if size >= num_rows:
            yield self
            return
        for start in range(0, num_rows, size):
            yield self._of_rows(slice(start, start + size))

    def _of_rows(self, rows: slice) -> Batch:
        by_row: dict[str, Any] = {
            one.name: getattr(self, one.name)[rows]
            for one in fields(self)
            if one.init and one.name not in ("index", "other") and getattr(self, one.name) is not None
        }
        return replace(self, **by_row, other=self.other._of_rows(rows) if self.other is not None else None)

    def up_to(self, length: int) -> Batch:
        """The first `length` positions of each row; the rows as they are where each model reads its own tokens.

        What a causal model says of these positions does not depend on those that follow.
        """
        if self.other is not None or length >= self.input_ids.shape[1]:
            return self
        cut: dict[str, Any] = {
            name: getattr(self, name)[:, :length]
            for name in ("input_ids", "attention_mask", "targets", "target_bytes", "segments", "spans", "is_exact")
            if getattr(self, name) is not None
        }
        return replace(self, **cut)

    def without_targets(self) -> Batch:
        """The same rows without scored targets."""
        return replace(
            self,
            targets=self.targets.new_full(self.targets.shape, IGNORED),
            target_bytes=self.target_bytes.new_zeros(self.target_bytes.shape),
            other=self.other.without_targets() if self.other is not None else None,
        )


def is_rollout(batch: Batch) -> bool:
    """Whether the student wrote the rows of a batch. A batch holds rows of one source."""
    return ROLLOUTS in batch.sources


def _content_keys(batch: Batch) -> tuple[str, ...]:
    """A digest of each row's tokens and targets, without padding, name and neighbours."""
    ids, targets = batch.input_ids.cpu().long().numpy(), batch.targets.cpu().long().numpy()
    is_used = (batch.attention_mask.cpu().numpy() != 0) | (targets != IGNORED)
    arrays = [ids, targets, *([] if batch.segments is None else [batch.segments.cpu().long().numpy()])]
    # Answers to packed rows that were stored without this mark were computed across the pieces of a row.
    mark = b"" if batch.segments is None else b"pieces apart"
    rows = (b"".join(array[row][used].tobytes() for array in arrays) for row, used in enumerate(is_used))
    return tuple(hashlib.blake2b(row, digest_size=16, person=mark).hexdigest() for row in rows)


# -- what models answer ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What the objectives of loss weights need from a model besides its last hidden states."""

    hidden_layers: frozenset[int] = frozenset()
    attention_layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BothNeeds:
    """What loss weights needs from each model. Layers are numbered separately."""

    student: Needs = Needs()
    teacher: Needs = Needs()


@dataclass(frozen=True)
class HeadWeights:
    """The last layer of a language model: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # real vocabulary if the weight has padding rows
    clamp: float | None = None  # logits beyond +-clamp are cut, with zero gradient; None: off
    product_dtype: torch.dtype | None = None  # half dtype that a mixed mode gives the operands of the head's products

    @property
    def is_identity(self) -> bool:
        """Whether the weight is empty: `hidden` are the model's own logits."""
        return int(self.weight.numel()) == 0

    @property
    def num_real(self) -> int:
        return self.vocab_size or int(self.weight.shape[0])


@dataclass(frozen=True)
class StudentView:
    """The student's output for a batch, at the scored positions only."""

    hidden: Tensor  # [N, D]
    head: HeadWeights
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)  # hidden.<layer> [B, L, D], attention.<layer>
    positions: Tensor | None = None  # [N], flat indices of the scored positions in [B, L], to select from taps
    sequences: Tensor | None = None  # [N], row of the batch of each position; None: all in one
    num_sequences: int = 1
    # Called by the head's pass with each chunk: positions, and the logits of the student and of a dense teacher.
    on_logits: Callable[[slice, Any, Any], None] | None = None


@dataclass(frozen=True)
class DenseSignal:
    """The teacher's full distribution, as hidden states and the head that turns them into logits."""

    hidden: Tensor  # [N, D]
    head: HeadWeights
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class TopKSignal:
    """The teacher's top K tokens and the exact mass of the rest, at one temperature."""

    ids: Tensor  # [N, K]
    log_probs: Tensor  # [N, K]
    tail_log_mass: Tensor  # [N]
    temperature: float = 1.0
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class SampledSignal:
    """An unbiased sample of the teacher's distribution. The weights of a position sum to 1."""

    ids: Tensor  # [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor  # [N], of the full distribution, so that the logged value is a KL
    temperature: float = 1.0
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class PairedSignal:
    """The teacher's distribution at the scored positions of the row `batch.other`, in its own vocabulary."""

    hidden: Tensor  # [M, D]
    head: HeadWeights
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class PairedTokens:
    """What is kept of such an answer: the probability of each target, and a few tokens where they are asked for."""

    target_log_probs: Tensor  # [M], at temperature 1; NaN where the answer is unusable
    few: TopKSignal | SampledSignal | None = None  # ids of the teacher; one that the student lacks means all of them
    taps: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)


Signal = DenseSignal | TopKSignal | SampledSignal | PairedSignal | PairedTokens


# -- objectives ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossWeights:
    """The curriculum at one moment: a weight for each term, and the settings of the objectives."""

    phase: str
    weights: Mapping[str, float]
    settings: Mapping[str, float] = field(default_factory=lambda: _EMPTY)
    unaided: frozenset[str] = frozenset({"ce"})  # terms that need no teacher

    def weight(self, term: str) -> float:
        return self.weights.get(term, 0.0)

    @property
    def asks_teacher(self) -> bool:
        """Whether any term with a weight needs the teacher."""
        return any(weight != 0.0 for name, weight in self.weights.items() if name not in self.unaided)


@dataclass(frozen=True)
class Term:
    """One objective: an unweighted FP32 sum over positions, and their number."""

    total: Tensor  # scalar
    count: Tensor  # scalar

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp_min(1)


@dataclass(frozen=True)
class Score:
    """The weighted objective of a micro-batch, ready for backward, and its terms."""

    loss: Tensor  # scalar, already divided by the counts of the whole window
    terms: Mapping[str, Term]
    counters: Mapping[str, Tensor] = field(default_factory=lambda: _EMPTY)

    @staticmethod
    def average(scores: Sequence[Score]) -> Score:
        """The mean of one batch's scores against several answers of a teacher. Counters are summed."""
        first, *others = scores
        if not others:
            return first
        share = 1.0 / len(scores)
        loss = sum((score.loss for score in others), first.loss) * share
        terms = {
            name: Term(sum((score.terms[name].total for score in others), term.total) * share, term.count)
            for name, term in first.terms.items()
        }
        counters = {name: sum((one.counters[name] for one in others), own) for name, own in first.counters.items()}
        return Score(loss, terms, counters)


@dataclass(frozen=True)
class TermRecord:
    """One term in the log: raw mean, weight, raw times weight, and share of the sum."""

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


# -- the guard -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """Measurements of one attempted optimizer step, read from the device once.

    `grad_norm` is the norm of the true gradient (unscaled, before clipping). `group_norms` has one entry
    for each parameter group. Values may be NaN or infinite.
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
    label_loss: float | None = None  # mean cross-entropy of a step in which it has no weight
    phase: str = ""
    attempt: int = 0  # how often this window was tried before
    counters: Mapping[str, float] = field(default_factory=lambda: _EMPTY)  # what was clamped, if clamps are on
    samples: Mapping[str, float] = field(default_factory=lambda: _EMPTY)  # share of the last update kept by rounding
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: _EMPTY)  # targets and mean terms of each


@dataclass(frozen=True)
class Examination:
    """Results of the slow checks of a suspicious step."""

    weights_finite: bool
    moments_finite: bool
    canary_loss: float  # current cross-entropy on a fixed batch
    canary_reference: float  # the same at the last good snapshot
    canary_best: float = float("inf")  # the lowest so far, including before training
    weights_reached: bool = True  # no weight is larger than the updates so far can explain


Action = Literal["keep", "retry", "examine", "skip", "rollback", "fallback", "reset", "halt"]


@dataclass(frozen=True)
class Verdict:
    """What to do with an attempted step, and why."""

    action: Action
    reason: str = ""
    exit_code: int = 0  # with halt
    backs_off: bool = False  # with rollback: lower the learning rate for a while
