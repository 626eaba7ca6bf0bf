"""Trials of the sparse forms of a teacher's answer, from its hidden states to the loss of a student.

An answer is rounded to whole steps when it is made. So the loss is held twice: exactly, against the formula on the
rounded answer, and within the rounding, against the formula on the whole distribution. What is drawn is right in the
mean: many positions with the same distribution are answered, each with draws of its own.

Legend: N positions, V vocabulary, D width.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from stillroom.checks import textbook
from stillroom.checks.selftest.cases import draw, gradient, leaf, members, slope_error
from stillroom.checks.selftest.trial import Measured, Trial, away, worst
from stillroom.objectives import divergences, score_head
from stillroom.objectives.divergences.base import Divergence
from stillroom.teachers.signals import LOG_STEP, SignalSpec, reduce_row, signal_of
from stillroom.types import DenseSignal, HeadWeights, SampledSignal, StudentView, TopKSignal

GROUP = "sparse forms"
_EXACT = 3e-5
_SIGMAS = 5.0
_TOKENS, _WIDTH, _TEMPERATURE = 97, 12, 2.0
_COPIES = 3000


def trials() -> list[Trial]:
    made = [Trial(GROUP, f"top-k, {name}", functools.partial(_top_k, member, "top_k")) for name, member in members()]
    made.append(Trial(GROUP, "renormalised", functools.partial(_top_k, divergences.make("forward_kl"), "renormalised")))
    made.append(Trial(GROUP, "top-k of a dense teacher, live", _live_top_k))
    for kind, exact in (("sampled", 0), ("hybrid", 8)):
        spec = SignalSpec(kind, exact, 12, _TEMPERATURE)  # type: ignore[arg-type]
        made.append(Trial(GROUP, kind, functools.partial(_sampled, spec)))
    return made


def _problem(num_rows: int) -> tuple[Tensor, HeadWeights, Tensor, HeadWeights, Tensor]:
    """Student and teacher in FP32: hidden states and head of each; and the targets."""
    student = draw(0, num_rows, _WIDTH, spread=1.0, dtype=torch.float32)
    teacher = draw(1, num_rows, _WIDTH, spread=1.0, dtype=torch.float32)
    heads = [HeadWeights(draw(seed, _TOKENS, _WIDTH, spread=1.0, dtype=torch.float32)) for seed in (2, 3)]
    return student, heads[0], teacher, heads[1], torch.arange(num_rows) * 5 % _TOKENS


def _score(hidden: Tensor, head: HeadWeights, signal: TopKSignal | SampledSignal, member: Divergence) -> Tensor:
    targets = torch.zeros(len(hidden), dtype=torch.long)
    return score_head(
        StudentView(hidden, head), signal, targets, kd_weight=1.0, ce_weight=0.0, divergence=member,
        temperature=_TEMPERATURE,
    ).loss  # fmt: skip


def _log_probs(hidden: Tensor, head: HeadWeights) -> Tensor:
    return torch.log_softmax(textbook.logits_of(hidden, head) / _TEMPERATURE, -1)


def _top_k(member: Divergence, kind: str) -> Measured:
    student, head, teacher, teacher_head, targets = _problem(9)
    spec = SignalSpec(kind, 16, 0, _TEMPERATURE)  # type: ignore[arg-type]
    signal = signal_of(reduce_row(teacher, teacher_head, targets, spec, "row"), spec)
    assert isinstance(signal, TopKSignal)
    ours, exact = leaf(student), leaf(student, torch.float64)
    loss = _score(ours, head, signal, member)
    stored = torch.cat((signal.log_probs, signal.tail_log_mass[:, None]), -1).double().exp()
    q = textbook.buckets(_log_probs(exact, head).exp(), signal.ids)
    if kind == "renormalised":  # the last bucket has no mass for the teacher, and 0 log 0 is 0
        expected = (stored[:, :-1] * (stored[:, :-1].log() - q[:, :-1].log())).sum() * _TEMPERATURE**2
    else:
        expected = textbook.between(member, stored / stored.sum(-1, keepdim=True), q).sum() * _TEMPERATURE**2
    parts = [
        Measured(away(loss, expected), _EXACT, "the loss"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, exact)[0]), _EXACT, "the gradient"),
        Measured(float((stored.sum(-1) - 1).abs().max()), 1e-5, "the sum of the masses"),
    ]
    if kind == "top_k":
        whole = _log_probs(teacher, teacher_head)
        kept = whole.gather(-1, signal.ids)
        parts.append(Measured(float((signal.log_probs - kept).abs().max()), LOG_STEP, "a stored log-probability"))
        if textbook.is_smooth(member):
            wide = HeadWeights(head.weight.double())
            error = slope_error(lambda hidden: _score(hidden, wide, signal, member), student)
            parts.append(Measured(error, 1e-6, "the gradient against finite differences"))
    return worst(*parts)


def _live_top_k() -> Measured:
    """Keeping k tokens of a dense teacher in the head's pass: the divergence of k + 1 outcomes."""
    student, head, teacher, teacher_head, _targets = _problem(9)
    ours, exact = leaf(student), leaf(student, torch.float64)
    member = divergences.make("jsd")
    dense = DenseSignal(teacher, teacher_head)
    loss = score_head(
        StudentView(ours, head), dense, torch.zeros(9, dtype=torch.long), kd_weight=1.0, ce_weight=0.0,
        divergence=member, temperature=_TEMPERATURE, top_k=10, chunk_tokens=4,
    ).loss  # fmt: skip
    whole = _log_probs(teacher, teacher_head)
    ids = whole.topk(10).indices
    q = textbook.buckets(_log_probs(exact, head).exp(), ids)
    expected = textbook.between(member, textbook.buckets(whole.exp(), ids), q).sum() * _TEMPERATURE**2
    return worst(
        Measured(away(loss, expected), _EXACT, "the loss"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, exact)[0]), _EXACT, "the gradient"),
    )


def _sampled(spec: SignalSpec) -> Measured:
    """One distribution, drawn from many times: exactly scored, and its mean is that of the whole distribution."""
    student, head, teacher, teacher_head, _targets = _problem(1)
    student, teacher = student.expand(_COPIES, -1).contiguous(), teacher.expand(_COPIES, -1).contiguous()
    targets = torch.zeros(_COPIES, dtype=torch.long)
    signal = signal_of(reduce_row(teacher, teacher_head, targets, spec, "row"), spec)
    assert isinstance(signal, SampledSignal)
    member = divergences.make("forward_kl")
    ours, exact = leaf(student), leaf(student, torch.float64)
    loss = _score(ours, head, signal, member)
    log_q = _log_probs(exact, head)
    weights = signal.weights.double()
    of_row = -(weights * log_q.gather(-1, signal.ids)).sum(-1) - signal.entropy.double()
    expected = of_row.sum() * _TEMPERATURE**2
    whole = _log_probs(teacher[:1], teacher_head)
    true = float(textbook.kl(whole.exp(), log_q[:1].detach().exp()).sum())
    of_row = of_row.detach()
    deviation = float(of_row.std()) / math.sqrt(_COPIES)
    return worst(
        Measured(away(loss, expected), _EXACT, "the loss"),
        Measured(away(gradient(loss, ours)[0], gradient(expected, exact)[0]), _EXACT, "the gradient"),
        Measured(float((weights.sum(-1) - 1).abs().max()), 1e-5, "the sum of the weights"),
        # The rounding of masses and of the entropy shifts the mean by less than a step.
        Measured(abs(float(of_row.mean()) - true), _SIGMAS * deviation + LOG_STEP, "the mean over draws"),
    )
