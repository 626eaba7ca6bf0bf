"""Trials of the row kernels: plain PyTorch, the compiled one, and what torch.compile makes for a card.

The compiled kernel is taken from where a run would take it, but not by way of `choose_kernel`, which would leave a
wrong one out in silence as far as its small comparison sees that it is wrong.

Legend: C rows, V vocabulary, K kept ids.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.checks import textbook
from stillroom.checks.selftest.cases import draw, gradient, leaf, members
from stillroom.checks.selftest.trial import Measured, NotHere, Trial, away, worst
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.head.kernel import choose_kernel
from stillroom.objectives.head.kernel_build import build
from stillroom.objectives.head.kernel_compiled import CompiledKernel, knows
from stillroom.objectives.head.kernel_plain import PlainKernel
from stillroom.objectives.head.row_kernel import Logits, RowKernel, RowPlan, RowRecord, TeacherRows
from stillroom.types import SampledSignal, TopKSignal

GROUP = "kernels"
_BOUND = 3e-4  # of FP32 rows: small differences of large terms cost digits; a wrong formula is off by 1e-2 and more
_ROWS = 6
_KEPT = 8


@dataclass(frozen=True)
class Head:
    """What a head does to its products, and how many tokens it has."""

    num_tokens: int = 301
    has_bias: bool = False
    scale: float = 1.0
    softcap: float | None = None


HEADS = (Head(), Head(has_bias=True, scale=0.5, softcap=5.0), Head(num_tokens=4099))


def trials(device: torch.device) -> list[Trial]:
    """Each kernel of the device with each divergence and each form of teacher."""
    return [*_trials("plain", device), *_trials("compiled", device)]


def _trials(kind: str, device: torch.device) -> Iterator[Trial]:
    where = "" if device.type == "cpu" else f" on {device}"
    yield Trial(GROUP, f"{kind}{where}, labels alone", functools.partial(_measure, kind, device, None, "none"))
    for name, member in members():
        if kind == "compiled" and device.type == "cpu" and not knows(member):
            continue  # its rows go through the plain kernel
        for form in ("dense", "top-k", *(["sampled"] if name == "forward_kl" else [])):
            measure = functools.partial(_measure, kind, device, member, form)
            yield Trial(GROUP, f"{kind}{where}, {name}, {form}", measure)


def kernel_of(kind: str, device: torch.device) -> RowKernel:
    """The kernel of that kind on a device. Raise where this machine has none, with the reason."""
    if kind == "plain":
        return PlainKernel()
    if device.type != "cpu":
        choice = choose_kernel("auto", device)
        if choice.name == "plain":
            raise NotHere(choice.reason)
        return choice.kernel
    built = build()
    if built.path is None:
        raise NotHere(f"{built.reason}; rows go through the plain kernel")
    return CompiledKernel(built.path)


def _measure(kind: str, device: torch.device, member: Divergence | None, form: str) -> Measured:
    kernel = kernel_of(kind, device)
    parts = []
    for head in HEADS:
        for temperatures in (torch.ones(_ROWS), torch.tensor([1.0, 0.6, 1.0, 3.0, 2.0, 1.0])):
            parts.append(_compare(kernel, device, member, form, head, temperatures))
    return worst(*parts)


def _compare(
    kernel: RowKernel, device: torch.device, member: Divergence | None, form: str, head: Head, temperatures: Tensor
) -> Measured:
    """Values and gradient of a kernel in FP32 beside those of the formula in float64."""
    raw = draw(0, _ROWS, head.num_tokens, dtype=torch.float32)
    bias = draw(3, head.num_tokens, dtype=torch.float32) if head.has_bias else None
    teacher = teacher_of(form, _ROWS, head.num_tokens, temperatures)
    rows = RowRecord(
        targets=(torch.arange(_ROWS) * 7 % head.num_tokens).to(device),
        temperatures=temperatures.to(device),
        kd_weights=torch.linspace(0.1, 0.7, _ROWS, device=device),
        ce_weights=torch.linspace(0.6, 0.2, _ROWS, device=device),
        kd=torch.zeros(_ROWS, device=device),
        ce=torch.zeros(_ROWS, device=device),
        is_bad=torch.zeros(_ROWS, dtype=torch.bool, device=device),
    )
    scratch = raw.to(device, copy=True)
    own = Logits(scratch, None if bias is None else bias.to(device), head.scale, head.softcap)
    is_unit = bool((temperatures == 1).all())
    kernel.run(own, _moved(teacher, device), rows, RowPlan(member, True, is_unit, True, False))
    exact = leaf(raw, torch.float64)
    logits = exact if bias is None else exact + bias.double()
    logits = textbook.finished(logits, head.scale, head.softcap)
    kd = _kd(member, logits, teacher, temperatures.double())
    ce = -torch.log_softmax(logits, -1).gather(-1, rows.targets.cpu()[:, None]).squeeze(-1)
    loss = (rows.kd_weights.cpu() * kd + rows.ce_weights.cpu() * ce).sum()
    (expected,) = gradient(loss, exact)
    return worst(
        Measured(away(rows.kd, kd), _BOUND, "the distillation term"),
        Measured(away(rows.ce, ce), _BOUND, "the cross-entropy"),
        Measured(away(scratch, expected), _BOUND, "the gradient"),
        Measured(float(rows.is_bad.sum()), 0.5, "the number of sound rows that were called bad"),
    )


def teacher_of(form: str, num_rows: int, num_tokens: int, temperatures: Tensor) -> TeacherRows | None:
    """A teacher's FP32 answer in one of its forms."""
    if form == "none":
        return None
    logits = draw(1, num_rows, num_tokens, dtype=torch.float32)
    if form == "dense":
        return Logits(logits)
    log_probs = torch.log_softmax(logits.double() / temperatures[:, None], -1)
    if form == "top-k":
        ids = log_probs.topk(_KEPT).indices
        rest = torch.logsumexp(log_probs.scatter(-1, ids, -math.inf), -1)
        return TopKSignal(ids, log_probs.gather(-1, ids).float(), rest.float())
    ids = torch.randint(num_tokens, (num_rows, _KEPT), generator=torch.Generator().manual_seed(2))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return SampledSignal(ids, torch.softmax(draw(2, num_rows, _KEPT), -1).float(), entropy.float())


def _kd(member: Divergence | None, logits: Tensor, teacher: TeacherRows | None, temperatures: Tensor) -> Tensor:
    """T^2 D for each row by the formula."""
    if teacher is None or member is None:
        return torch.zeros(len(logits), dtype=torch.float64)
    if isinstance(teacher, Logits):
        return textbook.divergence(member, logits, teacher.raw.double(), temperatures)
    log_q = torch.log_softmax(logits / temperatures[:, None], -1)
    if isinstance(teacher, TopKSignal):
        kept = torch.cat((teacher.log_probs, teacher.tail_log_mass[:, None]), -1).double()
        p = kept.exp() / kept.exp().sum(-1, keepdim=True)
        return textbook.between(member, p, textbook.buckets(log_q.exp(), teacher.ids)) * temperatures**2
    taken = log_q.gather(-1, teacher.ids)
    return (-(teacher.weights.double() * taken).sum(-1) - teacher.entropy.double()) * temperatures**2


def _moved(teacher: TeacherRows | None, device: torch.device) -> TeacherRows | None:
    """A copy on the device: a kernel may write over what it is given."""
    if teacher is None:
        return None
    if isinstance(teacher, Logits):
        return Logits(teacher.raw.to(device, copy=True))
    if isinstance(teacher, TopKSignal):
        return TopKSignal(teacher.ids.to(device), teacher.log_probs.to(device), teacher.tail_log_mass.to(device))
    return SampledSignal(teacher.ids.to(device), teacher.weights.to(device), teacher.entropy.to(device))
