"""The fused head: every vocabulary-level objective in one chunked pass over the scored positions.

A [tokens, vocabulary] tensor of logits is the largest thing in distillation and is needed for milliseconds. The
pass takes a chunk of positions, makes the student's and the teacher's logits, turns them into row values and, in
the same memory, into gradients, multiplies those back to the hidden states and the head weight, and goes on.

`score_head` is what the mix calls; `fused_head_loss` is the same pass for people who bring their own loop.

Legend: N positions, V real vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillroom.config.sections import LEAST_TEMPERATURE
from stillroom.errors import ConfigError
from stillroom.numerics import masked_sum, work_dtype
from stillroom.objectives import divergence as family
from stillroom.objectives.base import Divergence, RowPlan
from stillroom.objectives.head_pass import HeadTask, run_pass
from stillroom.objectives.kernel import KernelName, choose_kernel
from stillroom.objectives.products import chunk_size
from stillroom.objectives.sparse import check_pair, kind_of, select_rows
from stillroom.types import IGNORED, DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, Term, TopKSignal

Weight = float | Tensor
DenseTeacher = DenseSignal


@dataclass(frozen=True)
class TopKTeacher:
    """The teacher's K likeliest tokens and the log mass of all others, at the temperature of the call."""

    ids: Tensor  # [N, K], distinct in each row
    log_probs: Tensor  # [N, K]
    tail_log_mass: Tensor  # [N]


@dataclass(frozen=True)
class SampledTeacher:
    """Sampled tokens of the teacher with weights that sum to 1, at the temperature of the call."""

    ids: Tensor  # [N, K]
    weights: Tensor  # [N, K]
    entropy: Tensor  # [N]


Teacher = DenseSignal | TopKTeacher | SampledTeacher | TopKSignal | SampledSignal


@dataclass(frozen=True)
class HeadLoss:
    """The weighted loss of a pass, its terms as unweighted FP32 sums, and counts of what had to be set aside."""

    loss: Tensor
    terms: Mapping[str, Term]
    counters: Mapping[str, Tensor]


def fused_head_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: Teacher | None,
    labels: Tensor,
    *,
    kd_weight: float = 0.5,
    ce_weight: float = 0.5,
    divergence: str | Divergence = "forward_kl",
    temperature: float = 2.0,
    beta: float = 0.5,
    alpha: float = 0.1,
    top_k: int = 0,
    chunk_tokens: int = 512,
    token_weights: Tensor | None = None,
    token_temperature: Tensor | None = None,
    student_bias: Tensor | None = None,
    student_scale: float = 1.0,
    student_softcap: float | None = None,
    vocab_size: int | None = None,
    kernel: KernelName = "auto",
) -> HeadLoss:
    """Mean over scored positions of kd_weight * T^2 D(teacher, student) + ce_weight * cross-entropy.

    `labels` [N] are already shifted; those of -100 are dropped before the head. `beta` belongs to jsd, `alpha` to
    the skewed divergences. `vocab_size` is the real vocabulary where the weight has padding rows. `top_k` > 0 sees a
    dense teacher through its k likeliest tokens and the mass of the rest. `chunk_tokens` 0 chooses.
    """
    labels = labels.reshape(-1)
    hidden = student_hidden.reshape(-1, student_hidden.shape[-1])
    signal = _as_signal(teacher, temperature) if kd_weight != 0.0 else None
    scored = (labels != IGNORED).nonzero().squeeze(-1)
    if scored.numel() != labels.numel():
        labels, hidden, signal = labels[scored], hidden.index_select(0, scored), _select(signal, scored)
        token_weights = None if token_weights is None else token_weights.reshape(-1)[scored]
        token_temperature = None if token_temperature is None else token_temperature.reshape(-1)[scored]
    head = HeadWeights(student_weight, student_bias, student_scale, student_softcap, vocab_size)
    count = max(1, labels.numel())
    chosen = family.make(divergence, {"beta": beta, "alpha": alpha}) if isinstance(divergence, str) else divergence
    return score_head(
        StudentView(hidden, head),
        signal,
        labels,
        kd_weight=kd_weight / count,
        ce_weight=ce_weight / count,
        divergence=chosen,
        temperature=temperature,
        token_weights=token_weights,
        token_temperature=token_temperature,
        top_k=top_k,
        chunk_tokens=chunk_tokens,
        kernel=kernel,
    )


def score_head(
    view: StudentView,
    signal: Signal | None,
    targets: Tensor,
    *,
    kd_weight: Weight,
    ce_weight: Weight,
    divergence: Divergence | None,
    temperature: float = 1.0,
    token_weights: Tensor | None = None,
    kd_token_weights: Tensor | None = None,
    token_temperature: Tensor | None = None,
    top_k: int = 0,
    rest_to_label: bool = False,
    label_margin: float | None = None,
    chunk_tokens: int = 0,
    kernel: KernelName = "auto",
) -> HeadLoss:
    """Sum over positions of kd_weight * T^2 D + ce_weight * cross-entropy, differentiable in student and teacher.

    Weights multiply sums, so the caller divides them by the counts of the whole window. A weight of exactly 0.0
    (a number, not a tensor) leaves its term out: the signal is then not even looked at. `token_weights` belong to
    the objective and are part of the totals; `kd_token_weights` are those of the kd term alone. Targets are all >= 0.
    `rest_to_label` and `label_margin` change what the teacher says with the label's help: see `RowPlan`.
    """
    has_kd, has_ce = not _is_zero(kd_weight), not _is_zero(ce_weight)
    signal = signal if has_kd else None
    if has_kd:
        _check(view.head, signal, divergence, temperature, token_temperature, top_k)
        _check_labels(signal, top_k, rest_to_label, label_margin)
    ones = torch.ones(targets.shape, dtype=work_dtype(view.hidden, view.head.weight), device=view.hidden.device)
    weigh = ones if token_weights is None else ones * token_weights
    kd_weigh = weigh if kd_token_weights is None else weigh * kd_token_weights
    wants_grad = torch.is_grad_enabled()
    teacher_hidden = signal.hidden if isinstance(signal, DenseSignal) else None
    plan = RowPlan(
        divergence=divergence if has_kd else None,
        has_ce=has_ce,
        is_unit_temperature=token_temperature is None and temperature == 1.0,
        wants_student=wants_grad and _any_requires_grad(view.hidden, view.head.weight, view.head.bias),
        wants_teacher=wants_grad and _any_requires_grad(teacher_hidden),
        top_k=top_k,
        rest_to_label=rest_to_label,
        label_margin=label_margin,
    )
    task = HeadTask(
        head=view.head,
        signal=signal,
        targets=targets,
        kd_weights=kd_weigh * kd_weight,
        ce_weights=weigh * ce_weight,
        temperatures=ones * (temperature if token_temperature is None else token_temperature),
        plan=plan,
        kernel=choose_kernel(kernel).kernel,
        chunk_tokens=chunk_size(chunk_tokens, targets.numel(), view.head.num_real, view.hidden.shape[-1]),
        clamped=None if view.head.clamp is None else torch.zeros_like(ones),
        corrected=None if label_margin is None else torch.zeros_like(ones),
    )
    loss, kd, ce, is_bad = run_pass(view.hidden, view.head.weight, view.head.bias, teacher_hidden, task)
    terms = {}
    if has_kd:
        terms["kd"] = Term(masked_sum(kd * kd_weigh, kd_weigh != 0), (~is_bad).sum().to(ones.dtype))
    if has_ce:
        terms["ce"] = Term(masked_sum(ce * weigh, weigh != 0), ones.sum())
    return HeadLoss(loss, terms, {"bad_teacher_rows": is_bad.sum(), **_filled_counters(task)})


def _filled_counters(task: HeadTask) -> dict[str, Tensor]:
    """Of what the pass changed, where it was allowed to change anything."""
    counters = {}
    if task.clamped is not None:
        counters["clamped_fraction_sum"] = task.clamped.sum() / task.head.num_real
    if task.corrected is not None:
        counters["corrected_rows"] = task.corrected.sum()
    return counters


def _is_zero(weight: Weight) -> bool:
    return not isinstance(weight, Tensor) and weight == 0.0


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _as_signal(teacher: Teacher | None, temperature: float) -> Signal | None:
    if isinstance(teacher, TopKTeacher):
        return TopKSignal(teacher.ids, teacher.log_probs, teacher.tail_log_mass, temperature)
    if isinstance(teacher, SampledTeacher):
        return SampledSignal(teacher.ids, teacher.weights, teacher.entropy, temperature)
    return teacher


def _select(signal: Signal | None, scored: Tensor) -> Signal | None:
    if isinstance(signal, DenseSignal):
        return replace(signal, hidden=signal.hidden.index_select(0, scored))
    return None if signal is None else select_rows(signal, scored)


def _check_labels(signal: Signal | None, top_k: int, rest_to_label: bool, label_margin: float | None) -> None:
    """Labels can complete what a sparse teacher says, or correct what a whole one says."""
    is_sparse = isinstance(signal, TopKSignal) or (isinstance(signal, DenseSignal) and top_k > 0)
    if rest_to_label and not is_sparse:
        raise ConfigError(
            "a teacher that says everything leaves nothing over for the label",
            advice=["set objectives.kd.top_k above 0", "set objectives.kd.on_wrong_teacher = 'mft'"],
        )
    if label_margin is None:
        return
    if is_sparse or not isinstance(signal, DenseSignal):
        raise ConfigError(
            "the label can lead only where the teacher's whole row is at hand",
            advice=["set objectives.kd.top_k = 0", "set objectives.kd.on_wrong_teacher = 'label_residual'"],
        )
    if signal.hidden.requires_grad:
        raise ConfigError(
            "a teacher that is being trained is corrected by its own truth term",
            advice=["set objectives.kd.on_wrong_teacher = 'keep'"],
        )


def _check(
    head: HeadWeights,
    signal: Signal | None,
    divergence: Divergence | None,
    temperature: float,
    token_temperature: Tensor | None,
    top_k: int,
) -> None:
    """Refuse what the pass cannot compute, with what to do instead."""
    if signal is None or divergence is None:
        raise ConfigError(
            "a kd weight needs a divergence and a teacher's signal", advice=["pass both, or a kd weight of 0"]
        )
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ConfigError(f"temperature is {temperature:g}", advice=[f"{LEAST_TEMPERATURE:g} or above; 1 is neutral"])
    if isinstance(signal, DenseSignal):
        if signal.head.num_real != head.num_real:
            raise ConfigError(
                f"teacher has {signal.head.num_real:,} tokens, student {head.num_real:,}",
                advice=["if the difference is padding, give both the real vocabulary as vocab_size"],
            )
        if top_k and signal.hidden.requires_grad:
            raise ConfigError(
                "a teacher that is being trained needs its whole distribution",
                advice=["set objectives.kd.top_k = 0", "detach the teacher's hidden states"],
            )
        return
    if token_temperature is not None:
        raise ConfigError(
            "stored teacher answers have one temperature, not one for each token",
            advice=["leave token_temperature out", "use the live teacher"],
        )
    check_pair(kind_of(signal), divergence.name, temperature, signal.temperature)
