"""Held-out evaluation: the training objective, and metrics that do not depend on it.

Score the held-out batches as the window of one training step: by the same `mix.score`, with the loss weights of the
last step, and with counts taken before any forward. So a gap between training and evaluation comes from the data, not
from the code. The metrics are measured at temperature 1 over the whole vocabulary, a chunk of positions at a time.

Each model runs once for both: the metrics read the logits that the objective's pass over the head makes. What the
teacher says is kept between evaluations, so that from the second one on only the student runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.core.types import (
    Batch,
    BothNeeds,
    DenseSignal,
    HeadWeights,
    LossWeights,
    Needs,
    PairedSignal,
    PairedTokens,
    SampledSignal,
    Signal,
    StudentView,
    TermRecord,
    TopKSignal,
)
from stillroom.losses.head.products import GivenLogits, Products, products_of
from stillroom.losses.head.rows import Logits, finish, parts, select_rows
from stillroom.losses.mix import Mix
from stillroom.losses.two_tokenizers import SpanSlots, binarised_kl, head_values, taken_log_probs, teacher_surprisals
from stillroom.metrics.metrics import AGAINST_TEACHER, COLUMNS, NUM_BINS, NUM_COLUMNS, TOP_K, Ledger
from stillroom.models.student import Student
from stillroom.precision import Precision
from stillroom.teachers import Teacher

_CHUNK = 512
_BLOCK = 1 << 20  # logits of the positions that are measured at once: what is made of them stays in a processor's cache
KEPT_BYTES = 256_000_000  # of a teacher's answers that are kept between evaluations


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
    teacher: Evaluation | None = None  # its own scores from the same pass, where they were asked for
    answers: Mapping[str, Any] | None = None  # figures of the prompts answered, see `training/answers.py`
    tasks: Mapping[str, Any] | None = None  # figures of benchmarks
    select: str = "perplexity"  # what students are chosen by
    selected: float | None = None  # its value, where it is not the perplexity

    def chosen_by(self) -> dict[str, Any]:
        """What was measured for the choice of a student; empty where that is the perplexity alone."""
        found = {"answers": self.answers, "tasks": self.tasks}
        chosen = {} if self.select == "perplexity" else {"selected": self.selected}
        return {**{name: value for name, value in found.items() if value is not None}, **chosen}

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


class KeptAnswers:
    """What a teacher says on held-out batches, in main memory, by the contents of their rows.

    Hidden states are kept and not distributions: they are a few kB a position, and every metric made of them is the
    same to the last bit. Beyond `most_bytes` nothing more is kept, and those batches are asked at every evaluation.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._teacher: Teacher | None = None
        self._known: dict[tuple[tuple[str, ...], Needs], tuple[Signal | None, Signal | None]] = {}
        self.num_not_kept = 0  # batches beyond the bound

    def ask(self, teacher: Teacher, batch: Batch, needs: Needs) -> tuple[Signal | None, Signal | None]:
        """The teacher's answer to a batch on its device, and the answer that the student is compared with."""
        if not teacher.answers_last or self._teacher not in (None, teacher):
            return _asked(teacher, batch, needs)
        self._teacher, device, key = teacher, batch.input_ids.device, (batch.keys, needs)
        if key in self._known:
            answer, compared = self._known[key]
            moved = _moved(answer, device)
            return moved, moved if compared is answer else _moved(compared, device)
        answer, compared = _asked(teacher, batch, needs)
        kept = _moved(answer, "cpu")
        both = kept, kept if compared is answer else _moved(compared, "cpu")
        size = sum(_num_bytes(one) for one in both[: 1 if both[1] is kept else 2])
        if self._num_bytes + size <= self._most_bytes:
            self._num_bytes += size
            self._known[key] = both
        else:
            self.num_not_kept += 1
        return answer, compared


def _asked(teacher: Teacher, batch: Batch, needs: Needs) -> tuple[Signal | None, Signal | None]:
    signal = teacher.observe(batch, needs)
    return signal, teacher.whole_answer(batch, signal)


def _tensors_of(signal: Signal) -> dict[str, Tensor]:
    """The tensors of an answer but its head, which is the teacher's own."""
    named = {one.name: getattr(signal, one.name) for one in fields(signal)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _moved(signal: Signal | None, device: torch.device | str) -> Any:
    if signal is None:
        return None
    tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in _tensors_of(signal).items()}
    if isinstance(signal, PairedTokens):
        tensors["few"] = _moved(signal.few, device)
    return replace(signal, **tensors, taps={name: tap.to(device) for name, tap in signal.taps.items()})


def _num_bytes(signal: Signal | None) -> int:
    if signal is None:
        return 0
    few = _num_bytes(signal.few) if isinstance(signal, PairedTokens) else 0
    return few + sum(one.nbytes for one in (*_tensors_of(signal).values(), *signal.taps.values()))


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
    answers: KeptAnswers | None = None,
    scores_teacher: bool = False,
) -> Evaluation:
    """Score held-out batches. Without a teacher there is no comparison, without a mix no objective.

    `between` is called before each batch; it may raise to end the evaluation. `answers` are those of earlier
    evaluations. With `scores_teacher` the teacher's own scores are taken from the same pass; None where what it
    answers is not its whole distribution.
    """
    start = time.monotonic()
    held_out = list(batches)
    window = _Window(mix.counts(held_out) if mix else {})
    ledger, own, unmeasured = Ledger(), Ledger(), frozenset[str]()
    needs = mix.needs(loss_weights) if mix and loss_weights else BothNeeds()
    answers = answers or KeptAnswers(0)
    num_exact = teacher.num_exact if teacher else 0
    was_training = student.model.training
    student.eval()
    try:
        for batch in held_out:
            between()
            on_device = batch.to(precision.device)
            with precision.autocast():
                view = student.observe(on_device, needs.student)
            signal, compared = answers.ask(teacher, on_device, needs.teacher) if teacher else (None, None)
            measure = _Measure(view, signal, compared, on_device, num_exact, scores_teacher=scores_teacher)
            if mix and loss_weights:
                _add_terms(window, mix, measure.watched(view), signal, on_device, loss_weights)
            ledger.add(batch.documents or batch.sample_ids, measure.finished().cpu().numpy())
            unmeasured = unmeasured_by(compared, num_exact)
            if scores_teacher and teacher and isinstance(compared, DenseSignal | PairedSignal):
                read = teacher.own_batch(on_device)
                table = measure.own if measure.own is not None else _own_table(compared, read)
                own.add(read.documents or read.sample_ids, table.cpu().numpy())
    finally:
        student.model.train(was_training)
    result = _result(ledger, window, loss_weights if mix else None, time.monotonic() - start, unmeasured)
    return replace(result, teacher=_result(own, _Window(), None, 0.0, frozenset())) if own.num_documents else result


def _add_terms(
    window: _Window, mix: Mix, view: StudentView, signal: Signal | None, batch: Batch, loss_weights: LossWeights
) -> None:
    score = mix.score(view, signal, batch, loss_weights, window.counts)
    window.loss += float(score.loss)
    for name, term in score.terms.items():
        window.totals[name] = window.totals.get(name, 0.0) + float(term.total)


class _Measure:
    """The metrics' sums of each row of a batch, a block of positions at a time. [B, F] in FP64.

    The logits are those that the objective's pass makes, where it makes them as the metrics want them, else own ones.
    With a sparse signal what can be had from it is compared: see `stored_comparison`.
    """

    def __init__(
        self,
        view: StudentView,
        signal: Signal | None,
        compared: Signal | None,
        batch: Batch,
        num_exact: int,
        *,
        scores_teacher: bool,
    ) -> None:
        self._view, self._batch, self._compared, self._num_exact = view, batch, compared, num_exact
        self._dense = compared if isinstance(compared, DenseSignal) else None
        is_plain = self._dense is not None and self._dense.head.product_dtype is None
        self._is_teacher_shared = is_plain and compared is signal
        self._products: Products | GivenLogits | None = None  # of the teacher, where the pass does not make its logits
        self._sizes = batch.target_bytes.reshape(-1).index_select(0, batch.positions)
        self._num_seen = 0
        self._table = self._empty()
        self.own = self._empty() if scores_teacher and self._dense else None  # of a teacher that reads the same tokens

    def _empty(self) -> Tensor:
        num_rows = len(self._batch.targets)
        return torch.zeros(num_rows, NUM_COLUMNS, dtype=torch.float64, device=self._batch.positions.device)

    def watched(self, view: StudentView) -> StudentView:
        """The view whose logits are measured while they are there: not those that a mixed mode rounds."""
        return view if view.head.product_dtype is not None else replace(view, on_logits=self.see)

    def see(self, part: slice, student: Logits, teacher: Logits | None) -> None:
        """Add the positions of a chunk. Their logits are measured without the clamp that an objective may ask for."""
        if student.raw.dtype != torch.float32:
            return
        if self._dense is not None and not (teacher is not None and self._is_teacher_shared):
            self._products = self._products or _products(self._dense.hidden, self._dense.head, part.stop - part.start)
            teacher = self._products.logits(part)
        for inner in parts(part.stop - part.start, max(1, _BLOCK // student.raw.shape[1])):
            log_q = _log_probs(student.rows(inner))
            log_p = _log_probs(teacher.rows(inner)) if self._dense is not None and teacher is not None else None
            self._add(slice(part.start + inner.start, part.start + inner.stop), log_q, log_p)
        self._num_seen = part.stop

    def finished(self) -> Tensor:
        """The table, of all positions."""
        num_positions = self._batch.num_scored
        if self._num_seen < num_positions:
            products = _products(self._view.hidden, self._view.head, _CHUNK)
            for part in parts(num_positions, _CHUNK):
                self.see(part, products.logits(part), None)
        if isinstance(self._compared, PairedSignal | PairedTokens):
            _measure_spans(self._table, self._view, self._compared, self._batch)
        return self._table

    def _add(self, part: slice, log_q: Tensor, log_p: Tensor | None) -> None:
        targets, sizes = self._batch.scored_targets[part], self._sizes[part]
        rows = self._batch.positions[part] // self._batch.targets.shape[1]
        stored = _part(self._compared, part)
        self._table.index_add_(0, rows, _columns(log_q, log_p, targets, sizes, stored, self._num_exact))
        if self.own is not None and log_p is not None:
            self.own.index_add_(0, rows, _columns(log_p, log_p, targets, sizes, None, 0))


def _own_table(signal: DenseSignal | PairedSignal, batch: Batch) -> Tensor:
    """The same of a teacher alone, on the batch as it reads it."""
    view = StudentView(signal.hidden, signal.head)
    return _Measure(view, None, None, batch, 0, scores_teacher=False).finished()


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
    """The log-probabilities of a chunk of positions, in FP32, by a head that is cast once at most."""
    products = _products(hidden, head, _CHUNK)
    return lambda part: _log_probs(products.logits(part))


def _products(hidden: Tensor, head: HeadWeights, chunk_tokens: int) -> Products | GivenLogits:
    """The logits of chunks, in FP32 and in scratch of the pool.

    Without the clamp that an objective may ask for, and without the rounding of operands that a mixed mode asks for:
    metrics measure the model, not how it is trained.
    """
    head = replace(head, clamp=None, product_dtype=None)
    return products_of(hidden, head, torch.float32, min(chunk_tokens, max(1, len(hidden))))


def _log_probs(logits: Logits) -> Tensor:
    return torch.log_softmax(finish(replace(logits, clamp=None)), dim=-1)


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
    gap = (log_p - log_q).mul_(p)
    kl = gap.masked_fill_(p == 0, 0.0).sum(dim=1)  # 0 * inf where a token is impossible
    accepted = torch.minimum(p, torch.exp(log_q, out=gap), out=p).sum(dim=1)
    is_compared = torch.isfinite(kl) & is_scored
    theirs = log_p.topk(ids.shape[1], dim=1).indices
    values = {
        "kl": kl,
        "agree": theirs[:, 0] == ids[:, 0],
        "in_top_k": (ids == theirs[:, :1]).any(dim=1),
        "shared": (ids.unsqueeze(2) == theirs.unsqueeze(1)).any(dim=2).double().mean(dim=1),
        "accepted": accepted,
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
    return {**result.yardsticks(), **result.chosen_by(), "parameters": num_parameters}
