"""Teachers that answer with a few tokens: top-k with the exact tail, and unbiased samples.

Top-k + tail. The K kept tokens and one bucket for all others are two (K+1)-way distributions; any divergence of
the family applies to them, and by the data-processing inequality bounds the full one from below. The kept
values are never renormalised: that would teach the student that the tail is impossible. A pulled-back slope h
of the (K+1)-way problem reaches the V logits as h_k at a kept token and as h_tail * q_j / q_tail at another. Where all
tokens are kept (K = V) no token is left for the tail, and its stored mass is not used.

Samples (RS-KD, Anshumann et al. 2025). weights / sum is an unbiased estimate of the teacher, hence unbiased for
what is linear in the teacher: forward KL. The stored entropy makes the value a KL and not a cross-entropy.

Both are bound to the temperature at which they were stored: the tail of softmax(z / T) cannot be had from the
tail of softmax(z).

Legend: C rows, V vocabulary, K kept ids. Ids of a row are distinct (top-k) or may repeat (samples).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.numerics import Softmax, head_and_tail, is_distribution
from stillroom.objectives.arguments import check_number, check_tensor
from stillroom.objectives.divergences import student_gradient
from stillroom.objectives.divergences.base import Divergence
from stillroom.types import SampledSignal, Signal, TopKSignal

SignalKind = Literal["dense", "top-k", "sampled"]

KdRows = tuple[Tensor, Tensor | None, Tensor]  # T^2 D [C], d D / d (logits / T) [C, V] or None, is_bad [C]


def topk_rows(
    logits: Tensor, signal: TopKSignal, temperatures: Tensor, divergence: Divergence, *, wants_gradient: bool
) -> KdRows:
    """T^2 D over kept tokens and tail bucket for each row of student logits [C, V]."""
    scaled = logits / temperatures[:, None]
    kept, tail, rest_log_probs = head_and_tail(scaled, signal.ids)
    student = Softmax.of_log_probs(torch.cat((kept, tail[:, None]), dim=-1))
    stored = torch.cat((signal.log_probs, signal.tail_log_mass[:, None]), dim=-1).to(logits.dtype)
    is_bad = ~is_distribution(torch.logsumexp(stored, dim=-1))
    stored = torch.where(is_bad[:, None], torch.full_like(stored, -math.log(stored.shape[-1])), stored)
    slopes = divergence.evaluate(student, Softmax.of_log_probs(stored), wants_teacher=False)
    gradient = None
    if wants_gradient:
        slope = student_gradient(slopes, student)
        gradient = rest_log_probs.exp_().mul_(slope[:, -1:]).scatter_(-1, signal.ids, slope[:, :-1])
    return slopes.value * temperatures**2, gradient, is_bad


def sampled_rows(logits: Tensor, signal: SampledSignal, temperatures: Tensor, *, wants_gradient: bool) -> KdRows:
    """T^2 times the estimate of KL(p, q) = -entropy(p) - sum w log q for each row of student logits [C, V]."""
    student = Softmax.of_logits(logits, temperatures[:, None])
    weights, entropy = signal.weights.to(logits.dtype), signal.entropy.to(logits.dtype)
    is_bad = ~torch.isfinite(weights.sum(-1) + entropy)
    weights = torch.where(is_bad[:, None], torch.zeros_like(weights), weights)
    taken = student.scores.gather(-1, signal.ids) - student.log_norm[:, None]
    value = (-(weights * taken).sum(-1) - torch.where(is_bad, torch.zeros_like(entropy), entropy)) * temperatures**2
    gradient = None
    if wants_gradient:
        gradient = student.probs.mul_(weights.sum(-1, keepdim=True)).scatter_add_(-1, signal.ids, -weights)
    return value, gradient, is_bad


def keep_top_k(teacher_logits: Tensor, top_k: int, temperatures: Tensor) -> TopKSignal:
    """The top-k + tail view of a dense teacher's logits [C, V], each row at its own temperature.

    A row that is no distribution is none afterwards either. More than V tokens are V tokens, and no tail.
    """
    check_tensor("teacher_logits", teacher_logits, ["C", "V"], device=teacher_logits.device)
    check_tensor("temperatures", temperatures, [teacher_logits.shape[0]], device=teacher_logits.device)
    check_number("top_k", top_k, least=1)
    scaled = teacher_logits / temperatures[:, None]
    ids = scaled.topk(min(top_k, scaled.shape[-1]), dim=-1).indices
    kept, tail, _ = head_and_tail(scaled, ids)
    return TopKSignal(ids, kept, tail, temperature=math.nan)  # at the rows' own temperatures


def without_empty_tail(signal: TopKSignal, num_tokens: int) -> TopKSignal:
    """The signal with a tail of no mass where every token was kept: what was stored for it is rounding."""
    if signal.ids.shape[-1] < num_tokens:
        return signal
    return replace(signal, tail_log_mass=torch.full_like(signal.tail_log_mass, -math.inf))


def give_rest_to_label(signal: TopKSignal, targets: Tensor) -> TopKSignal:
    """The tail's mass on the label, and no tail (Anshumann et al. 2025, as the simple repair of top-k).

    Where the label is not among the kept tokens, the least likely of them makes room: its mass goes along.
    """
    is_label = signal.ids == targets[:, None]
    is_missing = ~is_label.any(-1)
    least = signal.log_probs.argmin(-1, keepdim=True)
    displaced = signal.log_probs.gather(-1, least).squeeze(-1)
    rest = torch.where(is_missing, torch.logaddexp(signal.tail_log_mass, displaced), signal.tail_log_mass)
    place = torch.where(is_missing, least.squeeze(-1), is_label.to(torch.uint8).argmax(-1))[:, None]
    own = torch.where(is_missing[:, None], -math.inf, signal.log_probs.gather(-1, place))
    return replace(
        signal,
        ids=signal.ids.scatter(-1, place, targets[:, None]),
        log_probs=signal.log_probs.scatter(-1, place, torch.logaddexp(own, rest[:, None])),
        tail_log_mass=torch.full_like(signal.tail_log_mass, -math.inf),
    )


def select_rows(signal: TopKSignal | SampledSignal, part: slice | Tensor) -> TopKSignal | SampledSignal:
    """Some rows of a signal."""
    if isinstance(signal, TopKSignal):
        return replace(
            signal,
            ids=signal.ids[part],
            log_probs=signal.log_probs[part],
            tail_log_mass=signal.tail_log_mass[part],
        )
    return replace(signal, ids=signal.ids[part], weights=signal.weights[part], entropy=signal.entropy[part])


# -- what does not go together -----------------------------------------------------------------------------


def kind_of(signal: Signal) -> SignalKind:
    if isinstance(signal, TopKSignal):
        return "top-k"
    return "sampled" if isinstance(signal, SampledSignal) else "dense"


def check_pair(kind: SignalKind, divergence: str, temperature: float, stored_temperature: float) -> None:
    """Refuse a divergence or temperature that a stored signal cannot serve."""
    if kind == "dense":
        return
    if kind == "sampled" and divergence != "forward_kl":
        raise ConfigError(
            f"{divergence} cannot be estimated from sampled teacher answers: it is not linear in the teacher",
            advice=[
                "set objectives.kd.divergence = 'forward_kl'",
                "write the cache as top-k with tail, which serves every divergence",
                "use the live teacher: leave teacher.cache empty",
            ],
        )
    if temperature != stored_temperature:
        raise ConfigError(
            f"the teacher's answers were stored at temperature {stored_temperature:g}, the run asks for "
            f"{temperature:g}, and a tail cannot be re-tempered",
            advice=[
                f"set objectives.kd.temperature = {stored_temperature:g}",
                f"write the cache again at temperature {temperature:g}",
            ],
        )
