"""The formulas of the objectives as papers print them, in float64 and for autograd: what fast code is held against.

Nothing here is shared with the code it checks, and nothing is guarded: inputs are benign.

Legend: N positions, V vocabulary, K kept ids, D width, B rows, L positions of a row, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stillroom.objectives import divergences
from stillroom.objectives.divergences import adaptive
from stillroom.objectives.divergences.base import Divergence
from stillroom.types import HeadWeights


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
        case adaptive.Interpolated(place):
            r = torch.softmax((1 - place) * q.log().detach() + place * p.log(), -1)
            return kl(r if p.requires_grad else r.detach(), q)
        case adaptive.TokenWise():
            share = torch.sigmoid(p.log() - q.log()).detach()
            return (share * p * (p.log() - q.log()) + (1 - share) * q * (q.log() - p.log())).sum(-1)
        case adaptive.HeadAndTail():
            weight = head_share(p.detach(), q.detach())
            return weight * kl(p, q) + (1 - weight) * kl(q, p)
    raise LookupError(f"no formula is written down for {member.name}")


def is_smooth(member: Divergence) -> bool:
    """Whether finite differences see its gradient: those of adaptive.py hold fixed what depends on the rows."""
    return not isinstance(member, adaptive.Interpolated | adaptive.TokenWise | adaptive.HeadAndTail)


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


def buckets(probs: Tensor, ids: Tensor) -> Tensor:
    """(K+1)-way probabilities: those of the kept ids, and one minus their sum. [N, K + 1]"""
    kept = probs.gather(-1, ids)
    return torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), -1)


def logits_of(hidden: Tensor, head: HeadWeights) -> Tensor:
    """What a head makes of hidden states [N, D], in float64. [N, V]"""
    logits = hidden.double() @ head.weight[: head.num_real].double().T
    if head.bias is not None:
        logits = logits + head.bias[: head.num_real].double()
    return finished(logits, head.scale, head.softcap)


def finished(logits: Tensor, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


# -- inside the models -----------------------------------------------------------------------------------


def squared_error(student: Tensor, teacher: Tensor) -> Tensor:
    """|s - t|^2 / |t|^2 of states [N, D]."""
    return (student - teacher).pow(2).sum(-1) / teacher.pow(2).sum(-1)


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos(s, t) of states [N, D]."""
    lengths = student.pow(2).sum(-1).sqrt() * teacher.pow(2).sum(-1).sqrt()
    return 1 - (student * teacher).sum(-1) / lengths


def attention(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared distance of maps [N, H, K] with as many heads, mean over the heads."""
    return (student - teacher).pow(2).sum(-1).mean(-1)


def contrast(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """-log softmax of cos(s_i, t_i) / T among all cos(s_i, t_j), for pooled rows [B, D]."""
    own = student / student.norm(dim=-1, keepdim=True)
    other = teacher / teacher.norm(dim=-1, keepdim=True)
    return -torch.log_softmax(own @ other.T / temperature, -1).diagonal()


def adamw(
    weight: Tensor, gradients: list[Tensor], *, rate: float, betas: tuple[float, float], epsilon: float, decay: float
) -> Tensor:
    """A weight after one update for each gradient (Loshchilov and Hutter 2019), in float64."""
    weight = weight.double().clone()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for number, gradient in enumerate(gradients, start=1):
        weight *= 1 - rate * decay
        first = betas[0] * first + (1 - betas[0]) * gradient.double()
        second = betas[1] * second + (1 - betas[1]) * gradient.double() ** 2
        mean, square = first / (1 - betas[0] ** number), second / (1 - betas[1] ** number)
        weight -= rate * mean / (square.sqrt() + epsilon)
    return weight
