"""Arithmetic that stays finite where the textbook formula does not.

Work in log space and in FP32 or better, mask by `where` (a product with a mask turns `0 * inf` into NaN), and never
read a value back to the host.

Legend: ... any leading shape, V vocabulary, K kept ids. Logits may be -inf: an impossible token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_PROB_FLOOR = -50.0  # exp(-50) = 2e-22, far below FP32's resolution at 1
LOG_ZERO = -1e30  # log-probability of an impossible token: times the probability 0 it is 0, not NaN
_LOG_HALF = -math.log(2.0)


def work_dtype(*tensors: Tensor | None) -> torch.dtype:
    """FP32, or FP64 if an input has it: FP16 sums overflow and FP16 probabilities underflow."""
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def log_softmax(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log softmax(logits / temperature) over the last axis, in FP32 or better."""
    logits = logits.to(work_dtype(logits))
    scaled = logits if isinstance(temperature, float) and temperature == 1.0 else logits / temperature
    return torch.log_softmax(scaled, dim=-1)


@dataclass(frozen=True)
class Softmax:
    """Probabilities, and scores: log p up to a constant of the row. One exponential gives both.

    The score of an impossible token is LOG_ZERO, so p (log p - log q) needs no mask, which would cost more than the
    exponential. If the student rules out a token of the teacher, the KL is about 1e30 nats instead of infinity.
    """

    scores: Tensor  # [..., V], log p + log_norm
    probs: Tensor  # [..., V]
    log_norm: Tensor  # [...], log-sum-exp of the scores; NaN if the row is not a distribution
    sums_to_one: bool = True  # False for stored answers, which were rounded

    @staticmethod
    def of_logits(logits: Tensor, temperature: float | Tensor = 1.0) -> Softmax:
        """softmax(logits / temperature) over the last axis, in FP32 or better.

        Scores are relative to the row's maximum, so large logits and a common shift lose no digits. A row with NaN,
        with +inf, or with only -inf has a log_norm of NaN.
        """
        logits = logits.to(work_dtype(logits))
        scores = logits - logits.amax(-1, keepdim=True)
        if not (isinstance(temperature, float) and temperature == 1.0):
            scores.mul_(1.0 / temperature)
        return Softmax._of_scores(scores.clamp_min_(LOG_ZERO))

    @staticmethod
    def _of_scores(scores: Tensor) -> Softmax:
        # Not torch.logsumexp: the maximum is 0 already, and the exponentials are needed too.
        probs = scores.exp()
        norm = probs.sum(-1, keepdim=True)
        return Softmax(scores, probs.mul_(1.0 / norm), norm.squeeze(-1).log_())

    @staticmethod
    def of_log_probs(log_probs: Tensor) -> Softmax:
        norm = torch.zeros_like(log_probs[..., 0])
        return Softmax(log_probs.clamp_min(LOG_ZERO), log_probs.exp(), norm, sums_to_one=False)

    def take_at(self, temperature: Tensor) -> Softmax:
        """The same rows at another temperature [..., 1]. Overwrites the scores.

        With a temperature of 1e-8 or more the score of an impossible token stays finite.
        """
        return Softmax._of_scores(self.scores.mul_(1.0 / temperature))

    def take_log_probs(self) -> Tensor:
        """log p. Overwrites the scores, to save a temporary of the size of the vocabulary."""
        return self.scores.sub_(self.log_norm[..., None])

    def take_log_of_probs(self) -> Tensor:
        """log of the rounded p, floored. Overwrites the scores.

        To subtract the logarithm of a mixture of such p: where the two are close, both must have the same rounding.
        """
        return torch.clamp_min(self.probs, torch.finfo(self.probs.dtype).tiny, out=self.scores).log_()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the values where the mask is true; masked values may be NaN or infinite."""
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def log1mexp(log_mass: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, accurate at both ends (Maechler 2012)."""
    return torch.where(
        log_mass > _LOG_HALF,
        torch.log(-torch.expm1(log_mass)),
        torch.log1p(-torch.exp(log_mass)),
    )


def log1p_rest(x: Tensor) -> Tensor:
    """x - log1p(x) for x > -1 in FP64, accurate near 0, where it is x^2 / 2."""
    series = (x * -0.2).add_(0.25).mul_(x).sub_(1.0 / 3.0).mul_(x).add_(0.5).mul_(x).mul_(x)
    return torch.where(x.abs() < 1e-3, series, x - torch.log1p(x))


def tail_log_mass(kept_log_probs: Tensor) -> Tensor:
    """Log of 1 minus the mass of the kept log-probs [..., K]; -inf where they sum to 1.

    The difference is only as accurate as the rounding of the kept values. With the whole row available, sum the rest
    directly: see `head_and_tail`.
    """
    kept = torch.logsumexp(kept_log_probs, dim=-1)
    return log1mexp(kept.clamp_max(0.0))


def head_and_tail(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split rows [..., V] into kept log-probs [..., K], the log mass of the rest [...], and the rest's own
    log distribution [..., V] (-inf at the kept ids).

    The rest is summed directly, so a tail of 1e-12 is exact to rounding, whereas 1 - sum(kept) would be noise.
    """
    kept_logits = logits.gather(-1, ids)
    rest = logits.scatter(-1, ids, -math.inf)
    rest_log_mass = torch.logsumexp(rest, dim=-1)
    log_norm = torch.logaddexp(torch.logsumexp(kept_logits, dim=-1), rest_log_mass)
    anchor = torch.where(rest_log_mass == -math.inf, torch.zeros_like(rest_log_mass), rest_log_mass)
    return kept_logits - log_norm[..., None], rest_log_mass - log_norm, rest.sub_(anchor[..., None])


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap): smooth, bounded, slope 1 at the origin (Gemma 2, 2024)."""
    return torch.tanh(logits / cap) * cap


def softcap_slope(capped: Tensor, cap: float) -> Tensor:
    """Slope of `softcap` at the point whose capped value is given."""
    ratio = capped / cap
    return (1.0 - ratio) * (1.0 + ratio)


def is_distribution(log_norm: Tensor) -> Tensor:
    """True where a row's log-sum-exp is finite: no NaN, no +inf, and not every entry -inf."""
    return torch.isfinite(log_norm)
