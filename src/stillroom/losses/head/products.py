"""The matrix products of a head, a chunk of positions at a time, into scratch that is used again.

Logits and gradients have the work dtype: FP32, or FP64 for FP64 inputs. Which dtype the operands have is decided in
`multiply.py`.

Legend: N positions, C positions of a chunk, V real vocabulary (the weight may have padding rows after it), D width.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stillroom.core.types import HeadWeights
from stillroom.losses.head.kernel import Bf16Products, bf16_products
from stillroom.losses.head.rows import (
    BIAS,
    MANTISSA_BITS,
    GradientRows,
    HalfRequest,
    Logits,
    finish,
    padded,
    power_of_two,
)

# -- buffers ---------------------------------------------------------------------------------------
# A pool of large CPU buffers for the head: a buffer returns to it when the last tensor that uses it is gone.
#
# Freed, a block of this size goes back to the system, and the next pass faults it in again page by page, each cleared
# first. For a chunk of logits that took longer than the compiled rows, and the weight's gradient is as large. On a
# GPU torch's caching allocator is used.


_LEAST_KEPT_BYTES = 1 << 20  # smaller ones are kept by the allocator itself
_MOST_KEPT = 5  # of one pass: two chunks of logits, the weight's gradient, FP32 copies of two half-precision weights


class BufferPool:
    """Unused blocks. Several threads may borrow; no block is lent twice at a time."""

    def __init__(self, least_kept_bytes: int = _LEAST_KEPT_BYTES) -> None:
        self._least_kept_bytes = least_kept_bytes
        self._blocks: list[np.ndarray] = []
        # Reentrant: garbage collection may run inside `_take` and call `_put` in the same thread.
        self._lock = threading.RLock()

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor. Its memory comes back to the pool when its last view is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or num_bytes < self._least_kept_bytes:
            return torch.empty(shape, dtype=dtype, device=device)
        block = self._take(num_bytes)
        lent = block[:num_bytes]  # a separate object: torch holds it for as long as it holds the memory
        weakref.finalize(lent, self._put, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the unused blocks."""
        return sum(block.size for block in self._blocks)

    def clear(self) -> None:
        """Free the unused blocks."""
        with self._lock:
            self._blocks = []

    def _take(self, num_bytes: int) -> np.ndarray:
        """The smallest block that is large enough, or a new one."""
        with self._lock:
            fitting = [block for block in self._blocks if block.size >= num_bytes]
            if fitting:
                chosen = min(fitting, key=lambda block: block.size)
                self._blocks = [block for block in self._blocks if block is not chosen]
                return chosen
        return torch.empty(num_bytes, dtype=torch.uint8).numpy()  # torch's own memory, for its alignment

    def _put(self, block: np.ndarray) -> None:
        """Keep the largest few blocks: small ones are cheap to allocate."""
        with self._lock:
            self._blocks = sorted([*self._blocks, block], key=lambda block: block.size)[-_MOST_KEPT:]


POOL = BufferPool()


# -- multiply --------------------------------------------------------------------------------------
# How the four products of a head are multiplied: in the work dtype throughout, or from half operands into FP32.
#
# A tensor core multiplies half operands and adds them up in FP32. Keep that sum: rounded to half, a logit of 100 is
# off by 0.03, and near convergence student and teacher differ by no more. So no product here has a half result. A CPU
# emulates FP16 products slowly: there everything is cast to the work dtype. One with BF16 units has a kernel of ours
# (native/products.cpp), because torch's BF16 product has a BF16 result.
#
# The gradient of the logits is made in FP32 and has to be cast for its two products. FP16 holds magnitudes from 6e-8
# to 65,504 and a row of gradients falls below that, so each row is multiplied by a power of two that takes its
# largest entry to 2^14, and the product is multiplied back in FP32. Powers of two change no digit. BF16 has the
# exponents of FP32 and needs none of this.
#
#   hidden gradient = G W. A row of G has its own power s, and so has that row of the result: divide it by s. A row of G
#   sums to 0, or nearly so, and its rounded entries do not. Whatever all rows of W have in common is multiplied by that
#     sum: where the logits lie around -100, it is ten times the rest of the error. So the sum that rounding changed is
#     multiplied by the mean of W's rows and put back.
#   weight gradient = G^T H. Rows are what is summed over, so all products G_i H_i need the same power: a row of H gets
#   2^k / s, with the largest k of the chunk that fits every row, and the result is divided by 2^k. H loses digits only
#     in rows whose product is less than 2^-15 of the chunk's largest.
#
# Nothing here reads a value from the device: powers are made of exponent bits.
#
# Legend: C positions of a chunk, V vocabulary, D width.


HALVES = (torch.float16, torch.bfloat16)
_TOP = 14  # exponent of the largest entry of a row after scaling: below 2^15, and FP16 ends at 65,504
_MOST_LIFT = 80  # a row whose largest entry is below 2^-66 is not lifted to the top: its power would leave FP32
_LEAST_HIDDEN = -24  # exponent of the smallest FP16 number
_SHARE_TOKENS = 8192  # rows of the weight's gradient that a later chunk adds to at once: bounds what it needs for that


class Multiplier(Protocol):
    """The products of one head. Operands are made by `operand` and `gradient`; results have the work dtype."""

    half: torch.dtype | None  # of the operands; None: they have the work dtype

    def operand(self, tensor: Tensor) -> Tensor:
        """Hidden states or a weight as the products read them."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        """hidden @ weight.T into `out` [C, V]."""
        ...

    def gradient(self, gradient: Tensor) -> GradientRows:
        """The gradient of a chunk's logits [C, V] as the next two products read it, until the next call."""
        ...

    def to_hidden(self, gradient: GradientRows, weight: Tensor, out: Tensor) -> None:
        """gradient @ weight into `out` [C, D]."""
        ...

    def to_weight(self, gradient: GradientRows, hidden: Tensor, out: Tensor, *, adds: bool) -> None:
        """gradient.T @ hidden into `out` [V, D], or on top of what is there."""
        ...


def choose_multiplier(hidden: Tensor, head: HeadWeights, work_dtype: torch.dtype) -> Multiplier:
    """Half operands where the device is fast with them and the inputs are half, or the head's products are to be so."""
    half = half_operands(hidden, head)
    if half is None or work_dtype != torch.float32:
        return WideMultiplier(work_dtype)
    if multiplies_half(hidden.device):
        return HalfMultiplier(half)
    is_large = head.num_real * hidden.shape[1] >= LEAST_BF16_WEIGHTS
    made = bf16_products() if half == torch.bfloat16 and hidden.device.type == "cpu" and is_large else None
    return WideMultiplier(work_dtype) if made is None else SplitMultiplier(made)


def half_operands(hidden: Tensor, head: HeadWeights) -> torch.dtype | None:
    """The half dtype that the operands have already, or that a mixed mode asks for; None: FP32 operands."""
    if head.product_dtype is not None:
        return head.product_dtype
    is_half = hidden.dtype in HALVES and hidden.dtype == head.weight.dtype
    return hidden.dtype if is_half else None


def multiplies_half(device: torch.device) -> bool:
    """Whether torch's half products are worth having: a CPU emulates FP16, 3 to 28 times slower than FP32."""
    return device.type == "cuda"


# Weights of a head from which on a CPU multiplies it in BF16. Below, products take less time than what surrounds them,
# and what a small model computes is the same on every machine.
LEAST_BF16_WEIGHTS = 1 << 22
# BF16 parts of an FP32 operand of the logits. Rounded to one part, an update of the weight is not seen before it adds
# up to a 256th of its value, and the error of the logits is as large as what student and teacher differ in near
# convergence (benchmarks/quality/bench_bf16_cpu.py). Gradients are not differences of large numbers: they have one.
PARTS = 2


def logits_from_bf16(hidden: Tensor, head: HeadWeights) -> Tensor | None:
    """Logits [N, V] in FP32 of a BF16 head on a CPU that multiplies it as it is; None: cast both to FP32."""
    if head.is_identity or head.weight.dtype != torch.bfloat16:
        return None
    multiplier = choose_multiplier(hidden, head, torch.float32)
    if not isinstance(multiplier, SplitMultiplier):
        return None
    raw = POOL.borrow((len(hidden), head.num_real), torch.float32, hidden.device)
    if len(hidden):
        multiplier.logits(multiplier.operand(hidden), multiplier.operand(head.weight[: head.num_real]), out=raw)
    bias = None if head.bias is None else head.bias[: head.num_real].float()
    return finish(Logits(raw, bias, head.scale, head.softcap))


class WideMultiplier:
    """Operands and results in the work dtype: FP32, or FP64 for FP64 inputs."""

    half: torch.dtype | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def operand(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == self._dtype:
            return tensor
        return POOL.borrow(tuple(tensor.shape), self._dtype, tensor.device).copy_(tensor)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(hidden, weight.t(), out=out)

    def gradient(self, gradient: Tensor) -> GradientRows:
        return GradientRows(gradient)

    def to_hidden(self, gradient: GradientRows, weight: Tensor, out: Tensor) -> None:
        torch.mm(gradient.values, weight, out=out)

    def to_weight(self, gradient: GradientRows, hidden: Tensor, out: Tensor, *, adds: bool) -> None:
        if adds:
            out.addmm_(gradient.values.t(), hidden)
        else:
            torch.mm(gradient.values.t(), hidden, out=out)


class HalfMultiplier:
    """FP16 or BF16 operands, FP32 results. See the module's docstring for the range of the gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.half: torch.dtype | None = dtype
        self._dtype = dtype
        self._rows: Tensor | None = None  # [C, V], the gradient as an operand
        self._share: Tensor | None = None  # [tokens, D], what a chunk adds to some rows of the weight's gradient
        self._mean: Tensor | None = None  # [D], of the weight's rows

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype)

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        _multiply(hidden, weight.t(), out)

    def gradient(self, gradient: Tensor) -> GradientRows:
        num_rows, num_tokens = gradient.shape
        if self._rows is None:  # rows start where those of the gradient do; the first chunk is the largest
            full = torch.empty(num_rows, gradient.stride(0), dtype=self._dtype, device=gradient.device)
            self._rows = full[:, :num_tokens]
        rows = self._rows[:num_rows]
        total = gradient.sum(-1)
        lifts = None
        if self._dtype == torch.float16:
            lifts = lifts_of(gradient)
            power = power_of_two(lifts)
            torch.mul(gradient, power[:, None], out=rows)
            total *= power
        else:
            rows.copy_(gradient)
        return GradientRows(rows, lifts, total.sub_(rows.sum(-1, dtype=torch.float32)))

    def to_hidden(self, gradient: GradientRows, weight: Tensor, out: Tensor) -> None:
        _multiply(gradient.values, weight, out)
        if self._mean is None:
            self._mean = weight.mean(0, dtype=torch.float32)
        if gradient.lost is not None:
            out.addr_(gradient.lost, self._mean)
        if gradient.lifts is not None:
            out.mul_(power_of_two(-gradient.lifts)[:, None])
        elif gradient.lift:
            out.mul_(2.0**-gradient.lift)

    def to_weight(self, gradient: GradientRows, hidden: Tensor, out: Tensor, *, adds: bool) -> None:
        if gradient.lifts is None and _has_wide_sums(hidden.device, self._dtype):
            # One power for all rows is cuBLAS's alpha, the sum over chunks its beta: [V, D] is written once a chunk.
            values, scale = gradient.values.t(), 2.0**-gradient.lift
            torch.addmm(out, values, hidden, out_dtype=torch.float32, beta=int(adds), alpha=scale, out=out)
            return
        power: Tensor | float | None = 2.0**-gradient.lift if gradient.lift else None
        if gradient.lifts is not None:
            hidden, power = _balanced(hidden, gradient.lifts)
        if not adds:
            _multiply(gradient.values.t(), hidden, out)
            if power is not None:
                out.mul_(power)
            return
        for start in range(0, out.shape[0], _SHARE_TOKENS):
            self._add_share(gradient.values[:, start : start + _SHARE_TOKENS], hidden, power, out[start:])

    def _add_share(self, values: Tensor, hidden: Tensor, power: Tensor | float | None, out: Tensor) -> None:
        """Add values.T @ hidden * power to the first rows of `out`."""
        num_tokens = values.shape[1]
        if self._share is None:
            self._share = torch.empty(num_tokens, out.shape[1], dtype=out.dtype, device=out.device)
        share = self._share[:num_tokens]
        _multiply(values.t(), hidden, share)
        if isinstance(power, Tensor):
            out[:num_tokens].addcmul_(share, power)
        else:
            out[:num_tokens].add_(share, alpha=1.0 if power is None else power)


class SplitMultiplier:
    """BF16 parts of FP32 or BF16 operands, FP32 results, on a CPU with BF16 units. No operand is copied."""

    half: torch.dtype | None = None  # the row kernels leave the gradient in FP32

    def __init__(self, products: Bf16Products) -> None:
        self._products = products

    def operand(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        self._products.logits(hidden, weight, out, parts=PARTS)

    def gradient(self, gradient: Tensor) -> GradientRows:
        return GradientRows(gradient)

    def to_hidden(self, gradient: GradientRows, weight: Tensor, out: Tensor) -> None:
        self._products.to_hidden(gradient.values, weight, out)

    def to_weight(self, gradient: GradientRows, hidden: Tensor, out: Tensor, *, adds: bool) -> None:
        self._products.to_weight(gradient.values, hidden, out, adds=adds)


def _balanced(hidden: Tensor, lifts: Tensor) -> tuple[Tensor, Tensor]:
    """FP16 rows [C, D] times 2^(k - lift) with one k for all of them, and 2^-k. k is the largest that overflows no row.

    A row that is not finite takes k with it. It makes the weight's gradient non-finite by itself.
    """
    wide = hidden.float()
    sizes = _exponents(wide).clamp_min_(_LEAST_HIDDEN)
    common = (_TOP - sizes + lifts).amin()
    scaled = wide.mul_(power_of_two(common - lifts)[:, None])
    return scaled.to(hidden.dtype), power_of_two(-common)


def lifts_of(rows: Tensor) -> Tensor:
    """Exponents that take the largest magnitude of each FP32 row [C, ...] to 2^14. [C], int32."""
    return (_TOP - _exponents(rows)).clamp_(1 - BIAS, _MOST_LIFT)


def _exponents(rows: Tensor) -> Tensor:
    """floor(log2) of the largest magnitude in each FP32 row. [C], int32; -127 for zeros, 128 for NaN and inf."""
    low, high = torch.aminmax(rows, dim=-1)
    bits = torch.maximum(-low, high).view(torch.int32)
    return (bits >> MANTISSA_BITS).bitwise_and_(0xFF).sub_(BIAS)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Half operands, FP32 sums and an FP32 result."""
    if _has_wide_results(left.device, left.dtype):
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:  # the same products of the same values, by FP32 arithmetic
        torch.mm(left.float(), right.float(), out=out)


@functools.cache
def _has_wide_results(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has the product with an FP32 result for this dtype, tried once."""
    return _multiplies(lambda small, wide: torch.mm(small, small, out_dtype=torch.float32), device, dtype)


@functools.cache
def _has_wide_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device adds such a product to an FP32 matrix in place, tried once: early versions refused to."""
    return _multiplies(
        lambda small, wide: torch.addmm(wide, small, small, out_dtype=torch.float32, alpha=0.5, out=wide), device, dtype
    )


def _multiplies(product: Callable[[Tensor, Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of [16, 16] ones, and an FP32 matrix of ones to add to, is done."""
    if device.type != "cuda":
        return False
    small = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        product(small, torch.ones(16, 16, device=device))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # not for this dtype on this GPU; torch before 2.8 does not know the argument
        return False
    return True


def product_note(device: torch.device, dtype: torch.dtype) -> str:
    """What a user should know of the head's products of half operands on a device; empty where all is well."""
    if not multiplies_half(device) or _has_wide_results(device, dtype):
        return ""
    return (
        f"the head multiplies in FP32, several times slower than from half operands: torch {torch.__version__} has no "
        f"product of {str(dtype).removeprefix('torch.')} with an FP32 result on this GPU; torch 2.8 and later have it"
    )


@dataclass(frozen=True)
class Wanted:
    """Which inputs of a head get a gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


_NOTHING = Wanted()


def products_of(
    hidden: Tensor,
    head: HeadWeights,
    dtype: torch.dtype,
    chunk_tokens: int,
    wanted: Wanted = _NOTHING,
    heaviest: tuple[float, float, float] | None = None,
) -> Products | GivenLogits:
    """The products of a head, or the model's own logits where it gave those. `heaviest`: see `HalfRequest`."""
    if head.is_identity:
        return GivenLogits(hidden, head, dtype, chunk_tokens, wanted)
    return Products(hidden, head, dtype, chunk_tokens, wanted, heaviest)


class Products:
    """Logits of one head and, where wanted, the gradients of its inputs, accumulated over chunks."""

    def __init__(
        self,
        hidden: Tensor,
        head: HeadWeights,
        dtype: torch.dtype,
        chunk_tokens: int,
        wanted: Wanted = _NOTHING,
        heaviest: tuple[float, float, float] | None = None,
    ) -> None:
        self._head, self._num_real = head, head.num_real
        self._multiplier = choose_multiplier(hidden, head, dtype)
        self._hidden = self._multiplier.operand(hidden)  # [N, D]
        self._weight = self._multiplier.operand(head.weight[: self._num_real])  # [V, D]
        self._bias = None if head.bias is None else head.bias[: self._num_real].to(dtype)
        self._scratch = POOL.borrow((chunk_tokens, padded(self._num_real)), dtype, hidden.device)
        self.hidden_gradient = torch.empty_like(hidden, dtype=dtype) if wanted.hidden else None
        self.weight_gradient = _rows_like(head.weight, self._num_real, dtype) if wanted.weight else None
        self.bias_gradient = None
        if wanted.bias and head.bias is not None:
            self.bias_gradient = torch.zeros_like(head.bias, dtype=dtype)
        self._is_first = True
        half = self._multiplier.half
        is_half = half is not None and self.bias_gradient is None  # the gradient of a bias is summed in FP32
        self._half = HalfRequest(half, heaviest) if is_half and half is not None else None

    def logits(self, part: slice) -> Logits:
        """Bare products of a chunk, in scratch that the next chunk overwrites."""
        raw = self._rows(part)
        self._multiplier.logits(self._hidden[part], self._weight, out=raw)
        return Logits(raw, self._bias, self._head.scale, self._head.softcap, self._head.clamp, self._half)

    def pull_back(self, part: slice, gradient: GradientRows | None = None) -> None:
        """Take the gradient that a kernel left in the scratch to hidden states, weight and bias."""
        if self.bias_gradient is not None:
            self.bias_gradient[: self._num_real] += self._rows(part).sum(0)
        if self.hidden_gradient is not None or self.weight_gradient is not None:
            gradient = gradient or self._multiplier.gradient(self._rows(part))
            if self.hidden_gradient is not None:
                self._multiplier.to_hidden(gradient, self._weight, out=self.hidden_gradient[part])
            if self.weight_gradient is not None:
                real = self.weight_gradient[: self._num_real]
                self._multiplier.to_weight(gradient, self._hidden[part], out=real, adds=not self._is_first)
        self._is_first = False

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias; zero where no chunk came by."""
        if self._is_first:
            for gradient in (self.hidden_gradient, self.weight_gradient):
                if gradient is not None:
                    gradient.zero_()
        return self.hidden_gradient, self.weight_gradient, self.bias_gradient

    def _rows(self, part: slice) -> Tensor:
        return self._scratch[: part.stop - part.start, : self._num_real]


class GivenLogits:
    """The same for a model that answers with its own logits. They are copied, because kernels overwrite their input."""

    def __init__(
        self, logits: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int, wanted: Wanted = _NOTHING
    ) -> None:
        self._logits, self._head = logits, head
        self._num_real = head.num_real
        self._scratch = POOL.borrow((chunk_tokens, self._num_real), dtype, logits.device)
        self.hidden_gradient = torch.zeros_like(logits, dtype=dtype) if wanted.hidden else None

    def logits(self, part: slice) -> Logits:
        raw = self._scratch[: part.stop - part.start]
        raw.copy_(self._logits[part, : self._num_real])
        return Logits(raw, clamp=self._head.clamp)

    def pull_back(self, part: slice, gradient: GradientRows | None = None) -> None:
        if self.hidden_gradient is not None:
            self.hidden_gradient[part, : self._num_real] = self._scratch[: part.stop - part.start]

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden_gradient, None, None


def _rows_like(weight: Tensor, num_real: int, dtype: torch.dtype) -> Tensor:
    """Room for a gradient: padding rows are 0, the others are written by the first chunk."""
    gradient = POOL.borrow(tuple(weight.shape), dtype, weight.device)
    gradient[num_real:].zero_()
    return gradient
