"""The formulas of the divergences as papers print them, in float64 and for autograd: fast code is compared with them.

Nothing here is shared with the code it checks, and nothing is guarded: inputs are benign.

Legend: N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence


def divergence(member: Divergence, student: Tensor, teacher: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """T^2 D for each row of logits [N, V]; a temperature for all or one a row [N]."""
    t = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    p, q = torch.softmax(teacher / t, -1), torch.softmax(student / t, -1)
    return between(member, p, q) * temperature**2


def between(member: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """D of probabilities: the teacher's p and the student's q, [N, V]. Raise LookupError for one without a formula."""
    match member:
        case divergences.ForwardKL():
            return kl(p, q)
        case divergences.ReverseKL():
            return kl(q, p)
        case divergences.JensenShannon(beta):
            m = beta * p + (1 - beta) * q
            return (beta * kl(p, m) + (1 - beta) * kl(q, m)) / (beta * (1 - beta))
        case divergences.SkewForwardKL(alpha):
            return kl(p, alpha * p + (1 - alpha) * q)
        case divergences.SkewReverseKL(alpha):
            return kl(q, (1 - alpha) * p + alpha * q)
        case divergences.TotalVariation():
            return (p - q).abs().sum(-1) / 2
        case divergences.AlphaBeta(a, b):
            s = a + b
            return ((a * p**s + b * q**s) / s - p**a * q**b).sum(-1) / (a * b)
        case _:
            return _adaptive(member, p, q)


def _adaptive(member: Divergence, p: Tensor, q: Tensor) -> Tensor:
    match member:
        case divergences.Interpolated(place):
            r = torch.softmax((1 - place) * q.log().detach() + place * p.log(), -1)
            return kl(r if p.requires_grad else r.detach(), q)
        case divergences.TokenWise():
            share = torch.sigmoid(p.log() - q.log()).detach()
            return (share * p * (p.log() - q.log()) + (1 - share) * q * (q.log() - p.log())).sum(-1)
        case divergences.HeadAndTail():
            weight = head_share(p.detach(), q.detach())
            return weight * kl(p, q) + (1 - weight) * kl(q, p)
    raise LookupError(f"no formula is written down for {member.name}")


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a.log() - b.log())).sum(-1)


def head_share(p: Tensor, q: Tensor) -> Tensor:
    """The share of |p - q| on the tokens that make up the first half of p, one row and one token at a time."""
    shares = []
    for teacher, student in zip(p.tolist(), q.tolist(), strict=True):
        before, head, whole = 0.0, 0.0, 0.0
        for token in sorted(range(len(teacher)), key=lambda v: -teacher[v]):
            gap = abs(teacher[token] - student[token])
            whole += gap
            head += gap if before < 0.5 else 0.0
            before += teacher[token]
        shares.append(head / whole if whole else 0.5)
    return torch.tensor(shares, dtype=p.dtype, device=p.device)
