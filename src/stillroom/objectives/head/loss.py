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
from dataclasses import dataclass, field, replace
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
from stillroom.objectives.head.kernel import KernelName, choose_kernel
from stillroom.objectives.head.passes import HeadTask, run_pass
from stillroom.objectives.head.products import chunk_size
from stillroom.objectives.head.row_kernel import RowPlan
from stillroom.objectives.head.sparse import select_rows
from stillroom.types import IGNORED, DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, Term, TopKSignal

Weight = float | Tensor


@dataclass(frozen=True)
class DenseTeacher:
    """The teacher's last hidden states and the head that turns them into logits."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None  # real vocabulary where the weight has padding rows
    taps: Mapping[str, Tensor] = field(default_factory=dict)  # kept with the answer; the head does not read them
    clamp: float | None = None  # logits beyond +-clamp are cut

    @property
    def head(self) -> HeadWeights:
        return HeadWeights(self.weight, self.bias, self.scale, self.softcap, self.vocab_size, self.clamp)


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


Teacher = DenseTeacher | TopKTeacher | SampledTeacher | Signal


@dataclass(frozen=True)
class HeadLoss:
    """The weighted loss of a pass, its terms as unweighted FP32 sums, and counts of what had to be set aside."""

    loss: Tensor
    terms: Mapping[str, Term]
    counters: Mapping[str, Tensor]
    fallback: Term | None = None  # cross-entropy of the rows that had no usable teacher, which carries their kd weight


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
    signal = _as_signal(teacher, temperature) if kd_weight != 0.0 else None
    if top_k and signal is not None and not isinstance(signal, DenseSignal):
        raise ConfigError("top_k belongs to a dense teacher; this one has its tokens already", where="top_k",
                          advice=["leave top_k out"])  # fmt: skip
    chosen = _chosen(divergence, {"beta": beta, "alpha": alpha, "interpolation": interpolation})
    given = _flattened(student_hidden, labels, signal, token_weights, token_temperature)
    options: dict[str, Any] = {"divergence": chosen, "temperature": temperature, "top_k": top_k}
    options["chunk_tokens"] = chunk_tokens
    check_pass(given.view(head), given.signal, given.labels, token_weights=given.weights,
               token_temperature=given.temperatures, **options)  # fmt: skip
    places = (given.labels != IGNORED).nonzero().squeeze(-1)
    scored = given.select(places)
    count = scored.labels.numel()
    if scored.weights is not None:  # a row that weighs nothing may hold anything: NaN too
        kept = (scored.weights != 0).nonzero().squeeze(-1)
        scored, places = scored.select(kept), places[kept]
    if validate:
        check_values(scored.labels, scored.signal, scored.weights, scored.temperatures, head.num_real, places)
    result = score_head(
        scored.view(head), scored.signal, scored.labels,
        kd_weight=kd_weight / max(1, count), ce_weight=ce_weight / max(1, count),
        token_weights=scored.weights, token_temperature=scored.temperatures, kernel=kernel, **options,
    )  # fmt: skip
    return _with_fallback(result, count - scored.labels.numel())


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
    if has_kd and (signal is None or divergence is None):
        raise ConfigError(
            "a kd weight needs a divergence and a teacher's signal", advice=["pass both, or a kd weight of 0"]
        )
    signal = signal if has_kd else None
    check_pass(view, signal, targets, divergence, temperature, token_weights, token_temperature, top_k, chunk_tokens)
    if has_kd:
        check_labels(signal, top_k, rest_to_label, label_margin)
    targets, signal = targets.long(), _with_long_ids(signal)
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
    counters = {"bad_teacher_rows": is_bad.sum(), **_filled_counters(task)}
    terms = {"ce": Term(masked_sum(ce * weigh, weigh != 0), ones.sum())} if has_ce else {}
    if not has_kd:
        return HeadLoss(loss, terms, counters)
    num_bad = is_bad.sum().to(ones.dtype)
    taught = Term(masked_sum(kd * kd_weigh, kd_weigh != 0), targets.numel() - num_bad)
    fallback = Term(masked_sum(ce * kd_weigh, is_bad & (kd_weigh != 0)), num_bad)
    return HeadLoss(loss, {"kd": taught, **terms}, counters, fallback)


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
    if isinstance(teacher, DenseTeacher):
        return DenseSignal(teacher.hidden, teacher.head, teacher.taps)
    if isinstance(teacher, TopKTeacher):
        return TopKSignal(teacher.ids, teacher.log_probs, teacher.tail_log_mass, temperature)
    if isinstance(teacher, SampledTeacher):
        return SampledSignal(teacher.ids, teacher.weights, teacher.entropy, temperature)
    return teacher


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


# -- what a caller gives for each position -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Positions:
    hidden: Tensor  # [N, D]
    labels: Tensor  # [N]
    signal: Signal | None
    weights: Tensor | None  # [N]
    temperatures: Tensor | None  # [N]

    def view(self, head: HeadWeights) -> StudentView:
        return StudentView(self.hidden, head)

    def select(self, index: Tensor) -> _Positions:
        """The positions of an ascending index."""
        if index.numel() == self.labels.numel():
            return self
        signal = self.signal
        if isinstance(signal, DenseSignal):
            signal = replace(signal, hidden=signal.hidden.index_select(0, index))
        elif signal is not None:
            signal = select_rows(signal, index)
        return _Positions(
            self.hidden.index_select(0, index),
            self.labels[index],
            signal,
            None if self.weights is None else self.weights[index],
            None if self.temperatures is None else self.temperatures[index],
        )


def _flattened(
    hidden: Tensor, labels: Tensor, signal: Signal | None, weights: Tensor | None, temperatures: Tensor | None
) -> _Positions:
    """Leading axes like those of the student's hidden states as one; anything else is left for `check_pass` to name."""
    if not isinstance(hidden, Tensor) or hidden.ndim == 0:
        raise ConfigError(f"student_hidden is a {type(hidden).__name__} without axes", where="student_hidden",
                          advice=["hidden states [N, D] at the positions of the labels"])  # fmt: skip
    leading = hidden.shape[:-1]

    def flat(tensor: Any, num_own: int = 0) -> Any:
        if not isinstance(tensor, Tensor) or tensor.shape[: tensor.ndim - num_own] != leading:
            return tensor
        return tensor.reshape(math.prod(leading), *tensor.shape[tensor.ndim - num_own :])

    match signal:
        case DenseSignal():
            signal = replace(signal, hidden=flat(signal.hidden, 1))
        case TopKSignal():
            signal = replace(signal, ids=flat(signal.ids, 1), log_probs=flat(signal.log_probs, 1),
                             tail_log_mass=flat(signal.tail_log_mass))  # fmt: skip
        case SampledSignal():
            signal = replace(signal, ids=flat(signal.ids, 1), weights=flat(signal.weights, 1),
                             entropy=flat(signal.entropy))  # fmt: skip
    return _Positions(flat(hidden, 1), flat(labels), signal, flat(weights), flat(temperatures))
