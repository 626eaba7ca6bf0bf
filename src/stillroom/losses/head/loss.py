"""The fused head: every vocabulary-level objective in one chunked pass over the scored positions.

A [tokens, vocabulary] tensor of logits is the largest thing in distillation and is needed for milliseconds. The pass
takes a chunk of positions, computes the student's and the teacher's logits, overwrites them with gradients, multiplies
those back to the hidden states and the head weight, and takes the next chunk.

The mix calls `score_head`; `fused_head_loss` is the same pass for people who bring their own loop.

Legend: N positions, V real vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.numerics import masked_sum, work_dtype
from stillroom.core.types import IGNORED, DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, Term, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.arguments import check_number
from stillroom.losses.divergences import Divergence, only_once
from stillroom.losses.head.borders import check_labels, check_pass, check_values
from stillroom.losses.head.kernel import KernelName, choose_kernel
from stillroom.losses.head.products import GivenLogits, Products, Wanted, products_of
from stillroom.losses.head.rows import RowKernel, RowPlan, RowRecord, TeacherRows, choose_chunk, select_rows

# -- inputs ----------------------------------------------------------------------------------------
# What a caller of the fused head gives: a teacher's answer in one of three forms, and values for each position.
#
# Legend: N positions, V real vocabulary, K kept ids, D width.


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


def as_signal(teacher: Teacher | None, temperature: float) -> Signal | None:
    """The teacher's answer as objectives read it. Stored answers are at the temperature of the call."""
    if isinstance(teacher, DenseTeacher):
        return DenseSignal(teacher.hidden, teacher.head, teacher.taps)
    if isinstance(teacher, TopKTeacher):
        return TopKSignal(teacher.ids, teacher.log_probs, teacher.tail_log_mass, temperature)
    if isinstance(teacher, SampledTeacher):
        return SampledSignal(teacher.ids, teacher.weights, teacher.entropy, temperature)
    return teacher


@dataclass(frozen=True)
class Positions:
    """What belongs to each position: the student's hidden state, its label and what the teacher says there."""

    hidden: Tensor  # [N, D]
    labels: Tensor  # [N]
    signal: Signal | None
    weights: Tensor | None  # [N]
    temperatures: Tensor | None  # [N]

    def view(self, head: HeadWeights) -> StudentView:
        return StudentView(self.hidden, head)

    def select(self, index: Tensor) -> Positions:
        """The positions of an ascending index; all of them are these."""
        if index.numel() == self.labels.numel():
            return self
        signal = self.signal
        if isinstance(signal, DenseSignal):
            signal = replace(signal, hidden=signal.hidden.index_select(0, index))
        elif isinstance(signal, TopKSignal | SampledSignal):
            signal = select_rows(signal, index)
        return Positions(
            self.hidden.index_select(0, index),
            self.labels[index],
            signal,
            None if self.weights is None else self.weights[index],
            None if self.temperatures is None else self.temperatures[index],
        )


def flattened(
    hidden: Tensor, labels: Tensor, signal: Signal | None, weights: Tensor | None, temperatures: Tensor | None
) -> Positions:
    """Join leading axes that are those of the student's hidden states. What has others is left for `check_pass`."""
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
    return Positions(flat(hidden, 1), flat(labels), signal, flat(weights), flat(temperatures))


# -- passes ----------------------------------------------------------------------------------------
# The chunked pass as one autograd node.
#
# Gradients are computed in the forward, while the chunk's logits are in memory. The backward multiplies them by the
# upstream scalar in FP32 and casts them to the input's dtype after that, so that a loss scale keeps FP16 gradients
# from being flushed to zero.
#
# Legend: N scored positions, V real vocabulary, D width.


@dataclass(frozen=True)
class HeadTask:
    """The inputs of a pass that autograd does not differentiate."""

    head: HeadWeights
    signal: Signal | None
    targets: Tensor  # [N]
    kd_weights: Tensor  # [N]
    ce_weights: Tensor  # [N]
    temperatures: Tensor  # [N]
    plan: RowPlan
    kernel: RowKernel
    chunk_tokens: int
    clamped: Tensor | None = None  # [N], filled by the pass where the head has a clamp
    corrected: Tensor | None = None  # [N], filled by the pass where the plan has a label margin


def run_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor | None, task: HeadTask
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The differentiable loss, and for each row its kd, its cross-entropy and whether its teacher was unusable."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _HeadPass.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, teacher_hidden, task
    )
    return result


class _HeadPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor | None, task: HeadTask
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head = replace(task.head, weight=weight, bias=bias)
        with torch.autocast(hidden.device.type, enabled=False):
            chunked = _ChunkedPass(hidden, head, teacher_hidden, task, ctx.needs_input_grad)
            chunked.run()
        ctx.save_for_backward(*chunked.gradients())
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias, teacher_hidden))
        rows = chunked.rows
        ctx.mark_non_differentiable(rows.kd, rows.ce, rows.is_bad)
        return chunked.loss(), rows.kd, rows.ce, rows.is_bad

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = [
                None if gradient is None else _multiplied(gradient, upstream[0]).to(dtype)
                for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        return (*only_once(results), None)


def _multiplied(gradient: Tensor, upstream: Tensor) -> Tensor:
    """gradient * upstream, in place unless the graph is kept: a second weight gradient would double the memory."""
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps_graph is None or keeps_graph():
        return gradient * upstream
    # Reading a CPU scalar is free. On a GPU the read would wait for the device, and the product is cheap.
    if upstream.device.type == "cpu" and upstream.detach().numpy() == 1.0:
        return gradient
    return gradient.mul_(upstream)


class _ChunkedPass:
    """One pass over the chunks. Owns the scratch and the gradients."""

    def __init__(
        self,
        hidden: Tensor,
        head: HeadWeights,
        teacher_hidden: Tensor | None,
        task: HeadTask,
        needs_grad: tuple[bool, ...],
    ) -> None:
        self.task, plan = task, task.plan
        dtype = work_dtype(hidden, head.weight)
        self.rows = RowRecord(
            targets=task.targets,
            temperatures=task.temperatures,
            kd_weights=task.kd_weights,
            ce_weights=task.ce_weights,
            kd=torch.zeros_like(task.kd_weights),
            ce=torch.zeros_like(task.ce_weights),
            is_bad=torch.zeros_like(task.kd_weights, dtype=torch.bool),
            clamped=task.clamped,
            corrected=task.corrected,
        )
        wanted = Wanted(*needs_grad[:3]) if plan.wants_student else Wanted()
        self.student = products_of(hidden, head, dtype, task.chunk_tokens, wanted)
        self.teacher: Products | GivenLogits | None = None
        if isinstance(task.signal, DenseSignal) and teacher_hidden is not None:
            wanted = Wanted(hidden=plan.wants_teacher)
            self.teacher = products_of(teacher_hidden, task.signal.head, dtype, task.chunk_tokens, wanted)

    def run(self) -> None:
        plan = self.task.plan
        if plan.divergence is None and not plan.has_ce:
            return
        for part in self._parts():
            student = self.student.logits(part)
            self.task.kernel.run(student, self._teacher_rows(part), self.rows.rows(part), plan)
            if plan.wants_student:
                self.student.pull_back(part)
            if plan.wants_teacher and self.teacher is not None:
                self.teacher.pull_back(part)

    def loss(self) -> Tensor:
        """Weighted sum of the rows. A bad row's kd weight multiplies its cross-entropy."""
        rows = self.rows
        ce_weights = rows.ce_weights + torch.where(rows.is_bad, rows.kd_weights, torch.zeros_like(rows.kd_weights))
        # A row of weight 0 may have an infinite value, and 0 * inf is NaN.
        kd = masked_sum(rows.kd * rows.kd_weights, rows.kd_weights != 0)
        return kd + masked_sum(rows.ce * ce_weights, ce_weights != 0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        teacher = None if self.teacher is None else self.teacher.gradients()[0]
        return *self.student.gradients(), teacher

    def _parts(self) -> Iterator[slice]:
        num_rows = int(self.rows.targets.shape[0])
        for start in range(0, num_rows, self.task.chunk_tokens):
            yield slice(start, min(start + self.task.chunk_tokens, num_rows))

    def _teacher_rows(self, part: slice) -> TeacherRows | None:
        if self.teacher is not None:
            return self.teacher.logits(part)
        signal = self.task.signal
        return select_rows(signal, part) if isinstance(signal, TopKSignal | SampledSignal) else None


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
