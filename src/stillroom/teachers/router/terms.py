"""The router's loss, the steps of sar-transient and sar-meta, and the assessment of a teacher with trained gates.

The terms go through the fused head with the roles exchanged: the teacher learns, and the student (or the original
teacher) is the signal. No [tokens, vocabulary] tensor is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, DenseSignal, Needs, StudentView, Term
from stillroom.losses.divergences import make
from stillroom.losses.head.loss import score_head
from stillroom.losses.router import entropy, gate_log_probs, load_balance, shares_of
from stillroom.models import Student
from stillroom.models.anatomy import in_eval_mode
from stillroom.models.routers import Routing, routed
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, Precision

if TYPE_CHECKING:
    from stillroom.teachers.router.teacher import RouterTeacher

_OFFSET_LENGTH = 0.5  # of a token's gate offset in sar-transient, in gate logits
_META_STEP = 2.0  # width of the central difference, in lookahead steps


@dataclass(frozen=True)
class Aims:
    """The weights of the router's terms."""

    truth: float = 0.0
    student: float = 0.0
    anchor: float = 0.0
    load_balance: float = 0.0
    entropy: float = 0.0


def own_terms(
    aims: Aims,
    answer: DenseSignal,
    view: StudentView | None,
    anchor: DenseSignal | None,
    routing: Routing,
    batch: Batch,
    num_targets: int,
    num_tokens: int,
    opposite: StudentView | None = None,
) -> tuple[Tensor, dict[str, Term]]:
    """The router's loss of one micro-batch, divided by the counts of the window, and its terms.

    truth * CE(T) + student * KL(T || S) + anchor * KL(T0 || T) + load_balance * L - entropy * H
    """
    teacher, targets = StudentView(answer.hidden, answer.head), batch.scored_targets
    student = None if view is None else _as_signal(view)
    per_target = 1.0 / max(num_targets, 1)
    terms: dict[str, Term] = {}
    is_meta = opposite is not None
    scored = score_head(
        teacher, student, targets,
        kd_weight=0.0 if student is None else (-1.0 / _META_STEP if is_meta else 1.0) * aims.student * per_target,
        ce_weight=aims.truth * per_target,
        divergence=make("reverse_kl"),
    )  # fmt: skip
    loss, bad = scored.loss, scored.counters["bad_teacher_rows"]
    if "ce" in scored.terms:
        terms["truth"] = scored.terms["ce"]
    if "kd" in scored.terms:
        terms["student"] = scored.terms["kd"]
    if opposite is not None and aims.student:
        # sum_v p(v) d log q(v) along the lookahead step, as a difference of two divergences.
        backward = score_head(teacher, _as_signal(opposite), targets, kd_weight=aims.student * per_target / _META_STEP,
                          ce_weight=0.0, divergence=make("reverse_kl"))  # fmt: skip
        loss = loss + backward.loss
        terms["opposite"] = backward.terms["kd"]
    if anchor is not None and aims.anchor:
        anchored = score_head(teacher, anchor, targets, kd_weight=aims.anchor * per_target, ce_weight=0.0,
                          divergence=make("forward_kl"))  # fmt: skip
        loss = loss + anchored.loss
        terms["anchor"] = anchored.terms["kd"]
        bad = bad + anchored.counters["bad_teacher_rows"]
    if student is not None or anchor is not None:
        # Count rows whose signal was not a distribution: they were scored on their labels instead.
        ones = torch.ones_like(targets, dtype=torch.float32)
        terms["bad_rows"] = Term(bad.to(ones.dtype), ones.sum())
    return loss + _gate_terms(aims, routing, batch, num_tokens, terms), terms


def _as_signal(view: StudentView) -> DenseSignal:
    """The student's view as a signal, detached: the gates learn here, not the student."""
    head = view.head
    bias = None if head.bias is None else head.bias.detach()
    return DenseSignal(view.hidden.detach(), replace(head, weight=head.weight.detach(), bias=bias))


def _gate_terms(aims: Aims, routing: Routing, batch: Batch, num_tokens: int, terms: dict[str, Term]) -> Tensor:
    """Load balance and entropy, averaged over gates, so that the weight does not depend on the depth."""
    loss = torch.zeros((), device=batch.input_ids.device)
    if not (aims.load_balance or aims.entropy):
        return loss
    is_token = batch.attention_mask.reshape(-1).bool()
    share = 1.0 / (max(num_tokens, 1) * len(routing.seen))
    for seen in routing.seen.values():
        log_probs = gate_log_probs(seen.logits, is_sigmoid=seen.is_sigmoid)
        parts = {
            "load_balance": load_balance(log_probs, seen.chosen, is_token),
            "entropy": entropy(log_probs, is_token),
        }
        loss = loss + share * (aims.load_balance * parts["load_balance"].total - aims.entropy * parts["entropy"].total)
        for name, term in parts.items():
            known = terms.get(name)
            terms[name] = term if known is None else Term(known.total + term.total, known.count + term.count)
    return loss


def weighted(answer: DenseSignal, weight: float) -> DenseSignal:
    """The same answer, with its gradient multiplied by `weight`."""

    def scaled(states: Tensor) -> Tensor:
        if not states.requires_grad:
            return states
        states = states.view_as(states)
        states.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
        return states

    taps = {name: scaled(tap) for name, tap in answer.taps.items()}
    return replace(answer, hidden=scaled(answer.hidden), taps=taps)


# -- sar-transient --------------------------------------------------------------------------------------


def downhill_offsets(teacher: RouterTeacher, batch: Batch, view: StudentView) -> tuple[dict[str, Tensor], list[Term]]:
    """For each gate, offsets of its logits against the router's gradient, of bounded norm. [tokens, experts]

    The offset of a token without a usable gradient is 0; the second result counts those tokens, a term for each gate.
    """
    num_tokens = int(batch.input_ids.numel())
    config, original = teacher.config, teacher.original
    offsets = {
        gate.name: torch.zeros(num_tokens, gate.num_experts, device=original.device, requires_grad=True)
        for gate in teacher.moe_gates
    }
    aims = Aims(truth=config.truth_weight, student=config.student_weight)
    with torch.enable_grad(), teacher.opened(Routing(offsets=offsets)) as routing:
        answer = original.answer(batch, Needs())
        loss, _terms = own_terms(aims, answer, view, None, routing, batch, batch.num_scored, num_tokens)
        # Undo the division by the number of targets, which would flush FP16 gradients to 0: only directions are used.
        slopes = torch.autograd.grad(loss * batch.num_scored, list(offsets.values()))
    moved, unmoved = {}, []
    for name, slope in zip(offsets, slopes, strict=True):
        length = slope.norm(dim=1, keepdim=True)
        is_usable = torch.isfinite(length) & (length > 0)
        step = -_OFFSET_LENGTH * slope / torch.where(is_usable, length, torch.ones_like(length))
        moved[name] = torch.where(is_usable, step, torch.zeros_like(step))
        unmoved.append(Term((~is_usable).sum().float(), torch.tensor(float(len(length)))))
    return moved, unmoved


# -- sar-meta --------------------------------------------------------------------------------------------
# Train the gates so that the student's next step lowers its loss on another batch, the lookahead batch.
#
# The gradient of forward KL is linear in the teacher's probabilities p. So the change of the lookahead batch's loss
# after one student step is, to first order, sum_v p(v) d log q(v) along that batch's own preconditioned step u, and its
# gradient for the gates needs no second derivative. The derivative along u is a central difference: the teacher's
# divergences from two students, one step along u and one step against it.
#
# Experimental. A single step improves the student, a run of steps does not: it overfits the lookahead batch.

Direction = Mapping[str, Tensor]


def check_precision(precision: Precision) -> None:
    """Raise for FP16 weights: they cannot hold steps this small."""
    if precision.keeps_half_weights:
        raise ConfigError(
            f"sar-meta moves the student's weights by less than {precision.mode} can hold",
            where="teacher.router.mode",
            advice=["--precision fp32", "--precision fp16-mixed", "--set teacher.router.mode=sar"],
        )


def lookahead_direction(
    student: Student, optimizer: AdamW, precision: Precision, lookahead_batch: Batch, rate: float
) -> Direction:
    """The gradient of the batch's cross-entropy, preconditioned by AdamW's second moments, times the rate.

    Called between windows: the student has no gradient before and after. Empty before the first update, when there
    are not second moments.
    """
    if not optimizer.num_updates or not lookahead_batch.num_scored:
        return {}
    batch = lookahead_batch.to(precision.device)
    with in_eval_mode(student.model):
        with precision.autocast():
            view = student.observe(batch, Needs())
        ce_weight = 1.0 / max(batch.num_scored, 1)
        scored = score_head(view, None, batch.scored_targets, kd_weight=0.0, ce_weight=ce_weight, divergence=None)
        precision.backward(scored.loss)
    direction = {}
    for cell in optimizer.cells["student"]:
        if cell.gradient is not None:
            assert cell.second is not None  # sar-meta is refused with Muon
            # A parameter without an update has no second moment: its direction is 0.
            count = cell.num_updates.double()
            correction = 1.0 - optimizer.betas[1] ** count.clamp_min(1.0)
            spread = (cell.second.read() / correction).sqrt() + optimizer.epsilon
            direction[cell.name] = (count > 0) * rate * (cell.gradient.float() / precision.loss_scale) / spread
    optimizer.zero_grad()
    return direction


@torch.no_grad()
def both_ways(
    student: Student, precision: Precision, batch: Batch, direction: Direction
) -> tuple[StudentView, StudentView]:
    """The student's views of a batch, one step along the direction and one step against it.

    The weights are restored to the last bit.
    """
    views = []
    for sign in (1.0, -1.0):
        with _moved(student, direction, sign), in_eval_mode(student.model), precision.autocast():
            view = student.observe(batch, Needs())
            # Copy the head's weight: it is restored when the body ends.
            views.append(StudentView(view.hidden, replace(view.head, weight=view.head.weight.clone())))
    return views[0], views[1]


@contextmanager
def _moved(student: Student, direction: Direction, sign: float) -> Iterator[None]:
    own = {name: parameter for name, parameter in student.model.named_parameters() if name in direction}
    kept = {name: parameter.detach().clone() for name, parameter in own.items()}
    for name, parameter in own.items():
        parameter.add_(direction[name], alpha=sign)
    try:
        yield
    finally:
        for name, parameter in own.items():
            parameter.copy_(kept[name])


# -- measuring -------------------------------------------------------------------------------------------


class TermSums:
    """Sums of named terms over micro-batches, kept on the device."""

    def __init__(self) -> None:
        self._terms: dict[str, Term] = {}

    def add(self, name: str, term: Term) -> None:
        total, count = term.total.detach(), term.count.detach()
        known = self._terms.get(name)
        self._terms[name] = Term(total, count) if known is None else Term(known.total + total, known.count + count)

    def means(self, parallel: Parallel, device: torch.device) -> dict[str, float]:
        """The means over the micro-batches of all processes."""
        names = parallel.names(self._terms)
        held = [self._terms.get(name) for name in names]
        values = [(float(term.total), float(term.count)) if term else (0.0, 0.0) for term in held]
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        parallel.sum_(sums)
        return {name: total / max(count, 1.0) for name, (total, count) in zip(names, sums.tolist(), strict=True)}


@dataclass(frozen=True)
class GateUse:
    """One gate on held-out text: the share of choices of each expert, and the mean entropy of its distribution."""

    name: str
    usage: list[float]
    entropy: float


@dataclass(frozen=True)
class Assessment:
    """A teacher on held-out text. One non-finite position makes the means non-finite."""

    nll: float
    kl_to_original: float
    num_targets: int
    layers: list[GateUse]


@torch.no_grad()
def assess(teacher: RouterTeacher, held_out: Iterable[Batch]) -> Assessment:
    """Held-out loss of the teacher, its divergence from the original, and the use of its experts."""
    device = teacher.original.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    usage = {gate.name: torch.zeros(gate.num_experts, device=device) for gate in teacher.moe_gates}
    entropies = {gate.name: torch.zeros((), device=device) for gate in teacher.moe_gates}
    num_tokens = torch.zeros((), device=device)
    for batch in held_out:
        batch = batch.to(device)
        with routed(teacher.moe_gates, teacher.routing()) as routing:
            answer = teacher.original.observe(batch, Needs())
        anchor = None
        if teacher.trains and teacher.gates.num_applied:
            anchor = teacher.original.observe(batch, Needs())
        scored = score_head(StudentView(answer.hidden, answer.head), anchor, batch.scored_targets, ce_weight=1.0,
                            kd_weight=0.0 if anchor is None else 1.0, divergence=make("forward_kl"))  # fmt: skip
        kl = scored.terms["kd"].total if "kd" in scored.terms else torch.zeros((), device=device)
        sums += torch.stack([scored.terms["ce"].total, kl, scored.terms["ce"].count]).double()
        is_token = batch.attention_mask.reshape(-1).bool()
        tokens = is_token.sum()
        num_tokens += tokens
        for name, seen in routing.seen.items():
            usage[name] += tokens * shares_of(seen.chosen, len(usage[name]), is_token)
            log_probs = gate_log_probs(seen.logits, is_sigmoid=seen.is_sigmoid)
            entropies[name] += entropy(log_probs, is_token).total
    nll, kl_sum, count = sums.tolist()
    tokens_seen = max(float(num_tokens), 1.0)
    layers = [
        GateUse(gate.name, (usage[gate.name] / tokens_seen).tolist(), float(entropies[gate.name]) / tokens_seen)
        for gate in teacher.moe_gates
    ]
    return Assessment(nll / max(count, 1.0), kl_sum / max(count, 1.0), int(count), layers)
