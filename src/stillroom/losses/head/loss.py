"""The fused head: every vocabulary-level objective in one chunked pass over the scored positions.

A [tokens, vocabulary] tensor of logits is the largest thing in distillation and is needed for milliseconds. The pass
takes a chunk of positions, computes the student's and the teacher's logits, overwrites them with gradients, multiplies
those back to the hidden states and the head weight, and takes the next chunk.

The mix calls `score_head`; `fused_head_loss` is the same pass for people who bring their own loop.

Legend: N positions, V real vocabulary, K kept ids, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.config.schema import LEAST_TEMPERATURE
from stillroom.core.errors import ConfigError
from stillroom.core.numerics import masked_sum, work_dtype
from stillroom.core.types import IGNORED, DenseSignal, HeadWeights, SampledSignal, Signal, StudentView, Term, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.divergences import (
    Divergence,
    check_count,
    check_number,
    check_temperature,
    check_tensor,
    only_once,
)
from stillroom.losses.head.kernel import KernelName, choose_kernel
from stillroom.losses.head.products import GivenLogits, Products, Wanted, products_of
from stillroom.losses.head.rows import (
    Logits,
    RowKernel,
    RowPlan,
    RowRecord,
    TeacherRows,
    check_pair,
    choose_chunk,
    kind_of,
    parts,
    select_rows,
    without_empty_tail,
)

# -- checks of shapes, dtypes, devices and plain numbers ---------------------------------------------------
#
# They are known without looking at a tensor's values: they are checked on every call, before any row is read, and all
# kernels then rely on them.
#
# Legend: N positions, V vocabulary, K kept ids, D width.


def check_head(prefix: str, hidden: Tensor, head: HeadWeights, num_rows: int | str, device: torch.device) -> None:
    """Hidden states [N, D] and a head of that width, or logits [N, V or more] and an empty weight."""
    check_tensor(f"{prefix}hidden", hidden, [num_rows, "D"], device=device)
    weight, width = f"{prefix}weight", hidden.shape[1]
    if head.is_identity:
        check_tensor(weight, head.weight, [*head.weight.shape], device=device)
        num_rows_of_weight, source = width, f"{prefix}hidden, which are logits"
        if head.vocab_size is None:
            raise ConfigError(
                f"{weight} is empty, so {prefix}hidden are logits, and how many of them are real is unknown",
                where="vocab_size",
                advice=["give the real vocabulary as vocab_size", "give the head's weight [V, D]"],
            )
    else:
        advice = f"a weight of the width of {prefix}hidden, a row for each token"
        check_tensor(weight, head.weight, ["V", width], device=device, advice=advice)
        num_rows_of_weight, source = head.weight.shape[0], weight
        if head.bias is not None:
            advice = f"one entry for each row of {weight}, padding included"
            check_tensor(f"{prefix}bias", head.bias, [num_rows_of_weight], device=device, advice=advice)
    if head.vocab_size is not None and not (_is_whole(head.vocab_size) and 1 <= head.vocab_size <= num_rows_of_weight):
        raise ConfigError(
            f"vocab_size is {head.vocab_size}, and {source} has {num_rows_of_weight:,} tokens",
            where="vocab_size",
            advice=[f"from 1 to {num_rows_of_weight}, or None where no row is padding"],
        )
    check_number(f"{prefix}scale", head.scale, above=0.0)
    if head.softcap is not None:
        check_number(f"{prefix}softcap", head.softcap, above=0.0)
    if head.clamp is not None:
        check_number(f"{prefix}clamp", head.clamp, above=0.0)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_signal(signal: Signal, num_rows: int, num_tokens: int, device: torch.device) -> None:
    """A teacher's answer for as many positions, from the same vocabulary."""
    if isinstance(signal, DenseSignal):
        check_head("teacher.", signal.hidden, signal.head, num_rows, device)
        if signal.head.num_real != num_tokens:
            raise ConfigError(
                f"teacher has {signal.head.num_real:,} tokens, student {num_tokens:,}",
                where="teacher.weight, student_weight",
                advice=["if the difference is padding, give both the real vocabulary as vocab_size"],
            )
        return
    if not isinstance(signal, TopKSignal | SampledSignal):
        raise ConfigError(
            f"teacher is a {type(signal).__name__}",
            where="teacher",
            advice=[
                "DenseTeacher, TopKTeacher or SampledTeacher of stillroom.losses",
                "None with a kd weight of 0",
            ],
        )
    check_tensor("teacher.ids", signal.ids, [num_rows, "K"], device=device, dtypes="integer")
    kept = [num_rows, signal.ids.shape[1]]
    if isinstance(signal, TopKSignal):
        check_tensor("teacher.log_probs", signal.log_probs, kept, device=device)
        check_tensor("teacher.tail_log_mass", signal.tail_log_mass, [num_rows], device=device)
    else:
        check_tensor("teacher.weights", signal.weights, kept, device=device)
        check_tensor("teacher.entropy", signal.entropy, [num_rows], device=device)
    most = num_tokens if isinstance(signal, TopKSignal) else math.inf  # samples may repeat
    if not 1 <= signal.ids.shape[1] <= most:
        raise ConfigError(
            f"teacher.ids has {signal.ids.shape[1]:,} ids a row, the vocabulary {num_tokens:,} tokens",
            where="teacher.ids",
            advice=["at least one id a row, and none twice"],
        )


def check_pass(
    view: StudentView,
    signal: Signal | None,
    targets: Tensor,
    divergence: Divergence | None,
    temperature: float,
    token_weights: Tensor | None,
    token_temperature: Tensor | None,
    top_k: int,
    chunk_tokens: int,
) -> None:
    """Everything a pass relies on. `signal` is None where no kd is asked for."""
    hidden, device = view.hidden, view.hidden.device
    check_head("student_", hidden, view.head, "N", device)
    num_rows = hidden.shape[0]
    check_tensor("labels", targets, [num_rows], device=device, dtypes="integer")
    if token_weights is not None:
        check_tensor("token_weights", token_weights, [num_rows], device=device, dtypes="real")
    check_count("chunk_tokens", chunk_tokens, advice="1 or more positions in a chunk; 0 chooses")
    check_count("top_k", top_k, advice="how many of a dense teacher's tokens are kept; 0: all")
    if signal is None:
        return
    if divergence is None or not hasattr(divergence, "evaluate"):
        raise ConfigError(f"unknown divergence {divergence!r}", where="divergence",
                          advice=["a name, as 'forward_kl'", "what objectives.divergences.make returns"])  # fmt: skip
    check_temperature(temperature)
    check_signal(signal, num_rows, view.head.num_real, device)
    if token_temperature is not None:
        check_tensor("token_temperature", token_temperature, [num_rows], device=device)
    _check_pair(signal, divergence, temperature, token_temperature, top_k)


def _check_pair(
    signal: Signal, divergence: Divergence, temperature: float, token_temperature: Tensor | None, top_k: int
) -> None:
    """Refuse a divergence or a temperature that this kind of answer cannot serve."""
    if isinstance(signal, DenseSignal):
        if top_k and signal.hidden.requires_grad:
            raise ConfigError(
                "a teacher that is being trained needs its whole distribution",
                advice=["set objectives.kd.top_k = 0", "detach the teacher's hidden states"],
            )
        return
    assert isinstance(signal, TopKSignal | SampledSignal), "others are refused by check_signal"
    if token_temperature is not None:
        raise ConfigError(
            "stored teacher answers have one temperature, not one for each token",
            advice=["leave token_temperature out", "use the live teacher"],
        )
    check_pair(kind_of(signal), divergence.name, temperature, signal.temperature)


def check_labels(signal: Signal | None, top_k: int, rest_to_label: bool, label_margin: float | None) -> None:
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
            "the label can lead only where the teacher's whole row is available",
            advice=["set objectives.kd.top_k = 0", "set objectives.kd.on_wrong_teacher = 'label_residual'"],
        )
    if signal.hidden.requires_grad:
        raise ConfigError(
            "a teacher that is being trained is corrected by its own truth term",
            advice=["set objectives.kd.on_wrong_teacher = 'keep'"],
        )


# -- checks of tensor values: labels and ids inside the vocabulary, masses that sum to 1 -------------------
#
# They are computed on the tensors' device and read in one copy. The mix does not call them: its labels and its
# teacher's answers are checked where they are made, because a training step may read from the device only once.
#
# A stored row with NaN or infinite mass is accepted: a broken teacher writes such rows, and the pass counts them and
# scores them by their labels.
#
# Legend: N positions, V vocabulary, K kept ids.


_SLACK = 0.02  # how far the masses of a stored row may be from 1: BF16 log-probs of a flat row are off by as much


@dataclass(frozen=True)
class _Finding:
    """Rows that break a rule, and how to say it of one of them."""

    argument: str
    is_bad: Tensor  # [N], bool
    say: Callable[[int], str]
    advice: tuple[str, ...]


def check_values(
    labels: Tensor,
    signal: Signal | None,
    token_weights: Tensor | None,
    token_temperature: Tensor | None,
    num_tokens: int,
    positions: Tensor,
) -> None:
    """Refuse values that no pass can use. `positions` [N] are the places of the rows in the caller's tensors."""
    if labels.numel() == 0:
        return
    outside = _Finding(
        "labels",
        (labels < 0) | (labels >= num_tokens),
        lambda row: f"the label {labels[row].tolist():,} lies outside the vocabulary of {num_tokens:,} tokens",
        ("-100 where a position is not scored", "vocab_size or the head's weight is that of another tokenizer"),
    )
    findings = [outside]
    if token_weights is not None:
        findings.append(_number_finding("token_weights", token_weights, 0.0, "weights are finite and 0 or above"))
    if token_temperature is not None:
        advice = f"temperatures are finite and {LEAST_TEMPERATURE:g} or above"
        findings.append(_number_finding("token_temperature", token_temperature, LEAST_TEMPERATURE, advice))
    if isinstance(signal, TopKSignal):
        findings += _top_k_findings(signal, num_tokens)
    elif isinstance(signal, SampledSignal):
        findings += _sampled_findings(signal, num_tokens)
    broken = torch.stack([finding.is_bad.any() for finding in findings]).tolist()
    for finding, is_broken in zip(findings, broken, strict=True):
        if is_broken:
            (row, *_) = finding.is_bad.nonzero().squeeze(-1).tolist()
            (place,) = positions[row : row + 1].tolist()
            raise ConfigError(
                f"position {place:,}: {finding.say(row)}", where=finding.argument, advice=list(finding.advice)
            )


def _number_finding(name: str, values: Tensor, least: float, advice: str) -> _Finding:
    is_bad = ~(values >= least)
    if values.dtype.is_floating_point:
        is_bad = is_bad | ~values.isfinite()
    return _Finding(name, is_bad, lambda row: f"{name} holds {values[row].tolist():g}", (advice,))


def _id_finding(ids: Tensor, num_tokens: int) -> _Finding:
    is_outside = (ids < 0) | (ids >= num_tokens)
    return _Finding(
        "teacher.ids",
        is_outside.any(-1),
        lambda row: f"the id {ids[row][is_outside[row]].tolist()[0]:,} lies outside the vocabulary of {num_tokens:,}",
        ("ids of the student's own vocabulary",),
    )


def _top_k_findings(signal: TopKSignal, num_tokens: int) -> Iterator[_Finding]:
    signal = without_empty_tail(signal, num_tokens)
    ordered = signal.ids.sort(-1).values
    mass = signal.log_probs.double().exp().sum(-1) + signal.tail_log_mass.double().exp()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.ids",
        (ordered[:, 1:] == ordered[:, :-1]).any(-1),
        lambda row: "an id stands in the row twice",
        ("distinct ids, as torch.topk gives them",),
    )
    yield _Finding(
        "teacher.log_probs, teacher.tail_log_mass",
        mass.isfinite() & (mass > 0) & ((mass - 1).abs() > _SLACK),
        lambda row: f"kept tokens and tail have a mass of {mass[row].tolist():.4g} instead of 1",
        (
            "natural logarithms of probabilities at the temperature of the call, not probabilities and not logits",
            "tail_log_mass: the log of the mass that the kept tokens leave over (core.numerics.tail_log_mass)",
        ),
    )


def _sampled_findings(signal: SampledSignal, num_tokens: int) -> Iterator[_Finding]:
    weights, entropy = signal.weights.double(), signal.entropy.double()
    mass = weights.sum(-1)
    is_usable = (mass + entropy).isfinite()
    yield _id_finding(signal.ids, num_tokens)
    yield _Finding(
        "teacher.weights",
        is_usable & ((weights < 0).any(-1) | ((mass - 1).abs() > _SLACK)),
        lambda row: f"weights from {weights[row].min().tolist():.4g} up, with a sum of {mass[row].tolist():.4g}",
        ("weights of 0 or above that sum to 1 in each row",),
    )
    most = math.log(num_tokens)
    yield _Finding(
        "teacher.entropy",
        is_usable & ((entropy < -_SLACK) | (entropy > most + _SLACK)),
        lambda row: (
            f"an entropy of {entropy[row].tolist():.4g} nats, where {num_tokens:,} tokens allow 0 to {most:.4g}"
        ),
        ("the entropy of the teacher's whole distribution at the temperature of the call, in nats",),
    )


# -- what a caller gives: a teacher's answer in one of three forms, and values for each position -----------
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
    """The teacher's top K tokens and the log mass of all others, at the temperature of the call."""

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


# -- the chunked pass as one autograd node -----------------------------------------------------------------
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
    heaviest: tuple[float, float, float] | None = None  # see `HalfRequest`
    on_logits: Callable[[slice, Any, Any], None] | None = None  # see `StudentView`


class _HeadPass(torch.autograd.Function):
    """The differentiable loss, and for each row its kd, its cross-entropy and whether its teacher was unusable."""

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
                None if gradient is None else _multiplied(gradient, upstream[0], dtype)
                for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        return (*only_once(results), None)


def _multiplied(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * upstream as `dtype`, in place unless the graph is kept: a second weight gradient would double the
    memory. A GPU multiplies in FP32 and casts in one pass."""
    if gradient.dtype != dtype and gradient.device.type == "cuda":
        return torch.mul(gradient, upstream, out=torch.empty_like(gradient, dtype=dtype))
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps_graph is None or keeps_graph():
        return (gradient * upstream).to(dtype)
    # Reading a CPU scalar is free. On a GPU the read would wait for the device, and the product is cheap.
    if upstream.device.type == "cpu" and upstream.detach().numpy() == 1.0:
        return gradient.to(dtype)
    return gradient.mul_(upstream).to(dtype)


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
        self.student = products_of(hidden, head, dtype, task.chunk_tokens, wanted, task.heaviest)
        self.teacher: Products | GivenLogits | None = None
        if isinstance(task.signal, DenseSignal) and teacher_hidden is not None:
            wanted = Wanted(hidden=plan.wants_teacher)
            self.teacher = products_of(teacher_hidden, task.signal.head, dtype, task.chunk_tokens, wanted)

    def run(self) -> None:
        plan = self.task.plan
        if plan.divergence is None and not plan.has_ce:
            return
        for part in parts(len(self.rows.targets), self.task.chunk_tokens):
            student, teacher = self.student.logits(part), self._teacher_rows(part)
            if self.task.on_logits is not None:  # before the kernel, which may write over them
                self.task.on_logits(part, student, teacher if isinstance(teacher, Logits) else None)
            gradient = self.task.kernel.run(student, teacher, self.rows.rows(part), plan)
            if plan.wants_student and not plan.falls_back:
                is_bad = self.rows.is_bad[part].unsqueeze(-1)
                (student.raw if gradient is None else gradient.values).masked_fill_(is_bad, 0.0)
                if gradient is not None and gradient.lost is not None:
                    gradient.lost.masked_fill_(is_bad.squeeze(-1), 0.0)
            if plan.wants_student:
                self.student.pull_back(part, gradient)
            if plan.wants_teacher and self.teacher is not None:
                self.teacher.pull_back(part)

    def loss(self) -> Tensor:
        """Weighted sum of the rows. A bad row's kd weight multiplies its cross-entropy, unless none falls back."""
        rows = self.rows
        ce_weights = rows.ce_weights
        if self.task.plan.falls_back:
            ce_weights = ce_weights + torch.where(rows.is_bad, rows.kd_weights, torch.zeros_like(rows.kd_weights))
        # A row of weight 0 may have an infinite value, and 0 * inf is NaN.
        kd = masked_sum(rows.kd * rows.kd_weights, rows.kd_weights != 0)
        return kd + masked_sum(rows.ce * ce_weights, ce_weights != 0)

    def gradients(self) -> tuple[Tensor | None, ...]:
        teacher = None if self.teacher is None else self.teacher.gradients()[0]
        return *self.student.gradients(), teacher

    def _teacher_rows(self, part: slice) -> TeacherRows | None:
        if self.teacher is not None:
            return self.teacher.logits(part)
        signal = self.task.signal
        return select_rows(signal, part) if isinstance(signal, TopKSignal | SampledSignal) else None


# -- the loss ----------------------------------------------------------------------------------------------


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
    has padding rows. `top_k` > 0 sees a dense teacher through its top k tokens and the mass of the rest.
    `chunk_tokens` 0 chooses. With nothing to score the loss is 0 and so are its gradients.

    Settings of a divergence that is given by name: `beta` of jsd (0.5) and alpha_beta (0.7), `alpha` of the skewed ones
    (0.1) and alpha_beta (0.2), `interpolation` of taid (1, the teacher itself). Other divergences do not read them.

    A teacher's row that is not a distribution (NaN, +inf, nothing possible) is not distilled: its kd weight goes to its
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
    if top_k and signal is not None and not isinstance(signal, DenseSignal):
        raise ConfigError(
            "top_k belongs to a dense teacher; this one has its tokens already",
            where="top_k",
            advice=["leave top_k out"],
        )
    settings = {"beta": beta, "alpha": alpha, "interpolation": interpolation}
    given_settings = {name: value for name, value in settings.items() if value is not None}
    chosen = divergences.make(divergence, given_settings) if isinstance(divergence, str) else divergence
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
    falls_back: bool = True,
    chunk_tokens: int = 0,
    kernel: KernelName = "auto",
) -> HeadLoss:
    """Sum over positions of kd_weight * T^2 D + ce_weight * cross-entropy, differentiable in student and teacher.

    Weights multiply sums, so the caller divides them by the counts of the whole window. A weight of exactly 0.0
    (a number, not a tensor) leaves its term out: the signal is then not even looked at. `token_weights` belong to
    the objective and are part of the totals; `kd_token_weights` are those of the kd term alone. Targets are all >= 0.
    `rest_to_label` and `label_margin` change what the teacher says with the label's help: see `RowPlan`. Without
    `falls_back` a row whose teacher is no distribution weighs nothing; there must be no cross-entropy then.
    """
    has_kd = not _is_zero(kd_weight)
    if not falls_back and not _is_zero(ce_weight):
        raise ConfigError("rows without labels have no cross-entropy", advice=["pass a ce weight of 0"])
    if has_kd and (signal is None or divergence is None):
        raise ConfigError(
            "a kd weight needs a divergence and a teacher's signal", advice=["pass both, or a kd weight of 0"]
        )
    signal = signal if has_kd else None
    check_pass(view, signal, targets, divergence, temperature, token_weights, token_temperature, top_k, chunk_tokens)
    if has_kd:
        check_labels(signal, top_k, rest_to_label, label_margin)
    if isinstance(signal, TopKSignal | SampledSignal):
        signal = replace(signal, ids=signal.ids.long())
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
        falls_back=falls_back,
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
        heaviest=_heaviest(kd_weight, ce_weight, temperature, (token_weights, kd_token_weights, token_temperature)),
        on_logits=view.on_logits,
    )
    return _result(view, task, weighing)


def _heaviest(
    kd_weight: Weight, ce_weight: Weight, temperature: float, own: Sequence[Tensor | None]
) -> tuple[float, float, float] | None:
    """Weights and temperature of every row, where the host knows them: rows have no other."""
    if isinstance(kd_weight, Tensor) or isinstance(ce_weight, Tensor) or any(one is not None for one in own):
        return None
    return kd_weight, ce_weight, temperature


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
    inputs = view.hidden, view.head.weight, view.head.bias, teacher_hidden
    loss, kd, ce, is_bad = _HeadPass.apply(*inputs, task)  # type: ignore[no-untyped-call]
    counters = {"bad_teacher_rows": is_bad.sum()}
    if task.clamped is not None:
        counters["clamped_fraction_sum"] = task.clamped.sum() / task.head.num_real
    if task.corrected is not None:
        counters["corrected_rows"] = task.corrected.sum()
    terms = {}
    if task.plan.has_ce:
        terms["ce"] = Term(masked_sum(ce * weighing.ce, weighing.ce != 0), weighing.ones.sum())
    if task.plan.divergence is None:
        return HeadLoss(loss, terms, counters)
    num_bad = is_bad.sum().to(weighing.ones.dtype)
    taught = Term(masked_sum(kd * weighing.kd, weighing.kd != 0), task.targets.numel() - num_bad)
    if not task.plan.falls_back:
        return HeadLoss(loss, {"kd": taught}, counters)
    fallback = Term(masked_sum(ce * weighing.kd, is_bad & (weighing.kd != 0)), num_bad)
    unweighted = None if task.plan.has_ce else Term(ce.sum(), weighing.ones.sum())
    return HeadLoss(loss, {"kd": taught, **terms}, counters, fallback, unweighted)


def _is_zero(weight: Weight) -> bool:
    return not isinstance(weight, Tensor) and weight == 0.0


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _with_fallback(result: HeadLoss, num_weightless: int) -> HeadLoss:
    """The result with its fallback among the terms; positions of weight 0 add nothing to a sum, and count."""
    terms = {name: Term(term.total, term.count + num_weightless) for name, term in result.terms.items()}
    if result.fallback is not None:
        terms["fallback"] = result.fallback
    return replace(result, terms=terms)
