"""Entropy and teacher-student distance of each position, computed before the pass that makes gradients.

It costs the two logits products once more and keeps two numbers for each position.

Legend: N scored positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.core.numerics import Softmax, head_and_tail, work_dtype
from stillroom.core.types import DenseSignal, Signal, StudentView, TopKSignal
from stillroom.losses.head.products import products_of
from stillroom.losses.head.rows import choose_chunk, finish, keep_top_k, parts, select_rows, without_empty_tail


@dataclass(frozen=True)
class RowFacts:
    """Statistics of each position, without gradients."""

    entropy: Tensor  # [N], of the student at T = 1, in nats
    hellinger: Tensor  # [N], between teacher and student; NaN where the teacher's row is not a distribution


@torch.no_grad()
def survey(view: StudentView, signal: Signal | None, *, chunk_tokens: int, top_k: int = 0) -> RowFacts:
    """Compute the statistics of every position, a chunk at a time.

    The distance is taken at T = 1 from a dense teacher, and over kept tokens and tail at the stored temperature from
    top-k answers. Without a teacher, or from samples, it is NaN.
    """
    dtype = work_dtype(view.hidden, view.head.weight)
    num_rows = view.hidden.shape[0]
    chunk = choose_chunk(chunk_tokens, view.hidden, view.head.num_real)
    student = products_of(view.hidden, view.head, dtype, chunk)
    teacher = products_of(signal.hidden, signal.head, dtype, chunk) if isinstance(signal, DenseSignal) else None
    entropy = torch.zeros(num_rows, dtype=dtype, device=view.hidden.device)
    hellinger = torch.full_like(entropy, torch.nan)
    for part in parts(num_rows, chunk):
        logits = finish(student.logits(part))
        own = Softmax.of_logits(logits)
        entropy[part] = own.log_norm - (own.probs * own.scores).sum(-1)
        if teacher is not None and not top_k:
            hellinger[part] = _distance(own.probs, Softmax.of_logits(finish(teacher.logits(part))).probs)
        elif teacher is not None:
            ones = torch.ones_like(entropy[part])
            hellinger[part] = _kept_distance(logits, keep_top_k(finish(teacher.logits(part)), top_k, ones), 1.0)
        elif isinstance(signal, TopKSignal):
            stored = select_rows(signal, part)
            assert isinstance(stored, TopKSignal)
            hellinger[part] = _kept_distance(logits, stored, signal.temperature)
    return RowFacts(entropy, hellinger)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """sqrt(sum (sqrt p - sqrt q)^2 / 2), which keeps its digits where 1 - sum sqrt(p q) has none left."""
    return one.sqrt().sub_(other.sqrt()).square_().sum(-1).mul_(0.5).sqrt_()


def _kept_distance(logits: Tensor, kept: TopKSignal, temperature: float) -> Tensor:
    kept = without_empty_tail(kept, logits.shape[-1])
    head, tail, _ = head_and_tail(logits / temperature, kept.ids)
    student = torch.cat((head, tail[:, None]), -1).exp()
    return _distance(student, torch.cat((kept.log_probs, kept.tail_log_mass[:, None]), -1).to(logits.dtype).exp())
