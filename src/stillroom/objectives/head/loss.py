"""The fused head: every vocabulary-level objective in one chunked pass over the scored positions.

A [tokens, vocabulary] tensor of logits is the largest thing in distillation and is needed for milliseconds. The pass
takes a chunk of positions, computes the student's and the teacher's logits, overwrites them with gradients, multiplies
those back to the hidden states and the head weight, and takes the next chunk.

The mix calls `score_head`; `fused_head_loss` is the same pass for people who bring their own loop.

Legend: N positions, V real vocabulary, K kept ids, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.numerics import masked_sum, work_dtype
from stillroom.objectives import divergences
from stillroom.objectives.arguments import check_number
from stillroom.objectives.divergences.base import Divergence
from stillroom.objectives.head.border_values import check_values
from stillroom.objectives.head.borders import check_labels, check_pass
from stillroom.objectives.head.chunks import choose_chunk
from stillroom.objectives.head.inputs import Positions, Teacher, as_signal, flattened
from stillroom.objectives.head.kernel import KernelName, choose_kernel
from stillroom.objectives.head.passes import HeadTask, run_pass
from stillroom.objectives.head.row_kernel import RowPlan
from stillroom.types import IGNORED, DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, Term, TopKSignal

Weight = float | Tensor


@dataclass(frozen=True)
class HeadLoss:
    """The weighted loss of a pass, its terms as unweighted FP32 sums, and counts of what had to be set aside."""

    loss: Tensor
    terms: Mapping[str, Term]
    counters: Mapping[str, Tensor]
    fallback: Term | None = None  # cross-entropy of the rows that had no usable teacher, which carries their kd weight
    unweighted_ce: Term | None = None  # where cross-entropy is no term: the guard looks at it


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
    beta: float | None = None,
    alpha: float | None = None,
    interpolation: float | None = None,
    top_k: int = 0,
    chunk_tokens: int = 512,
    token_weights: Tensor | None = None,
    token_temperature: Tensor | None = None,
    student_bias: Tensor | None = None,
    student_scale: float = 1.0,
    student_softcap: float | None = None,
    vocab_size: int | None = None,
    kernel: KernelName = "auto",
    validate: bool = True,
) -> HeadLoss:
    """Mean over scored positions of token_weight * (kd_weight * T^2 D(teacher, student) + ce_weight * cross-entropy).

    `student_hidden` is [N, D] (or [..., D], and what belongs to positions then has the same leading axes or is flat),
    `student_weight` [V, D]. `labels` [N] are already shifted; those of -100 are dropped before the head. Positions
    whose `token_weights` [N] are 0 are dropped too, but counted. `vocab_size` is the real vocabulary where the weight
    has padding rows. `top_k` > 0 sees a dense teacher through its k likeliest tokens and the mass of the rest.
    `chunk_tokens` 0 chooses. With nothing to score the loss is 0 and so are its gradients.

    Settings of a divergence that is given by name: `beta` of jsd (0.5) and alpha_beta (0.7), `alpha` of the skewed ones
    (0.1) and alpha_beta (0.2), `interpolation` of taid (1, the teacher itself). Other divergences do not read them.

    A teacher's row that is no distribution (NaN, +inf, or nothing possible) is not distilled: its kd weight goes to its
    cross-entropy. `terms` holds sums over positions, unweighted but for the token weights: "kd" without such rows,
    "ce", and "fallback", the cross-entropy of such rows; loss * N = kd_weight * (kd + fallback) + ce_weight * ce.
    `counters["bad_teacher_rows"]` says how many there were. A student's row that is not finite makes the loss so.

    Gradients reach the student's tensors and a dense teacher's hidden states, not its head. There is no second
    derivative: asking for one raises. What cannot be computed raises ConfigError: shapes, dtypes, devices and settings
    always, values (labels and ids outside the vocabulary, repeated ids, masses that do not sum to 1, negative weights)
    with `validate`, which reads once from the device.
    """
    check_number("kd_weight", kd_weight, least=0.0)
    check_number("ce_weight", ce_weight, least=0.0)
    head = HeadWeights(student_weight, student_bias, student_scale, student_softcap, vocab_size)
    signal = as_signal(teacher, temperature) if kd_weight != 0.0 else None
    _check_top_k(top_k, signal)
    chosen = _chosen(divergence, {"beta": beta, "alpha": alpha, "interpolation": interpolation})
    given = flattened(student_hidden, labels, signal, token_weights, token_temperature)
    options: dict[str, Any] = {"divergence": chosen, "temperature": temperature, "top_k": top_k}
    options["chunk_tokens"] = chunk_tokens
    check_pass(given.view(head), given.signal, given.labels, token_weights=given.weights,
               token_temperature=given.temperatures, **options)  # fmt: skip
    scored, places, count = _scored(given)
    if validate:
        check_values(scored.labels, scored.signal, scored.weights, scored.temperatures, head.num_real, places)
    result = score_head(
        scored.view(head), scored.signal, scored.labels,
        kd_weight=kd_weight / max(1, count), ce_weight=ce_weight / max(1, count),
        token_weights=scored.weights, token_temperature=scored.temperatures, kernel=kernel, **options,
    )  # fmt: skip
    return _with_fallback(result, count - scored.labels.numel())


def _check_top_k(top_k: int, signal: Signal | None) -> None:
    if top_k and signal is not None and not isinstance(signal, DenseSignal):
        raise ConfigError(
            "top_k belongs to a dense teacher; this one has its tokens already",
            where="top_k",
            advice=["leave top_k out"],
        )


def _scored(given: Positions) -> tuple[Positions, Tensor, int]:
    """The positions that weigh something, their places among those given, and how many have a label.

    A position of weight 0 is counted and not computed: it may hold anything, NaN too.
    """
    places = (given.labels != IGNORED).nonzero().squeeze(-1)
    scored = given.select(places)
    count = scored.labels.numel()
    if scored.weights is not None:
        kept = (scored.weights != 0).nonzero().squeeze(-1)
        scored, places = scored.select(kept), places[kept]
    return scored, places, count


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
    has_kd = not _is_zero(kd_weight)
    if has_kd and (signal is None or divergence is None):
        raise ConfigError(
            "a kd weight needs a divergence and a teacher's signal", advice=["pass both, or a kd weight of 0"]
        )
    signal = signal if has_kd else None
    check_pass(view, signal, targets, divergence, temperature, token_weights, token_temperature, top_k, chunk_tokens)
    if has_kd:
        check_labels(signal, top_k, rest_to_label, label_margin)
    signal = _with_long_ids(signal)
    wants_student, wants_teacher = _wanted_gradients(view, signal)
    plan = RowPlan(
        divergence=divergence if has_kd else None,
        has_ce=not _is_zero(ce_weight),
        is_unit_temperature=token_temperature is None and temperature == 1.0,
        wants_student=wants_student,
        wants_teacher=wants_teacher,
        top_k=top_k,
        rest_to_label=rest_to_label,
        label_margin=label_margin,
    )
    weighing = _weigh(view, token_weights, kd_token_weights)
    task = HeadTask(
        head=view.head,
        signal=signal,
        targets=targets.long(),
        kd_weights=weighing.kd * kd_weight,
        ce_weights=weighing.ce * ce_weight,
        temperatures=weighing.ones * (temperature if token_temperature is None else token_temperature),
        plan=plan,
        kernel=choose_kernel(kernel, view.hidden.device).kernel,
        chunk_tokens=choose_chunk(chunk_tokens, view.hidden, view.head.num_real),
        clamped=None if view.head.clamp is None else torch.zeros_like(weighing.ones),
        corrected=None if label_margin is None else torch.zeros_like(weighing.ones),
    )
    return _result(view, task, weighing)


@dataclass(frozen=True)
class _Weighing:
    """What each position counts in the two totals, all in the work dtype. [N] each."""

    ones: Tensor
    ce: Tensor
    kd: Tensor


def _weigh(view: StudentView, token_weights: Tensor | None, kd_token_weights: Tensor | None) -> _Weighing:
    dtype = work_dtype(view.hidden, view.head.weight)
    ones = torch.ones(view.hidden.shape[0], dtype=dtype, device=view.hidden.device)
    both = ones if token_weights is None else ones * token_weights
    return _Weighing(ones, both, both if kd_token_weights is None else both * kd_token_weights)


def _wanted_gradients(view: StudentView, signal: Signal | None) -> tuple[bool, bool]:
    """Whether the student's and the teacher's logits need a gradient."""
    if not torch.is_grad_enabled():
        return False, False
    teacher_hidden = signal.hidden if isinstance(signal, DenseSignal) else None
    return _any_requires_grad(view.hidden, view.head.weight, view.head.bias), _any_requires_grad(teacher_hidden)


def _result(view: StudentView, task: HeadTask, weighing: _Weighing) -> HeadLoss:
    """Run the pass and add up its rows."""
    teacher_hidden = task.signal.hidden if isinstance(task.signal, DenseSignal) else None
    loss, kd, ce, is_bad = run_pass(view.hidden, view.head.weight, view.head.bias, teacher_hidden, task)
    counters = {"bad_teacher_rows": is_bad.sum(), **_filled_counters(task)}
    terms = {}
    if task.plan.has_ce:
        terms["ce"] = Term(masked_sum(ce * weighing.ce, weighing.ce != 0), weighing.ones.sum())
    if task.plan.divergence is None:
        return HeadLoss(loss, terms, counters)
    num_bad = is_bad.sum().to(weighing.ones.dtype)
    taught = Term(masked_sum(kd * weighing.kd, weighing.kd != 0), task.targets.numel() - num_bad)
    fallback = Term(masked_sum(ce * weighing.kd, is_bad & (weighing.kd != 0)), num_bad)
    unweighted = None if task.plan.has_ce else Term(ce.sum(), weighing.ones.sum())
    return HeadLoss(loss, {"kd": taught, **terms}, counters, fallback, unweighted)


def _filled_counters(task: HeadTask) -> dict[str, Tensor]:
    """Counts of what the pass changed, where it was told to change anything."""
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


def _with_long_ids(signal: Signal | None) -> Signal | None:
    return replace(signal, ids=signal.ids.long()) if isinstance(signal, TopKSignal | SampledSignal) else signal


def _chosen(divergence: str | Divergence, settings: Mapping[str, float | None]) -> Divergence:
    if not isinstance(divergence, str):
        return divergence
    return divergences.make(divergence, {name: value for name, value in settings.items() if value is not None})


def _with_fallback(result: HeadLoss, num_weightless: int) -> HeadLoss:
    """The result with its fallback among the terms; positions of weight 0 add nothing to a sum, and count."""
    terms = {name: Term(term.total, term.count + num_weightless) for name, term in result.terms.items()}
    if result.fallback is not None:
        terms["fallback"] = result.fallback
    return replace(result, terms=terms)
