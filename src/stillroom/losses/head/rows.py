"""The row kernel in plain PyTorch: runs wherever torch runs, and is what other kernels must agree with.

Rows are taken in blocks, because there are up to 26 temporaries of a block's size.

Legend: C rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.numerics import Softmax, head_and_tail, is_distribution, softcap, softcap_slope
from stillroom.core.types import SampledSignal, Signal, TopKSignal
from stillroom.losses.divergences import Divergence, check_number, check_tensor, softmax_pullback, student_gradient

# -- the interface of a row kernel -------------------------------------------------------------------------
#
# A kernel computes values of a chunk's rows and overwrites their logits with gradients.
#
# Legend: C rows of a chunk, V vocabulary, K kept ids.


BIAS, MANTISSA_BITS = 127, 23  # of an FP32 number


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent in FP32, exactly: a device's exp2 and pow may be off by a digit. Held to the normal numbers."""
    return ((exponents.clamp(1 - BIAS, BIAS) + BIAS) << MANTISSA_BITS).view(torch.float32)


@dataclass(frozen=True)
class HalfRequest:
    """The next products read the gradient in this half dtype: a kernel may write it so, over the logits."""

    dtype: torch.dtype
    heaviest: tuple[float, float, float] | None = None  # kd weight, ce weight and temperature of all rows, if known


@dataclass(frozen=True)
class GradientRows:
    """The gradient of a chunk's logits as an operand: `values` are the gradient times a power of two.

    The power is 2^`lifts`, row by row, or 2^`lift` for all of them.
    """

    values: Tensor  # [C, V]
    lifts: Tensor | None = None  # [C], int32
    lost: Tensor | None = None  # [C], what rounding took from the sum of each row of `values`; None: not rounded
    lift: int = 0  # known to the host

    def summed(self) -> GradientRows:
        """`lost` of [C, parts] as [C]."""
        assert self.lost is not None
        return replace(self, lost=self.lost.sum(-1))


@dataclass(frozen=True)
class Logits:
    """A chunk's products hidden @ weight.T, and what the head does to them afterwards."""

    raw: Tensor  # [C, V], scratch: a kernel may leave the gradient with respect to `raw` here
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    clamp: float | None = None
    half: HalfRequest | None = None

    def rows(self, part: slice) -> Logits:
        return replace(self, raw=self.raw[part])


TeacherRows = Logits | TopKSignal | SampledSignal


@dataclass(frozen=True)
class RowRecord:
    """Inputs and outputs of a kernel for each row. All of length C.

    `kd_weights` and `ce_weights` multiply a row's values in the loss. A row whose teacher has no distribution is marked
    in `is_bad`, has a kd of 0, and its kd weight is added to its ce weight.
    """

    targets: Tensor
    temperatures: Tensor
    kd_weights: Tensor
    ce_weights: Tensor
    kd: Tensor  # out
    ce: Tensor  # out
    is_bad: Tensor  # out, bool
    clamped: Tensor | None = None  # out, how many of the student's logits were cut; only with a clamp
    corrected: Tensor | None = None  # out, 1 where the teacher was corrected towards the label; only with a margin

    def rows(self, part: slice) -> RowRecord:
        return RowRecord(
            self.targets[part],
            self.temperatures[part],
            self.kd_weights[part],
            self.ce_weights[part],
            self.kd[part],
            self.ce[part],
            self.is_bad[part],
            None if self.clamped is None else self.clamped[part],
            None if self.corrected is None else self.corrected[part],
        )


@dataclass(frozen=True)
class RowPlan:
    """What a pass over rows computes."""

    divergence: Divergence | None  # None: no kd term
    has_ce: bool
    is_unit_temperature: bool  # every row has T = 1, known without reading the device
    wants_student: bool  # gradients with respect to the student's logits
    wants_teacher: bool
    top_k: int = 0  # keep only so many of a dense teacher's tokens, and the mass of the rest
    rest_to_label: bool = False  # what a top-k teacher leaves over goes to the label
    label_margin: float | None = None  # by how much the label leads where a dense teacher's top token is another
    falls_back: bool = True  # a row with a bad teacher is taught by its label; False: it weighs nothing


class RowKernel(Protocol):
    """Fills `rows.kd`, `rows.ce`, `rows.is_bad`; leaves gradients in `raw` of student (and teacher) if wanted.

    Returns the student's gradient where it was left there in half, as `student.half` allows.
    """

    @property
    def name(self) -> str: ...

    def run(
        self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan
    ) -> GradientRows | None: ...


# -- teachers that answer with a few tokens: top-k with the exact tail, and unbiased samples ---------------
#
# Top-k + tail. The K kept tokens and one bucket for all others are two (K+1)-way distributions; any divergence of the
# family applies to them, and by the data-processing inequality bounds the full one from below. The kept values are
# never renormalised: that would teach the student that the tail is impossible. A pulled-back slope h of the (K+1)-way
# problem reaches the V logits as h_k at a kept token and as h_tail * q_j / q_tail at another. Where all tokens are
# kept (K = V) no token is left for the tail, and its stored mass is not used.
#
# Samples (RS-KD, Anshumann et al. 2025). weights / sum is an unbiased estimate of the teacher, hence unbiased for
# what is linear in the teacher: forward KL. The stored entropy makes the value a KL and not a cross-entropy.
#
# Both are bound to the temperature at which they were stored: the tail of softmax(z / T) cannot be had from the tail
# of softmax(z).
#
# Legend: C rows, V vocabulary, K kept ids. Ids of a row are distinct (top-k) or may repeat (samples).


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

    A row that is not a distribution is none afterwards either. More than V tokens are V tokens, and no tail.
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


# -- how many positions a chunk has, and what a pass over chunks holds in memory ---------------------------
#
# Legend: C positions of a chunk, V real vocabulary.


_STRIDE = 64  # an odd row length makes the logits product a third slower: rows start at multiples of this
_SCRATCH_BYTES = 128 * 2**20  # on a CPU, for student and teacher together
_LEAST_CHUNK, _MOST_CHUNK = 64, 1024  # products of fewer rows waste half the machine; of more gain nothing
_MOST_ON_DEVICE = 2048  # each chunk adds to the whole weight gradient once more, which is a matter of memory traffic
_FREE_SHARE = 8  # a pass may take one part in so many of a device's free memory: activations come and go meanwhile
# Blocks [C, V] of four bytes: logits of student and teacher, temporaries of the plain kernel, a half operand.
_LOGITS, TEMPORARIES, _OPERAND = 2, 3, 0.5


def padded(num_tokens: int) -> int:
    """The length of a row of scratch."""
    return math.ceil(num_tokens / _STRIDE) * _STRIDE


def chunk_size(asked: int, num_rows: int, num_tokens: int, width: int, free_bytes: int | None = None) -> int:
    """Positions in a chunk: as asked, or chosen (0).

    On a CPU (no free bytes given) the scratch may take 128 MB, or as much as the weight's FP32 gradient where that is
    more. On a device everything a pass holds (`pass_bytes`) may take an eighth of the free bytes. Chosen chunks are of
    equal size, so that no small one is left over.
    """
    if asked:
        return max(1, min(asked, num_rows))
    if free_bytes is None:
        budget, each, limit = max(_SCRATCH_BYTES, 4 * num_tokens * width), 2 * 4 * num_tokens, _MOST_CHUNK
    else:
        budget, each, limit = free_bytes // _FREE_SHARE, pass_bytes(1, num_tokens), _MOST_ON_DEVICE
    most = min(max(budget // each // _LEAST_CHUNK * _LEAST_CHUNK, _LEAST_CHUNK), limit)
    num_chunks = max(1, math.ceil(num_rows / most))
    return max(1, math.ceil(num_rows / num_chunks))


def pass_bytes(chunk_tokens: int, num_tokens: int) -> int:
    """What a pass on a device holds at most besides inputs, operands cast once, and gradients."""
    return int((_LOGITS + TEMPORARIES + _OPERAND) * 4 * chunk_tokens * padded(num_tokens))


# FP32 blocks [C, V] that inductor's rows keep between their kernels, read from the code it writes for sm_75.
_FUSED_TEMPORARIES = {
    "forward_kl": 0, "reverse_kl": 1, "skew_forward_kl": 1, "skew_reverse_kl": 1, "total_variation": 1, "alpha_beta": 1,
}  # fmt: skip
_MOST_FUSED = 2  # of jsd, and of divergences whose code was not read


def fused_temporaries(divergence: str) -> int:
    """Blocks [C, V] of four bytes that a pass of compiled rows on a GPU holds besides the logits."""
    return _FUSED_TEMPORARIES.get(divergence, _MOST_FUSED)


def choose_chunk(asked: int, hidden: Tensor, num_tokens: int) -> int:
    """The chunk of a pass over hidden states [N, D]. A process chooses once for each device and vocabulary.

    Free memory changes from pass to pass. Sums in chunks of another size differ in their last digits, so what was free
    at the first pass decides for all of them, until `forget_free_memory`.
    """
    free_bytes = None
    if not asked and hidden.device.type == "cuda":
        free_bytes = _free_bytes(hidden.device, num_tokens)
    return chunk_size(asked, int(hidden.shape[0]), num_tokens, int(hidden.shape[-1]), free_bytes)


@functools.cache
def _free_bytes(device: torch.device, num_tokens: int) -> int:
    """What the driver has free, and what torch has reserved of it and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + max(0, unused)


def forget_free_memory() -> None:
    """Choose the chunk again at the next pass, after memory ran out."""
    _free_bytes.cache_clear()


def parts(num_rows: int, size: int) -> list[slice]:
    """Cut rows into slices of `size`; the last may be shorter."""
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


# -- the plain kernel --------------------------------------------------------------------------------------


_BLOCK_ELEMENTS = 1 << 19  # on a CPU: 2 MB of FP32 for each temporary
_MOST_TEMPORARIES = 26  # [rows, V] of four bytes alive at once, in the divergence that has most of them
_LEAST_ELEMENTS = 1 << 20  # on a device: kernels on less take no longer to run than to launch
_KEPT_BYTES = 31 << 20  # glibc learns from blocks up to 32 MB


class PlainKernel:
    """Every divergence and every form of teacher, in any dtype, on any device."""

    name = "plain"

    def run(self, student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
        num_rows, num_tokens = student.raw.shape
        kind = student.raw.device.type
        if kind == "cpu":
            _keep_freed_memory()
            _check_inside(rows.targets, teacher, num_tokens)
        for part in parts(num_rows, rows_at_once(num_rows, num_tokens, kind)):
            _run_block(student.rows(part), _teacher_rows(teacher, part), rows.rows(part), plan)


def rows_at_once(num_rows: int, num_tokens: int, device_type: str) -> int:
    """Rows of a block. On a CPU its temporaries stay near the cache; on a device all of them fit `TEMPORARIES` chunks.

    A device's block has a million entries at least, even where the chunk is smaller than that.
    """
    if device_type == "cpu":
        return max(1, _BLOCK_ELEMENTS // num_tokens)
    share = num_rows * TEMPORARIES // _MOST_TEMPORARIES
    return max(1, share, min(num_rows, _LEAST_ELEMENTS // num_tokens))


def _check_inside(targets: Tensor, teacher: TeacherRows | None, num_tokens: int) -> None:
    """On a CPU reading ids is free. A GPU raises by itself, later and with a poorer message."""
    ids = [targets] if teacher is None or isinstance(teacher, Logits) else [targets, teacher.ids]
    for tensor in ids:
        numbers = tensor.numpy()
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < num_tokens:
            raise outside_vocabulary(num_tokens)


def outside_vocabulary(num_tokens: int) -> DataError:
    return DataError(
        f"a label or an id of the teacher lies outside the vocabulary of {num_tokens:,} tokens",
        where="labels, teacher.ids",
        advice=["data, teacher and student must have one tokenizer", "vocab_size may be too small"],
    )


@functools.cache
def _keep_freed_memory() -> None:
    """Free one large block, once: glibc then keeps freed memory of that size instead of returning it to the system.

    Otherwise every block of rows faults its temporaries in again, page by page, which takes longer than the arithmetic.
    """
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)


def _teacher_rows(teacher: TeacherRows | None, part: slice) -> TeacherRows | None:
    if teacher is None:
        return None
    return teacher.rows(part) if isinstance(teacher, Logits) else select_rows(teacher, part)


def _run_block(student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan) -> None:
    logits, own, gradient, ce_weights = fill_values(student, teacher, rows, plan)
    if plan.wants_student:
        column = ce_weights[:, None]
        out = student.raw if _is_bare(student) else own.probs
        if gradient is None:
            torch.mul(own.probs, column, out=out)
        else:
            torch.addcmul(gradient, own.probs, column, out=out)
        out.scatter_add_(-1, rows.targets[:, None], -column)
        leave_gradient(student, logits, out)


def fill_values(
    student: Logits, teacher: TeacherRows | None, rows: RowRecord, plan: RowPlan
) -> tuple[Tensor, Softmax, Tensor | None, Tensor]:
    """Fill the values of a block's rows, and the teacher's gradient where wanted.

    Return what the student's gradient is made of: its logits, their softmax at T = 1, the weighted gradient of kd
    (None without kd), and what the cross-entropy of each row weighs.
    """
    logits = finish(student)
    if rows.clamped is not None and student.clamp is not None:
        rows.clamped.copy_((logits.abs() >= student.clamp).sum(-1))
    own = Softmax.of_logits(logits)
    rows.ce.copy_(own.log_norm - own.scores.gather(-1, rows.targets[:, None]).squeeze(-1))
    if teacher is None or plan.divergence is None:
        return logits, own, None, rows.ce_weights
    kd, gradient, is_bad = _kd_rows(logits, own, teacher, rows, plan)
    zeros = torch.zeros_like(kd)
    rows.kd.copy_(torch.where(is_bad, zeros, kd))
    rows.is_bad.copy_(is_bad)
    ce_weights = rows.ce_weights + torch.where(is_bad, rows.kd_weights, zeros)
    if gradient is not None:
        gradient.mul_((torch.where(is_bad, zeros, rows.kd_weights) * rows.temperatures)[:, None])
    return logits, own, gradient, ce_weights


def _is_bare(logits: Logits) -> bool:
    """Whether the products are the logits up to a bias, so that the gradient can be written over them directly."""
    return logits.scale == 1.0 and logits.softcap is None and logits.clamp is None


def _kd_rows(logits: Tensor, own: Softmax, teacher: TeacherRows, rows: RowRecord, plan: RowPlan) -> KdRows:
    assert plan.divergence is not None
    if isinstance(teacher, Logits):
        if not plan.top_k:
            return _dense_rows(own, teacher, rows, plan)
        teacher = keep_top_k(finish(teacher), plan.top_k, rows.temperatures)
    if isinstance(teacher, TopKSignal):
        teacher = without_empty_tail(teacher, logits.shape[-1])
        if plan.rest_to_label:
            teacher = give_rest_to_label(teacher, rows.targets)
        return topk_rows(logits, teacher, rows.temperatures, plan.divergence, wants_gradient=plan.wants_student)
    assert isinstance(teacher, SampledSignal)
    return sampled_rows(logits, teacher, rows.temperatures, wants_gradient=plan.wants_student)


def _dense_rows(own: Softmax, teacher_logits: Logits, rows: RowRecord, plan: RowPlan) -> KdRows:
    """`own` is the student's softmax at T = 1. Its scores may be overwritten, its probabilities not."""
    assert plan.divergence is not None
    temperatures = rows.temperatures[:, None]
    finished = finish(teacher_logits)
    teacher = Softmax.of_logits(finished, 1.0 if plan.is_unit_temperature else temperatures)
    is_bad = teacher.log_norm.isnan()
    _make_uniform(teacher, is_bad)
    if plan.label_margin is not None:
        _lead_to_label(teacher, rows, plan.label_margin)
    student = own if plan.is_unit_temperature else own.take_at(temperatures)
    slopes = plan.divergence.evaluate(student, teacher, wants_teacher=plan.wants_teacher)
    gradient = student_gradient(slopes, student) if plan.wants_student else None
    if slopes.teacher is not None:
        teacher_gradient = softmax_pullback(slopes.teacher, teacher.probs)
        kd_weights = torch.where(is_bad, torch.zeros_like(rows.kd_weights), rows.kd_weights) * rows.temperatures
        leave_gradient(teacher_logits, finished, teacher_gradient.mul_(kd_weights[:, None]))
    return slopes.value * rows.temperatures * rows.temperatures, gradient, is_bad


def _lead_to_label(teacher: Softmax, rows: RowRecord, margin: float) -> None:
    """Where the top token is not the label, mix in the label until it leads by the margin, in place.

    p' = (1 - a) p + a [label] with a = (margin + max p - p_label) / (1 + max p - p_label): the corrective teacher of
    minifinetuning (Belcak et al. 2025).
    """
    targets = rows.targets[:, None]
    label, most = teacher.probs.gather(-1, targets), teacher.probs.amax(-1, keepdim=True)
    is_wrong = label < most
    share = torch.where(is_wrong, (margin + most - label) / (1.0 + most - label), torch.zeros_like(label))
    teacher.probs.mul_(1.0 - share).scatter_add_(-1, targets, share)
    led = teacher.probs.gather(-1, targets).log_() + teacher.log_norm[:, None]
    # Where nothing is mixed in, the label keeps its score: it may be that of an impossible token.
    led = torch.where(is_wrong, led, teacher.scores.gather(-1, targets))
    teacher.scores.add_(torch.log1p(-share)).scatter_(-1, targets, led)
    if rows.corrected is not None:
        rows.corrected.copy_(is_wrong.squeeze(-1))


def _make_uniform(softmax: Softmax, mask: Tensor) -> None:
    """Overwrite the masked rows: by index on a CPU, where reading the mask is free, else by a mask over all rows."""
    num_tokens = softmax.probs.shape[-1]
    fillings = ((softmax.scores, 0.0), (softmax.probs, 1.0 / num_tokens), (softmax.log_norm, math.log(num_tokens)))
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = mask.nonzero().squeeze(-1)
        if rows.numel():
            for values, filling in fillings:
                values.index_fill_(0, rows, filling)
    else:
        for values, filling in fillings:
            values.masked_fill_(mask if values.ndim == 1 else mask[:, None], filling)


def finish(logits: Logits) -> Tensor:
    """Bias, scale and cap of the head on a block of bare products."""
    finished = logits.raw
    if logits.bias is not None:
        finished = finished + logits.bias
    if logits.scale != 1.0:
        finished = finished * logits.scale
    if logits.softcap is not None:
        finished = softcap(finished, logits.softcap)
    return finished if logits.clamp is None else finished.clamp(-logits.clamp, logits.clamp)


def leave_gradient(logits: Logits, finished: Tensor, gradient: Tensor) -> None:
    """Overwrite the bare products with the gradient with respect to them. A bad row's slope may be NaN: `where`."""
    if logits.clamp is not None:
        gradient = torch.where(finished.abs() < logits.clamp, gradient, torch.zeros_like(gradient))
    if logits.softcap is not None:
        slope = softcap_slope(finished, logits.softcap)
        gradient = torch.where(gradient == 0, gradient, gradient * slope)
    if logits.scale != 1.0:
        gradient = gradient * logits.scale
    if gradient is not logits.raw:
        logits.raw.copy_(gradient)
