"""Reduce a teacher's distribution to a few tokens, their log-probabilities, and the mass of the rest.

top_k         the top k tokens and the exact mass of all others: serves every divergence.
sampled       tokens drawn from the whole distribution (RS-KD, Anshumann et al. 2025): unbiased for forward KL.
hybrid        the top m exactly, and draws from what is left, which share its mass: unbiased for forward KL, with
              less variance than draws alone, because what is likely is not left to chance.
renormalised  the top k as if nothing else could come: biased, for stores that hold no more. Says its mean mass.
target        the probability of the target alone: for likelihoods of spans.

For a student of another tokenizer the tokens are those that it has too, all others being one (`Coarse`), and the
probability of the target is kept in FP32 next to them: the surprisal of a likely token is far below a step.

Classes of a teacher's tokens, for such a student, are either the tokens that both have, all others being one (for
objectives.exact_match), or groups of tokens that begin a text alike (for objectives.prefix_match). Ids stay the
teacher's: the first token of a class stands for all of it. So a stored answer can be read without a list of classes,
and their hash alone is part of what a cache is.

Numbers are rounded where they are made, to whole multiples of a step, and are rounded nowhere else. So an answer that
was stored and one that is given live are the same bits. A row is answered by itself: what it is told depends on its
tokens, on its targets and on the seed, and on no neighbour, no padding and no order.

Legend: N scored positions of a row, V vocabulary, M exact tokens, D draws; C positions, U vocabulary of the teacher, K
classes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from stillroom.config import Config
from stillroom.config.schema import DEFAULT_DRAWS, DEFAULT_HYBRID_DRAWS, DEFAULT_K, DEFAULT_M, Ramp
from stillroom.core.errors import ConfigError, DataError
from stillroom.core.numerics import LOG_ZERO, Softmax
from stillroom.core.types import Batch, HeadWeights, PairedTokens, SampledSignal, TopKSignal
from stillroom.losses.head.products import logits_from_bf16
from stillroom.losses.two_tokenizers import GroupSums
from stillroom.models.anatomy import head_logits
from stillroom.training.schedule import Curriculum


class Coarse(Protocol):
    """Classes of a teacher's tokens."""

    @property
    def kept(self) -> Tensor:
        """[K] The token that stands for each class, ascending."""

    def to(self, device: torch.device) -> Coarse: ...
    def logits(self, logits: Tensor) -> Tensor:
        """[C, K] of [C, U]: their softmax is the mass of each class."""


def ids_hash(kind: str, ids: Sequence[int]) -> str:
    """A name for classes."""
    told = f"{kind}:" + ",".join(map(str, ids))
    return hashlib.blake2b(told.encode("ascii"), digest_size=8).hexdigest()


@dataclass(frozen=True)
class SharedTokens:
    """Which columns of the teacher's logits are kept, and which are added up."""

    kept: Tensor  # [K], ascending ids
    rest: Tensor  # [U - K + 1], ids that the student lacks; the first is among the kept and stands for all
    place: int  # of that one among the kept; -1 where the student has every token

    @staticmethod
    def of(teacher_ids: Sequence[int], num_tokens: int) -> SharedTokens:
        is_shared = torch.zeros(num_tokens, dtype=torch.bool)
        is_shared[torch.tensor(teacher_ids, dtype=torch.long)] = True
        rest = (~is_shared).nonzero().squeeze(-1)
        if not len(rest):
            return SharedTokens(torch.arange(num_tokens), rest, -1)
        is_shared[rest[0]] = True
        kept = is_shared.nonzero().squeeze(-1)
        return SharedTokens(kept, rest, int(torch.searchsorted(kept, rest[:1])))

    def to(self, device: torch.device) -> SharedTokens:
        return SharedTokens(self.kept.to(device), self.rest.to(device), self.place)

    def logits(self, logits: Tensor) -> Tensor:
        """[C, K] of [C, U]. Their softmax has the mass of the others in one place."""
        if self.place < 0:
            return logits
        found = logits.index_select(1, self.kept)
        found[:, self.place] = torch.logsumexp(logits.index_select(1, self.rest), -1)
        return found


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens, in the order of their first ones."""

    sums: GroupSums

    @staticmethod
    def of(groups: Sequence[int], num_groups: int, num_tokens: int) -> TokenGroups:
        found = GroupSums.of(groups, num_groups, num_tokens, torch.device("cpu"))
        order = found.first.argsort()
        return TokenGroups(GroupSums(found.first[order], found.others, order.argsort()[found.of_others]))

    @property
    def kept(self) -> Tensor:
        return self.sums.first

    def to(self, device: torch.device) -> TokenGroups:
        one = self.sums
        return TokenGroups(GroupSums(one.first.to(device), one.others.to(device), one.of_others.to(device)))

    def logits(self, logits: Tensor) -> Tensor:
        return self.sums.log_masses(logits)


# -- signals of few tokens ---------------------------------------------------------------------------------


Kind = Literal["top_k", "sampled", "hybrid", "renormalised", "target"]
Codes = npt.NDArray[np.uint16]
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

LOG_STEP = 1.0 / 256.0  # nats: a probability is off by 0.2 % at most, about what FP16 does to log-probs near -4
ENTROPY_STEP = 1.0 / 2048.0  # nats: reaches to 32, and the largest vocabularies have 12
NOTHING = 65535  # code of a log-probability of -inf, and of an entropy that is not finite: a row that is unusable
_FLOOR = NOTHING - 1
_PRODUCT_VALUES = 1 << 24  # logits that are made together: 64 MB
_BLOCK_VALUES = 1 << 19  # of these, what is looked at together: temporaries stay near the cache
_BIN = 64  # tokens whose masses are summed before anything is drawn
_PROBABILITIES: npt.NDArray[np.float64] = np.exp(-LOG_STEP * np.arange(NOTHING + 1, dtype=np.float64))
_PROBABILITIES[NOTHING] = 0.0


@dataclass(frozen=True)
class SignalSpec:
    """What is asked of a teacher at each position."""

    kind: Kind
    exact: int  # top tokens that are kept: k, or the m of a hybrid
    draws: int  # tokens drawn from the rest
    temperature: float = 1.0
    seed: int = 0
    is_paired: bool = False  # for a student of another tokenizer: the targets' probabilities are kept in FP32
    shared: str = ""  # which tokens both have, see `ids_hash`

    @property
    def is_sampled(self) -> bool:
        return self.kind in ("sampled", "hybrid")

    @property
    def width(self) -> int:
        return self.exact + self.draws

    def to_dict(self) -> dict[str, Any]:
        """By the names that a configuration has for them, without those that mean nothing for the kind."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.exact:
            found["m" if self.kind == "hybrid" else "k"] = self.exact
        if self.draws:
            found |= {"draws": self.draws, "draw_seed": self.seed}
        if self.is_paired:
            found["two_tokenizers"] = True
        if self.shared:
            found["shared_tokens"] = self.shared
        return found | {"temperature": self.temperature}

    @staticmethod
    def of_dict(found: dict[str, Any]) -> SignalSpec:
        exact = int(found.get("k", found.get("m", 0)))
        temperature, seed = float(found["temperature"]), int(found.get("draw_seed", 0))
        pair = bool(found.get("two_tokenizers")), str(found.get("shared_tokens", ""))
        return SignalSpec(found["kind"], exact, int(found.get("draws", 0)), temperature, seed, *pair)

    def within(self, vocab_size: int) -> SignalSpec:
        """No more tokens are kept than there are."""
        return replace(self, exact=min(self.exact, vocab_size))


@dataclass(frozen=True)
class RowAnswer:
    """The answer to one row, in the whole numbers that are stored. Everything that follows is computed from these."""

    ids: Ids  # [N, M], the most likely first
    log_probs: Codes  # [N, M]
    tail: Codes  # [N], log mass of all tokens that are not among the exact ones
    entropy: Codes  # [N], at the temperature of the signal
    label: Codes  # [N], log-probability of the target at temperature 1
    drawn: Ids  # [N, D], ascending, with repeats
    surprisals: Floats = field(default_factory=lambda: np.zeros(0, np.float32))  # [N] of the targets, or [0]: not kept

    @property
    def num_positions(self) -> int:
        return len(self.tail)

    @property
    def mass(self) -> npt.NDArray[np.float64]:
        """[N] What the exact tokens hold."""
        found: npt.NDArray[np.float64] = np.minimum(_PROBABILITIES[self.log_probs].sum(axis=-1), 1.0)
        return found

    @property
    def label_log_probs(self) -> npt.NDArray[np.float64]:
        """[N] At temperature 1; -inf where it is below what can be stored, NaN where the row is unusable."""
        if len(self.surprisals):
            return -self.surprisals.astype(np.float64)
        with np.errstate(divide="ignore"):
            found = np.where(self.label == NOTHING, -np.inf, -LOG_STEP * self.label.astype(np.float64))
        return np.where(self.entropy == NOTHING, np.nan, found)

    @staticmethod
    def join(answers: Sequence[RowAnswer]) -> RowAnswer:
        """Several rows as one, in order."""
        if len(answers) == 1:
            return answers[0]
        names = ("ids", "log_probs", "tail", "entropy", "label", "drawn", "surprisals")
        return RowAnswer(*(np.concatenate([getattr(one, name) for one in answers]) for name in names))

    @staticmethod
    def unusable(num_positions: int, spec: SignalSpec) -> RowAnswer:
        """An answer that is not a distribution: the student is scored on the labels there, and it is counted."""
        nothing = np.full(num_positions, NOTHING, np.uint16)
        ids = np.zeros((num_positions, spec.exact), np.int32)
        codes = np.full((num_positions, spec.exact), NOTHING, np.uint16)
        surprisals = np.full(num_positions if spec.is_paired else 0, np.nan, np.float32)
        drawn = np.zeros((num_positions, spec.draws), np.int32)
        return RowAnswer(ids, codes, nothing, nothing, nothing, drawn, surprisals)


# -- from logits to whole numbers ------------------------------------------------------------------------


@torch.no_grad()
def reduce_row(
    hidden: Tensor, head: HeadWeights, targets: Tensor, spec: SignalSpec, key: str, coarse: Coarse | None = None
) -> RowAnswer:
    """The answer to one row from the teacher's hidden states at its scored positions [N, width]. `key` is its name.

    With `coarse` the tokens are those that both models have, all others being one.
    """
    spec = spec.within(head.num_real if coarse is None else len(coarse.kept))
    uniforms = torch.from_numpy(_uniforms(key, len(targets), spec))
    size, block = (max(1, values // head.num_real) for values in (_PRODUCT_VALUES, _BLOCK_VALUES))
    parts = []
    for start in range(0, len(targets), size):
        logits = logits_from_bf16(hidden[start : start + size], head)
        if logits is None:
            logits = head_logits(head, hidden[start : start + size])
        for at in range(0, len(logits), block):
            here = slice(start + at, start + min(at + block, len(logits)))
            parts.append(_reduce(logits[at : at + block], targets[here], uniforms[here], spec, coarse))
    return RowAnswer.join(parts) if parts else RowAnswer.unusable(0, spec)


def _uniforms(key: str, num_positions: int, spec: SignalSpec) -> npt.NDArray[np.float64]:
    """[N, D] Numbers in [0, 1) that depend on the row's content and the seed alone."""
    digest = hashlib.blake2b(f"{spec.seed}:{key}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.random((num_positions, spec.draws))


def _reduce(logits: Tensor, targets: Tensor, uniforms: Tensor, spec: SignalSpec, coarse: Coarse | None) -> RowAnswer:
    """Some positions of a row. The rest is summed directly: a mass of 1e-12 is not a difference of 1 and something."""
    if spec.kind == "target":
        return _targets_alone(logits, targets)
    label = _target_log_probs(logits, targets) if spec.is_paired or spec.temperature != 1.0 else None
    whole = Softmax.of_logits(logits if coarse is None else coarse.logits(logits), spec.temperature)
    if label is None:
        label = whole.scores.gather(-1, targets[:, None]).squeeze(-1) - whole.log_norm
    entropy = whole.log_norm - (whole.probs * whole.scores).sum(-1)
    kept, ids = whole.scores.topk(spec.exact, dim=-1)
    rest = whole.probs.scatter_(-1, ids, 0.0)
    bins = functional.pad(rest, (0, -rest.shape[-1] % _BIN)).view(len(rest), -1, _BIN)
    cumulative = bins.sum(-1).cumsum(-1, dtype=torch.float64)
    drawn = _draw(bins, cumulative, uniforms.to(logits.device)) if spec.draws else ids[:, :0]
    if coarse is not None:
        # Where nothing is left to draw from, a draw may lie in the padding of the last bin.
        ids, drawn = (coarse.kept[one.clamp_max(len(coarse.kept) - 1)] for one in (ids, drawn))
    is_bad = ~torch.isfinite(whole.log_norm + entropy)
    return RowAnswer(
        ids=_ids(ids, is_bad),
        log_probs=_log_codes(kept - whole.log_norm[:, None], is_bad),
        tail=_log_codes(cumulative[:, -1].log(), is_bad),
        entropy=_whole(torch.where(is_bad, NOTHING, (entropy.double() / ENTROPY_STEP).round_().clamp_(0, _FLOOR))),
        label=_log_codes(label, is_bad),
        drawn=_ids(drawn, is_bad),
        surprisals=_surprisals(label, is_bad) if spec.is_paired else np.zeros(0, np.float32),
    )


def _target_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """[N] At temperature 1, over the whole vocabulary."""
    cold = Softmax.of_logits(logits)
    return cold.scores.gather(-1, targets[:, None]).squeeze(-1) - cold.log_norm


def _targets_alone(logits: Tensor, targets: Tensor) -> RowAnswer:
    """The codes are 0, which packs to nothing, or NOTHING where the row is unusable."""
    label = _target_log_probs(logits, targets)
    is_bad = ~torch.isfinite(label)
    codes = _whole(torch.where(is_bad, NOTHING, torch.zeros_like(label)))
    ids, log_probs = (np.zeros((len(targets), 0), dtype) for dtype in (np.int32, np.uint16))
    return RowAnswer(ids, log_probs, codes, codes, codes, ids, _surprisals(label, is_bad))


def _surprisals(log_probs: Tensor, is_bad: Tensor) -> Floats:
    """-log probability in FP32. That of an impossible token is infinite, and no span with it is compared."""
    found = torch.where(log_probs <= LOG_ZERO / 2, torch.inf, -log_probs)
    kept: Floats = torch.where(is_bad, torch.nan, found).float().cpu().numpy()
    return kept


def _draw(bins: Tensor, cumulative: Tensor, uniforms: Tensor) -> Tensor:
    """[N, D] ids, ascending, drawn with replacement in proportion to masses [N, bins, tokens of a bin].

    First the bin is found, among their cumulative masses [N, bins], then the token in it: most of a large vocabulary is
    never looked at. Where nothing is left to draw from, any token does: it will have no weight.
    """
    place, rest = _find(cumulative, uniforms * cumulative[:, -1:])
    chosen = bins.gather(1, place[..., None].expand(-1, -1, bins.shape[-1])).cumsum(-1, dtype=torch.float64)
    before = torch.where(place > 0, cumulative.gather(-1, (place - 1).clamp_min(0)), 0.0)
    mass = cumulative.gather(-1, place) - before
    share = torch.where(mass > 0, (rest - before) / mass, 0.0)
    inside, _ = _find(chosen, share[..., None] * chosen[..., -1:])
    return (place * bins.shape[-1] + inside.squeeze(-1)).sort(dim=-1).values


def _find(cumulative: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each wanted mass lies among cumulative ones, and that mass kept below the whole: [..., D] of [..., V]."""
    whole = cumulative[..., -1:]
    wanted = torch.minimum(wanted, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(cumulative, wanted.contiguous(), right=True)
    return found.clamp_max_(cumulative.shape[-1] - 1), wanted


def _ids(ids: Tensor, is_bad: Tensor) -> Ids:
    found: Ids = torch.where(is_bad[:, None], 0, ids).to(torch.int32).cpu().numpy()
    return found


def _log_codes(log_probs: Tensor, is_bad: Tensor) -> Codes:
    """Rounded to a step. Below -255 the lowest code is given, which is 0 to any sum; -inf has its own code."""
    is_bad = is_bad if log_probs.ndim == 1 else is_bad[:, None]
    steps = (log_probs.double() / -LOG_STEP).round_().clamp_(0, _FLOOR)
    steps = torch.where(is_bad | (log_probs <= LOG_ZERO / 2), NOTHING, steps)
    return _whole(steps)


def _whole(steps: Tensor) -> Codes:
    found: Codes = steps.to(torch.int32).cpu().numpy().astype(np.uint16)
    return found


# -- from whole numbers to signals -----------------------------------------------------------------------


def signal_of(answer: RowAnswer, spec: SignalSpec) -> TopKSignal | SampledSignal | PairedTokens:
    """The signal that is scored, in main memory. What was rounded is made to sum to 1 again, in FP64."""
    if spec.is_paired:
        few = None if spec.kind == "target" else few_tokens(answer, spec)
        return PairedTokens(torch.from_numpy(-answer.surprisals), few)
    return few_tokens(answer, spec)


def few_tokens(answer: RowAnswer, spec: SignalSpec) -> TopKSignal | SampledSignal:
    """The tokens of an answer with their probabilities."""
    is_bad = answer.entropy == NOTHING
    kept = _PROBABILITIES[answer.log_probs]
    tail = _PROBABILITIES[answer.tail]
    if spec.kind == "renormalised":
        tail = np.zeros_like(tail)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = kept.sum(axis=-1) + tail
        if spec.is_sampled:
            return _sampled(answer, spec, kept / total[:, None], tail / total, is_bad)
        log_total = np.log(total)
        log_probs = _log_probs(answer.log_probs) - log_total[:, None]
        log_tail = np.where(tail > 0, _log_probs(answer.tail), -np.inf) - log_total
    log_tail[is_bad] = np.nan
    return TopKSignal(
        ids=torch.from_numpy(answer.ids.astype(np.int64)),
        log_probs=torch.from_numpy(log_probs.astype(np.float32)),
        tail_log_mass=torch.from_numpy(log_tail.astype(np.float32)),
        temperature=spec.temperature,
    )


def _log_probs(codes: Codes) -> npt.NDArray[np.float64]:
    return np.where(codes == NOTHING, -np.inf, -LOG_STEP * codes.astype(np.float64))


def _sampled(
    answer: RowAnswer,
    spec: SignalSpec,
    kept: npt.NDArray[np.float64],
    tail: npt.NDArray[np.float64],
    is_bad: npt.NDArray[np.bool_],
) -> SampledSignal:
    """Exact tokens weigh what they hold; each draw an equal share of what is left."""
    shares = np.repeat((tail / max(1, spec.draws))[:, None], spec.draws, axis=1)
    weights = np.concatenate([kept, shares], axis=1)
    weights[is_bad] = np.nan
    entropy = np.where(is_bad, np.nan, ENTROPY_STEP * answer.entropy.astype(np.float64))
    return SampledSignal(
        ids=torch.from_numpy(np.concatenate([answer.ids, answer.drawn], axis=1).astype(np.int64)),
        weights=torch.from_numpy(weights.astype(np.float32)),
        entropy=torch.from_numpy(entropy.astype(np.float32)),
        temperature=spec.temperature,
    )


# -- what answers say of the teacher itself ----------------------------------------------------------------


def label_metrics(
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


# -- the signal of a configuration -----------------------------------------------------------------------
# Which signal it asks for, and what that cannot be used with.


AUTO = "auto"  # teacher.cache: next to the run's folder, written on first use


def uses_cache(config: Config) -> bool:
    return bool(config.teacher.cache) and Curriculum.of(config).uses_teacher


def live_spec(config: Config, shared: str = "") -> SignalSpec:
    """Return the sparse signal that a live teacher is asked for.

    `shared` names the tokens that both models have, where each has its own tokenizer.
    """
    kind = config.teacher.signal.kind
    return _paired_spec(config, kind, shared) if config.objectives.span_weights else _spec(config, kind)


def cache_spec(config: Config, shared: str = "") -> SignalSpec:
    """The signal that a new cache of this configuration holds."""
    if config.teacher.server:
        return served_spec(config)
    kind = config.teacher.signal.kind
    if config.objectives.span_weights:
        return _paired_spec(config, kind, shared)
    if kind == "auto":
        kd = config.objectives.kd
        looks_at_distance = (kd.token_fraction != 1.0 and kd.token_criterion == "hellinger") or kd.token_temperature
        is_linear = kd.divergence == "forward_kl" and not kd.top_k and kd.on_wrong_teacher == "keep"
        kind = "hybrid" if is_linear and not looks_at_distance else "top_k"
    return _spec(config, kind)


def stored_spec(config: Config, there: SignalSpec, shared: str = "") -> SignalSpec:
    """What is asked of a cache that is there: where the configuration leaves it open, what the cache holds."""
    kd, signal = config.objectives.kd, config.teacher.signal
    if config.objectives.span_weights:
        if signal.kind != "auto":
            return _paired_spec(config, signal.kind, shared)
        shared = shared if _span_tokens(config) and there.kind != "target" else there.shared
        return SignalSpec(there.kind, there.exact, there.draws, 1.0, there.seed, True, shared)
    if signal.kind == "auto" and not kd.top_k:
        return SignalSpec(there.kind, there.exact, there.draws, _temperature(config), there.seed)
    return cache_spec(config)


def served_spec(config: Config) -> SignalSpec:
    """The signal of a teacher on a server: log-probabilities of its top tokens, at temperature 1."""
    kind = config.teacher.signal.kind
    spec = _spec(config, "renormalised" if kind == "renormalised" else "top_k")
    if spec.temperature != 1.0:
        raise ConfigError(
            f"a server gives log-probabilities of temperature 1, and objectives.kd.temperature is "
            f"{spec.temperature:g}: what the top tokens leave over there cannot be derived from them",
            where="objectives.kd.temperature",
            advice=["--set objectives.kd.temperature=1", "use a teacher on this machine"],
        )
    return spec


def _spec(config: Config, kind: str) -> SignalSpec:
    signal = config.teacher.signal
    temperature, top_k = _temperature(config), _top_k(config, kind)
    match kind:
        case "target":
            raise ConfigError(
                "teacher.signal.kind = 'target' keeps the probability of the target alone, which is for objectives.alm",
                where="teacher.signal.kind",
                advice=["leave it out: objectives.kd needs more of the distribution"],
            )
        case "top_k" | "renormalised":
            if signal.k and top_k and signal.k != top_k:
                raise ConfigError(
                    f"objectives.kd.top_k is {top_k} and teacher.signal.k is {signal.k}",
                    where="teacher.signal.k",
                    advice=["leave one of them out"],
                )
            k = signal.k or top_k or DEFAULT_K
            return SignalSpec("renormalised" if kind == "renormalised" else "top_k", k, 0, temperature)
        case "sampled":
            return SignalSpec("sampled", 0, signal.draws or DEFAULT_DRAWS, temperature)
        case _:
            draws = signal.draws or DEFAULT_HYBRID_DRAWS
            return SignalSpec("hybrid", signal.m or DEFAULT_M, draws, temperature)


def _paired_spec(config: Config, kind: str, shared: str) -> SignalSpec:
    """The signal for a student of another tokenizer, at temperature 1: likelihoods of spans are those of the models.

    Draws are unbiased, because what depends on the student in objectives.exact_match and objectives.prefix_match is
    linear in the teacher's probabilities.
    """
    signal, tokens = config.teacher.signal, _span_tokens(config)
    if len(tokens) > 1:
        raise ConfigError(
            f"objectives {' and '.join(tokens)} ask for different answers, and there is one of a few tokens",
            where="teacher.signal.kind, teacher.cache",
            advice=[*(f"set objectives.{name}.weight = 0" for name in tokens), "use the live teacher, which has all"],
        )
    if kind == "auto":
        kind = "hybrid" if tokens else "target"
    match kind:
        case "target":
            return SignalSpec("target", 0, 0, is_paired=True)
        case "top_k":
            return SignalSpec("top_k", signal.k or DEFAULT_K, 0, is_paired=True, shared=shared)
        case "sampled":
            return SignalSpec("sampled", 0, signal.draws or DEFAULT_DRAWS, is_paired=True, shared=shared)
        case "hybrid":
            draws = signal.draws or DEFAULT_HYBRID_DRAWS
            return SignalSpec("hybrid", signal.m or DEFAULT_M, draws, is_paired=True, shared=shared)
    raise ConfigError(
        f"teacher.signal.kind = {kind!r} does not go with two tokenizers: without the mass of its other tokens the "
        "teacher's distribution over the tokens that both have is biased",
        where="teacher.signal.kind",
        advice=["set it to 'hybrid' or 'top_k'", "set it to 'target' where objectives.alm is the only one"],
    )


def _span_tokens(config: Config) -> list[str]:
    """The objectives on spans that need more than the targets' probabilities."""
    return [name for name in config.objectives.span_weights if name in ("exact_match", "prefix_match")]


def _constant(setting: float | Ramp, name: str) -> float:
    """A setting of objectives.kd that a sparse signal has one value of."""
    if isinstance(setting, Ramp):
        raise ConfigError(
            f"a sparse signal has one {name}, and objectives.kd.{name} moves",
            where=f"objectives.kd.{name}",
            advice=["set it to a number", "use the live teacher with teacher.signal.kind = 'dense'"],
        )
    return float(setting)


def _temperature(config: Config) -> float:
    return _constant(config.objectives.kd.temperature, "temperature")


def _top_k(config: Config, kind: str) -> int:
    found = int(_constant(config.objectives.kd.top_k, "top_k"))
    if found and kind in ("sampled", "hybrid"):
        raise ConfigError(
            f"objectives.kd.top_k asks for likely tokens and their tail, teacher.signal.kind = {kind!r} for draws",
            where="teacher.signal.kind",
            advice=["set objectives.kd.top_k = 0", "set teacher.signal.kind = 'top_k'"],
        )
    return found


def check_use(config: Config, spec: SignalSpec) -> list[str]:
    """Refuse settings that would do nothing, or harm, with this signal. Answers with what should be said."""
    kd = config.objectives.kd
    if spec.is_paired:
        for name in _span_tokens(config) if spec.kind == "target" else ():
            raise ConfigError(
                f"objectives.{name} compares distributions, and answers of kind target hold one probability a token",
                where="teacher.signal.kind",
                advice=["set it to 'hybrid' or 'top_k'", f"set objectives.{name}.weight = 0"],
            )
        return []
    if spec.is_sampled and kd.token_fraction != 1.0 and kd.token_criterion == "hellinger":
        raise ConfigError(
            "the distance of teacher and student cannot be told from drawn tokens",
            where="objectives.kd.token_criterion",
            advice=["set it to 'entropy'", "set teacher.signal.kind = 'top_k'"],
        )
    if kd.on_wrong_teacher == "mft" or (kd.on_wrong_teacher == "label_residual" and spec.is_sampled):
        raise ConfigError(
            f"objectives.kd.on_wrong_teacher = {kd.on_wrong_teacher!r} does not go with answers of kind {spec.kind}",
            where="objectives.kd.on_wrong_teacher",
            advice=["set it to 'keep'", "label_residual goes with teacher.signal.kind = 'top_k'"],
        )
    if config.guard.logit_clamp:
        return ["guard.logit_clamp holds for the student alone: the teacher's answers are stored unclamped"]
    return []


# -- log-probabilities of another program ----------------------------------------------------------------
# What was said about each token, as the answers of a row.
#
# Legend: a sequence has T tokens; `entries[t]` is what was said about token t before it was seen.


TOKEN_ID = "token_id:"  # how vLLM's server writes a token where it is asked not to write texts
_MAX_MISSPELT = 0.01  # share of tokens whose text may differ: writers replace parts of characters

Entry = Mapping[int, float]  # token id -> log-probability


@dataclass(frozen=True)
class Given:
    """What was said about one sequence."""

    where: str
    ids: tuple[int, ...]  # [T]; of `openai` by name the answer alone
    entries: Mapping[int, Entry]  # by the place of the token that is predicted
    texts: Mapping[int, str] = field(default_factory=dict)  # what the writer thinks tokens spell
    name: str = ""  # of the row, where the record names it: `ids` are then its last tokens
    has_own_token: bool = False  # whether an entry always holds the token that came
    has_any_end: bool = False  # the last token stands for any: its writer put it there to have an answer before it


def position_answer(
    entry: Entry | None, target: int, spec: SignalSpec, counters: Counter[str], *, least_tail: float = 0.0
) -> RowAnswer:
    """The top k of an entry, and what they leave over by subtraction.

    A difference below `least_tail` is rounding: the tail is then taken to be that, and counted.
    """
    kept = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: spec.exact] if entry else []
    if len(kept) < spec.exact:
        counters["short_positions"] += bool(entry)
        return RowAnswer.unusable(1, spec)
    assert entry is not None
    log_probs = np.array([value for _, value in kept])
    left = 1.0 - math.fsum(math.exp(value) for value in log_probs)
    if left < least_tail:
        counters["unresolved_tails"] += 1
        left = least_tail
    tail = math.log(left) if left > 0.0 else -math.inf
    surprise = math.fsum(-value * math.exp(value) for value in log_probs if value > -math.inf)
    surprise += -tail * math.exp(tail) if tail > -math.inf else 0.0
    label = entry.get(target, -math.inf)
    counters["labels"] += target in entry
    counters["positions"] += 1
    return RowAnswer(
        np.array([[token for token, _ in kept]], np.int32),
        _codes(log_probs)[None],
        _codes(np.array([tail])),
        np.array([min(round(max(surprise, 0.0) / ENTROPY_STEP), NOTHING - 1)], np.uint16),
        _codes(np.array([label])),
        np.zeros((1, 0), np.int32),
    )


def _codes(log_probs: Any) -> Any:
    with np.errstate(invalid="ignore"):
        steps = np.clip(np.rint(log_probs / -LOG_STEP), 0, NOTHING - 1)
    return np.where(np.isneginf(log_probs), NOTHING, steps).astype(np.uint16)


class Spelling:
    """What tokens spell, by the tokenizer of the configuration."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = max(tokenizer.get_vocab().values()) + 1
        self._by_text: dict[str, list[int]] | None = None

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def find(self, text: str) -> int:
        """The id of a token that is given as text."""
        if text.startswith(TOKEN_ID):
            return int(text.removeprefix(TOKEN_ID))
        if self._by_text is None:
            self._by_text = defaultdict(list)
            for token in sorted(self._tokenizer.get_vocab().values()):
                self._by_text[self.text(token)].append(token)
        found = self._by_text.get(text, [])
        if len(found) != 1:
            how = "no token spells" if not found else f"{len(found)} tokens spell"
            raise DataError(
                f"{how} {text!r}: its id cannot be told",
                advice=["ask the server for token ids (vLLM: return_tokens_as_token_ids)"],
            )
        return found[0]

    def fault(self, given: Sequence[Given]) -> tuple[str, str] | None:
        """(what, where) of tokens that the tokenizer does not have, or that spell something else; None: all is well."""
        for one in given:
            for token in (*one.ids, *(token for entry in one.entries.values() for token in entry)):
                if not 0 <= token < self._size:
                    return f"token {token:,} lies outside the tokenizer's {self._size:,}", one.where
        texts = {token: text for one in given for token, text in one.texts.items() if "\ufffd" not in text}
        wrong = [(token, text) for token, text in texts.items() if self.text(token).strip() != text.strip()]
        wrong = [(token, text) for token, text in wrong if "\ufffd" not in self.text(token)]
        if len(wrong) <= _MAX_MISSPELT * len(texts):
            return None
        token, text = wrong[0]
        told = f"{len(wrong):,} of {len(texts):,} tokens spell something else here: token {token} is {text!r} "
        return f"{told}there and {self.text(token)!r} in the tokenizer", ""
