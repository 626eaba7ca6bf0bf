"""Held-out evaluation: the training objective, and metrics that do not depend on it.

Score the held-out batches as the window of one training step: by the same `mix.score`, with the loss weights of the
last step, and with counts taken before any forward. So a gap between training and evaluation comes from the data, not
from the code. The metrics are measured at temperature 1 over the whole vocabulary, a chunk of positions at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.core.types import (
    Batch,
    BothNeeds,
    DenseSignal,
    HeadWeights,
    LossWeights,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TermRecord,
    TopKSignal,
)
from stillroom.losses.head.products import products_of
from stillroom.losses.head.rows import finish, select_rows
from stillroom.losses.mix import Mix
from stillroom.losses.two_tokenizers import SpanSlots, binarised_kl, head_values, taken_log_probs, teacher_surprisals
from stillroom.metrics.metrics import AGAINST_TEACHER, COLUMNS, NUM_BINS, NUM_COLUMNS, TOP_K, Ledger
from stillroom.models.student import Student
from stillroom.precision import Precision
from stillroom.teachers import Teacher

_CHUNK = 512


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model on held-out text."""

    perplexity: float
    bits_per_byte: float
    nll: float
    kl: float | None
    agreement: float | None
    acceptance: float | None
    objective: float | None
    terms: Mapping[str, TermRecord]
    unscored_tokens: int
    tokens: int
    seconds: float
    ledger: Ledger
    unmeasured: frozenset[str] = frozenset()  # what a teacher's stored answers cannot tell

    def yardsticks(self) -> dict[str, Any]:
        """All metrics by name, and for each its 95 % interval by bootstrap over documents."""
        values = {name: None if name in self.unmeasured else value for name, value in self.ledger.values().items()}
        bounds = {name: list(ends) for name, ends in self.ledger.intervals().items() if name not in self.unmeasured}
        return {
            **values,
            "intervals": bounds,
            "documents": self.ledger.num_documents,
            "uncompared_tokens": int(self.ledger.total("uncompared")),
        }


@dataclass
class _Window:
    """Sums of the objective over all batches, as a training step sums its micro-batches."""

    counts: Mapping[str, int] = field(default_factory=dict)
    loss: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)


def never_stop() -> None:
    """The default for `between`: an evaluation is never interrupted."""


@torch.no_grad()
def evaluate(
    student: Student,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    teacher: Teacher | None = None,
    mix: Mix | None = None,
    loss_weights: LossWeights | None = None,
    between: Callable[[], None] = never_stop,
) -> Evaluation:
    """Score held-out batches. Without a teacher there is no comparison, without a mix no objective.

    `between` is called before each batch; it may raise to end the evaluation.
    """
    start = time.monotonic()
    held_out = list(batches)
    window = _Window(mix.counts(held_out) if mix else {})
    ledger, unmeasured = Ledger(), frozenset[str]()
    needs = mix.needs(loss_weights) if mix and loss_weights else BothNeeds()
    was_training = student.model.training
    student.eval()
    try:
        for batch in held_out:
            between()
            on_device = batch.to(precision.device)
            with precision.autocast():
                view = student.observe(on_device, needs.student)
            signal = teacher.observe(on_device, needs.teacher) if teacher else None
            compared = teacher.whole_answer(on_device, signal) if teacher else None
            table = _measure(view, compared, on_device, teacher.num_exact if teacher else 0)
            unmeasured = unmeasured_by(compared, teacher.num_exact if teacher else 0)
            ledger.add(batch.documents or batch.sample_ids, table.cpu().numpy())
            if mix and loss_weights:
                _add_terms(window, mix, view, signal, on_device, loss_weights)
    finally:
        student.model.train(was_training)
    return _result(ledger, window, loss_weights if mix else None, time.monotonic() - start, unmeasured)


def _add_terms(
    window: _Window, mix: Mix, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights
) -> None:
    score = mix.score(view, signal, batch, loss_weights, window.counts)
    window.loss += float(score.loss)
    for name, term in score.terms.items():
        window.totals[name] = window.totals.get(name, 0.0) + float(term.total)


def _measure(view: StudentView, signal: Signal | None, batch: Batch, num_exact: int) -> Tensor:
    """The metrics' sums of each row of a batch, a chunk of positions at a time. [B, F] in FP64.

    With a sparse signal what can be had from it is compared: see `stored_comparison`.
    """
    dense = signal if isinstance(signal, DenseSignal) else None
    num_rows, length = batch.targets.shape
    targets, positions = batch.scored_targets, batch.positions
    sizes = batch.target_bytes.reshape(-1).index_select(0, positions)
    table = torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.float64, device=positions.device)
    log_q_of = log_probs_by_chunk(view.hidden, view.head)
    log_p_of = log_probs_by_chunk(dense.hidden, dense.head) if dense else None
    num_targets = int(targets.numel())
    for begin in range(0, num_targets, _CHUNK):
        part = slice(begin, min(begin + _CHUNK, num_targets))
        log_q, log_p = log_q_of(part), log_p_of(part) if log_p_of else None
        values = _columns(log_q, log_p, targets[part], sizes[part], _part(signal, part), num_exact)
        table.index_add_(0, positions[part] // length, values)
    if isinstance(signal, PairedSignal | PairedTokens):
        _measure_spans(table, view, signal, batch)
    return table


def _measure_spans(table: Tensor, view: StudentView, signal: PairedSignal | PairedTokens, batch: Batch) -> None:
    """Add to each row the KL between "this span comes" and "another does" of both models, and the bytes of its spans.

    A lower bound of the KL of their distributions over spans. A span that one of them cannot tell is not compared.
    """
    assert batch.other is not None
    slots = SpanSlots.of(batch)
    theirs, is_bad = teacher_surprisals(signal, batch.other, slots, _CHUNK)
    head = replace(view.head, clamp=None, product_dtype=None)
    ours = slots.sum_student(-head_values(view.hidden, head, taken_log_probs(batch.scored_targets), _CHUNK))
    sizes = slots.sum_student(batch.target_bytes.reshape(-1).index_select(0, batch.positions)).double()
    is_used = slots.is_span & ~is_bad & torch.isfinite(ours)
    values = binarised_kl(torch.where(is_used, theirs, 1.0).double(), torch.where(is_used, ours, 1.0).double(), 1.0)
    for name, column in (("span_kl", values), ("span_bytes", sizes)):
        of_rows = torch.where(is_used, column, 0.0).reshape(len(batch.input_ids), -1).sum(1)
        table[:, COLUMNS.index(name)] += of_rows


def _part(signal: Signal | None, part: slice) -> TopKSignal | SampledSignal | None:
    return select_rows(signal, part) if isinstance(signal, TopKSignal | SampledSignal) else None


def log_probs_by_chunk(hidden: Tensor, head: HeadWeights) -> Callable[[slice], Tensor]:
    """The log-probabilities of a chunk of positions, in FP32, by a head that is cast once at most.

    Without the clamp that an objective may ask for, and without the rounding of operands that a mixed mode asks for:
    metrics measure the model, not how it is trained.
    """
    head = replace(head, clamp=None, product_dtype=None)
    products = products_of(hidden, head, torch.float32, min(_CHUNK, max(1, len(hidden))))
    return lambda part: torch.log_softmax(finish(products.logits(part)), dim=-1)


def _columns(
    log_q: Tensor,
    log_p: Tensor | None,
    targets: Tensor,
    sizes: Tensor,
    stored: TopKSignal | SampledSignal | None,
    num_exact: int,
) -> Tensor:
    """The values of each position of a chunk. [C, F] in FP64.

    A position whose target has no finite log-probability counts as unscored and is 0 in all other columns.
    """
    nll = -log_q.gather(1, targets.unsqueeze(1)).squeeze(1)
    is_scored = torch.isfinite(nll)
    best, ids = log_q.topk(min(TOP_K, log_q.shape[1]), dim=1)
    values = {"nll": nll, "targets": torch.ones_like(nll), "bytes": sizes, "unscored": ~is_scored}
    if log_p is not None:
        values |= _comparison(log_q, log_p, ids, is_scored)
    elif stored is not None:
        values |= stored_comparison(log_q, stored, ids, is_scored, num_exact)
    assert values.keys() <= set(COLUMNS), "a value without a column would be read as 0"
    columns = [values[name].double() if name in values else torch.zeros_like(nll).double() for name in COLUMNS]
    for place, name in enumerate(COLUMNS):
        if name in ("nll", "targets", "bytes"):
            columns[place] = torch.where(is_scored, columns[place], 0.0)
    return torch.cat([torch.stack(columns, dim=1), _bins(best[:, 0].exp(), ids[:, 0] == targets, is_scored)], dim=1)


def _comparison(log_q: Tensor, log_p: Tensor, ids: Tensor, is_scored: Tensor) -> dict[str, Tensor]:
    """Student against teacher at each position. What cannot be compared is 0, and counted in `uncompared`."""
    size = min(log_q.shape[1], log_p.shape[1])
    log_q, log_p = log_q[:, :size], log_p[:, :size]
    p = log_p.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)
    is_compared = torch.isfinite(kl) & is_scored
    theirs = log_p.topk(ids.shape[1], dim=1).indices
    values = {
        "kl": kl,
        "agree": theirs[:, 0] == ids[:, 0],
        "in_top_k": (ids == theirs[:, :1]).any(dim=1),
        "shared": (ids.unsqueeze(2) == theirs.unsqueeze(1)).any(dim=2).double().mean(dim=1),
        "accepted": torch.minimum(p, log_q.exp()).sum(dim=1),
        "compared": torch.ones_like(kl),
    }
    compared = {name: torch.where(is_compared, value.double(), 0.0) for name, value in values.items()}
    return compared | {"uncompared": ~is_compared}


def stored_comparison(
    log_q: Tensor, signal: TopKSignal | SampledSignal, ids: Tensor, is_scored: Tensor, num_exact: int
) -> dict[str, Tensor]:
    """Student against a few tokens of the teacher: KL, and agreement where its top tokens come first in the signal.

    From samples the KL is an unbiased estimate; from top-k and tail it is a lower bound.
    """
    taken = log_q.gather(1, signal.ids)
    if isinstance(signal, SampledSignal):
        kl = -(signal.weights * taken).sum(dim=1) - signal.entropy
    else:
        rest = log_q.exp().scatter(1, signal.ids, 0.0).sum(dim=1).log()
        log_p = torch.cat([signal.log_probs, signal.tail_log_mass[:, None]], dim=1)
        p = log_p.exp()
        kl = torch.where(p != 0, p * (log_p - torch.cat([taken, rest[:, None]], dim=1)), 0.0).sum(dim=1)
    is_compared = torch.isfinite(kl) & is_scored
    theirs = signal.ids[:, : min(num_exact, TOP_K)]
    found = {"kl": kl, "compared": torch.ones_like(kl)}
    if num_exact:
        found["agree"] = theirs[:, 0] == ids[:, 0]
        found["in_top_k"] = (ids == theirs[:, :1]).any(dim=1)
    if num_exact >= ids.shape[1]:
        found["shared"] = (ids.unsqueeze(2) == theirs.unsqueeze(1)).any(dim=2).double().mean(dim=1)
    kept = {name: torch.where(is_compared, value.double(), 0.0) for name, value in found.items()}
    return kept | {"uncompared": ~is_compared}


def unmeasured_by(signal: Signal | None, num_exact: int) -> frozenset[str]:
    """Metrics that a signal cannot give: they are None, not 0."""
    if not isinstance(signal, TopKSignal | SampledSignal):
        return frozenset()
    if signal.temperature != 1.0:
        return AGAINST_TEACHER
    agreement = {"agreement", "top5_agreement"} if not num_exact else set()
    return frozenset({"acceptance", *agreement, *({"top5_overlap"} if num_exact < TOP_K else ())})


def _bins(confidence: Tensor, is_hit: Tensor, is_scored: Tensor) -> Tensor:
    """Count, confidence and hit of each position, in the column of its bin. [C, 3 * NUM_BINS]"""
    confidence = torch.where(is_scored, confidence, 0.0).double()
    place = (confidence * NUM_BINS).ceil().long().sub(1).clamp(0, NUM_BINS - 1).unsqueeze(1)
    parts = [
        torch.zeros(len(confidence), NUM_BINS, dtype=torch.float64, device=confidence.device).scatter_(
            1, place, (value.double() * is_scored).unsqueeze(1)
        )
        for value in (torch.ones_like(confidence), confidence, is_hit)
    ]
    return torch.cat(parts, dim=1)


def _result(
    ledger: Ledger, window: _Window, loss_weights: LossWeights | None, seconds: float, unmeasured: frozenset[str]
) -> Evaluation:
    values = {name: None if name in unmeasured else value for name, value in ledger.values().items()}
    perplexity, bits = values["perplexity"], values["bits_per_byte"]
    assert perplexity is not None and bits is not None
    num_targets = ledger.total("targets")
    means = {name: total / max(window.counts[name], 1) for name, total in window.totals.items()}
    return Evaluation(
        perplexity=perplexity,
        bits_per_byte=bits,
        nll=ledger.total("nll") / num_targets if num_targets else float("nan"),
        kl=values["kl"],
        agreement=values["agreement"],
        acceptance=values["acceptance"],
        objective=window.loss if loss_weights else None,
        terms=TermRecord.table(means, loss_weights.weights if loss_weights else {}),
        unscored_tokens=int(ledger.total("unscored")),
        tokens=int(num_targets),
        seconds=seconds,
        ledger=ledger,
        unmeasured=unmeasured,
    )


def summary_row(result: Evaluation, num_parameters: int) -> dict[str, Any]:
    """What the summary says of a model."""
    return {**result.yardsticks(), "parameters": num_parameters}
