"""Regularisers of gates: load balance over the experts, and entropy of the choice.

Both are computed in FP32 from logits with a gradient: on detached probabilities they would have no effect.

Legend: T tokens, E experts, K chosen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stillroom.core.types import Term


def gate_log_probs(logits: Tensor, *, is_sigmoid: bool = False) -> Tensor:
    """The gate's distribution over experts in log space. [T, E]

    Gates that score with sigmoids (DeepSeek-V3 2024) have no distribution: their scores are normalised to sum to 1.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if is_sigmoid:
        wide = F.logsigmoid(wide)
    return torch.log_softmax(wide, dim=-1)


def shares_of(chosen: Tensor, num_experts: int, is_token: Tensor) -> Tensor:
    """The share of choices of each expert. [E], sums to 1. A choice has no gradient."""
    weights = is_token.to(torch.float32).unsqueeze(1).expand_as(chosen)
    counts = torch.zeros(num_experts, device=chosen.device).index_add_(0, chosen.reshape(-1), weights.reshape(-1))
    return counts / counts.sum().clamp_min(1)


def load_balance(log_probs: Tensor, chosen: Tensor, is_token: Tensor) -> Term:
    """E * sum over experts of (share of choices) * (mean probability): 1 when both are even, E at collapse.

    Fedus, Zoph and Shazeer 2021. The shares are those of the micro-batch; the probabilities are summed over tokens, so
    that the caller divides once by the tokens of the whole window.
    """
    num_experts = log_probs.shape[-1]
    shares = shares_of(chosen, num_experts, is_token).to(log_probs.dtype)
    of_token = num_experts * (log_probs.exp() * shares).sum(dim=-1)
    return _sum(of_token, is_token)


def entropy(log_probs: Tensor, is_token: Tensor) -> Term:
    """The entropy of the gate's distribution in nats, summed over tokens: 0 when certain, log E when even."""
    probs = log_probs.exp()
    # A probability of 0 has log -inf, and 0 * -inf is NaN.
    return _sum(-torch.where(probs > 0, probs * log_probs, torch.zeros_like(probs)).sum(dim=-1), is_token)


def _sum(of_token: Tensor, is_token: Tensor) -> Term:
    kept = torch.where(is_token, of_token, torch.zeros_like(of_token))
    return Term(kept.sum(), is_token.sum().to(of_token.dtype))
