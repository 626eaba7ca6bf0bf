"""Held-out evaluation: the very score that is trained, and yardsticks that no objective can move.

The objective is evaluated by the same `mix.score` with the same lesson as the step before it, so a gap
between training and evaluation is a property of the data, never of the code. The yardsticks are always
taken at temperature 1 over the whole vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillroom.models.probe import head_logits
from stillroom.models.student import Student, scored_rows, scored_targets
from stillroom.objectives.mix import Mix
from stillroom.precision import Precision
from stillroom.teachers import TeacherSource
from stillroom.types import Batch, BothNeeds, DenseSignal, HeadWeights, Lesson, Signal, TermRecord

_CHUNK = 512
_MAX_NLL = math.log(1e30)  # above this a perplexity is no longer a number worth printing


@dataclass
class Sums:
    """Running totals over positions. Everything is a sum, so batches of any size add up to the same mean."""

    nll: float = 0.0
    kl: float = 0.0
    agree: float = 0.0
    overlap: float = 0.0
    targets: int = 0
    compared: int = 0
    unscored: int = 0
    num_bytes: int = 0
    terms: dict[str, list[float]] = field(default_factory=dict)  # total, count


@dataclass(frozen=True)
class Evaluation:
    """What a model is worth on held-out text."""

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

    def yardsticks(self) -> dict[str, Any]:
        return {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "kl": self.kl,
            "agreement": self.agreement,
            "acceptance": self.acceptance,
        }


@torch.no_grad()
def evaluate(
    student: Student,
    batches: Iterable[Batch],
    *,
    precision: Precision,
    teacher: TeacherSource | None = None,
    mix: Mix | None = None,
    lesson: Lesson | None = None,
) -> Evaluation:
    """Score held-out batches. Without a teacher the comparison is left out; without a mix the objective is."""
    start = time.monotonic()
    sums = Sums()
    needs = mix.needs(lesson) if mix and lesson else BothNeeds()
    was_training = student.model.training
    student.eval()
    try:
        for batch in batches:
            rows = scored_rows(batch)
            on_device, rows_there = batch.to(precision.device), rows.to(precision.device)
            targets = scored_targets(on_device, rows_there)
            with precision.autocast():
                view = student.observe(on_device, rows_there, needs.student)
            signal = teacher.observe(on_device, rows_there, needs.teacher) if teacher else None
            sums.num_bytes += int(batch.target_bytes.sum())
            _measure(sums, view.hidden, view.head, signal, targets)
            if mix and lesson:
                _add_terms(sums, mix, view, signal, targets, lesson)
    finally:
        student.model.train(was_training)
    return _result(sums, lesson, time.monotonic() - start)


def _add_terms(sums: Sums, mix: Mix, view: Any, signal: Signal | None, targets: Tensor, lesson: Lesson) -> None:
    counts = {name: max(int(targets.numel()), 1) for name in lesson.weights}
    for name, term in mix.score(view, signal, targets, lesson, counts).terms.items():
        total = sums.terms.setdefault(name, [0.0, 0.0])
        total[0] += float(term.total)
        total[1] += float(term.count)


def _measure(sums: Sums, hidden: Tensor, head: HeadWeights, signal: Signal | None, targets: Tensor) -> None:
    """Add the yardsticks of one batch, a chunk of positions at a time."""
    dense = signal if isinstance(signal, DenseSignal) else None
    for begin in range(0, int(targets.numel()), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        log_probs = torch.log_softmax(head_logits(head, hidden[part]), dim=-1)
        nll = -log_probs.gather(1, targets[part].unsqueeze(1)).squeeze(1)
        is_finite = torch.isfinite(nll)
        sums.unscored += int((~is_finite).sum())
        sums.targets += int(is_finite.sum())
        sums.nll += float(torch.where(is_finite, nll, 0.0).double().sum())
        if dense is not None:
            _compare(sums, log_probs, torch.log_softmax(head_logits(dense.head, dense.hidden[part]), dim=-1))


def _compare(sums: Sums, student_log_probs: Tensor, teacher_log_probs: Tensor) -> None:
    size = min(student_log_probs.shape[1], teacher_log_probs.shape[1])
    log_q, log_p = student_log_probs[:, :size], teacher_log_probs[:, :size]
    p, q = log_p.exp(), log_q.exp()
    kl = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(dim=1)
    is_finite = torch.isfinite(kl)
    sums.compared += int(is_finite.sum())
    sums.kl += float(torch.where(is_finite, kl, 0.0).double().sum())
    agree = (log_p.argmax(dim=1) == log_q.argmax(dim=1)) & is_finite
    sums.agree += float(agree.sum())
    sums.overlap += float(torch.where(is_finite, torch.minimum(p, q).sum(dim=1), 0.0).double().sum())


def _result(sums: Sums, lesson: Lesson | None, seconds: float) -> Evaluation:
    nll = sums.nll / sums.targets if sums.targets else float("nan")
    means = {name: total / count if count else float("nan") for name, (total, count) in sums.terms.items()}
    terms = TermRecord.table(means, lesson.weights if lesson else {})
    share = 1.0 / sums.compared if sums.compared else None
    return Evaluation(
        perplexity=math.exp(nll) if nll < _MAX_NLL else float("inf") if nll == nll else float("nan"),
        bits_per_byte=sums.nll / math.log(2) / sums.num_bytes if sums.num_bytes else float("nan"),
        nll=nll,
        kl=sums.kl * share if share else None,
        agreement=sums.agree * share if share else None,
        acceptance=sums.overlap * share if share else None,
        objective=sum(term.scaled for term in terms.values()) if terms else None,
        terms=terms,
        unscored_tokens=sums.unscored,
        tokens=sums.targets,
        seconds=seconds,
    )
