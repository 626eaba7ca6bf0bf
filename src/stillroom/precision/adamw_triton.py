"""AdamW over many tensors in one launch: unscale, clip, update and write the FP16 copy.

torch's fused AdamW needs the gradients unscaled in a pass before it and the FP16 copies written in a pass after it.
Here a parameter's gradient, weight and moments are read once and written once: 28 bytes a parameter, with FP32 weights
(16 read, 12 written) and with FP16 weights and FP32 masters (14 and 14).

It serves `Direct`, `Gathered` and `Master` storage with FP32 moments on CUDA devices. Everything else keeps torch's
update. Import this where Triton is installed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stillroom.core.launch import Launch

_BLOCK, _ROUNDS, _WARPS = 1024, 8, 8  # four neighbours a thread; a block updates _ROUNDS * _BLOCK numbers
_ALIGNED = 16  # bytes, of every tensor: accesses are of that width


@triton.jit
def _one_minus_power(log_base, count):
    """1 - base^count, with all digits where that is small: the corrections of the first updates."""
    y = -log_base * count
    series = y * (1.0 - y * (0.5 - y * (1.0 / 6 - y * (1.0 / 24 - y * (1.0 / 120)))))
    return tl.where(y < 0.1, series, 1.0 - tl.exp(-y))


@triton.jit
def _update(
    weight, gradient, first, second, half, at, left, factor, decay, step, root, beta1, beta2, epsilon,
    HAS_HALF: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        g = tl.load(gradient + at, mask=at < left, other=0.0).to(tl.float32) * factor
        w = tl.load(weight + at, mask=at < left, other=0.0)
        m = tl.load(first + at, mask=at < left, other=0.0)
        v = tl.load(second + at, mask=at < left, other=0.0)
    else:
        g = tl.load(gradient + at).to(tl.float32) * factor
        w = tl.load(weight + at)
        m = tl.load(first + at)
        v = tl.load(second + at)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w - decay * w
    w = w - step * m / (tl.sqrt_rn(v) * root + epsilon)
    if MASKED:
        tl.store(weight + at, w, mask=at < left)
        tl.store(first + at, m, mask=at < left)
        tl.store(second + at, v, mask=at < left)
        if HAS_HALF:
            tl.store(half + at, w.to(tl.float16), mask=at < left)
    else:
        tl.store(weight + at, w)
        tl.store(first + at, m)
        tl.store(second + at, v)
        if HAS_HALF:
            tl.store(half + at, w.to(tl.float16))


@triton.jit
def _adamw(
    addresses, sizes, blocks, factor, rate, decay, beta1, beta2, log_beta1, log_beta2, epsilon,
    HAS_HALF: tl.constexpr, HALF_GRADIENT: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """`addresses` [tensors, 6]: weight, gradient, both moments, FP16 copy, count of updates, this one included.

    `sizes` [tensors]; `blocks` [blocks, 2]: the tensor of a block, and the number of its first round.
    """
    block = tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * BLOCK
    row = addresses + 6 * tensor
    wide = tl.pointer_type(tl.float32)
    narrow = tl.pointer_type(tl.float16)
    weight = tl.multiple_of(tl.load(row).to(wide), 16)
    if HALF_GRADIENT:
        gradient = tl.multiple_of(tl.load(row + 1).to(narrow), 16)
    else:
        gradient = tl.multiple_of(tl.load(row + 1).to(wide), 16)
    first = tl.multiple_of(tl.load(row + 2).to(wide), 16)
    second = tl.multiple_of(tl.load(row + 3).to(wide), 16)
    half = tl.multiple_of(tl.load(row + 4).to(narrow), 16)
    count = tl.load(tl.load(row + 5).to(wide))
    step = rate / _one_minus_power(log_beta1, count)
    root = 1.0 / tl.sqrt_rn(_one_minus_power(log_beta2, count))
    left = tl.load(sizes + tensor) - start
    weight += start
    gradient += start
    first += start
    second += start
    half += start
    lanes = tl.arange(0, BLOCK)
    for turn in range(0, ROUNDS):
        at = turn * BLOCK + lanes
        if left >= (turn + 1) * BLOCK:
            _update(weight, gradient, first, second, half, at, left, factor, decay, step, root, beta1, beta2, epsilon,
                    HAS_HALF, False)  # fmt: skip
        elif left > turn * BLOCK:
            _update(weight, gradient, first, second, half, at, left, factor, decay, step, root, beta1, beta2, epsilon,
                    HAS_HALF, True)  # fmt: skip


# -- launching ---------------------------------------------------------------------------------------------


def serves(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], moments: Sequence[Tensor], halves: Sequence[Tensor]
) -> bool:
    """Whether a bucket is of the kinds above: one dtype of gradients, everything dense and aligned."""
    dtypes = {one.dtype for one in gradients}
    is_wide = all(one.dtype == torch.float32 for one in (*weights, *moments))
    is_half = all(one.dtype == torch.float16 for one in halves)
    held = (*weights, *gradients, *moments, *halves)
    is_dense = all(one.is_contiguous() and one.data_ptr() % _ALIGNED == 0 for one in held)
    return is_wide and is_half and is_dense and len(dtypes) == 1 and dtypes <= {torch.float32, torch.float16}


def prepare(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    halves: Sequence[Tensor],
    counts: Sequence[Tensor],
    *,
    factor: float,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> Launch:
    """The launch for a bucket. `halves` is empty where weights have no FP16 copy; `counts` include this update."""
    device = weights[0].device
    held = [list(one) for one in zip(weights, gradients, firsts, seconds, halves or weights, counts, strict=True)]
    addresses = tuple(one.data_ptr() for row in held for one in row)
    sizes = tuple(one.numel() for one in weights)
    arguments = {
        "addresses": _numbers(addresses, torch.int64, device), "sizes": _numbers(sizes, torch.int64, device),
        "blocks": _numbers(_blocks(sizes), torch.int32, device), "factor": float(factor), "rate": float(rate),
        "decay": float(rate * decay), "beta1": betas[0], "beta2": betas[1], "log_beta1": _log(betas[0]),
        "log_beta2": _log(betas[1]), "epsilon": float(epsilon),
    }  # fmt: skip
    constants = {"HAS_HALF": bool(halves), "HALF_GRADIENT": gradients[0].dtype == torch.float16, "BLOCK": _BLOCK,
                 "ROUNDS": _ROUNDS}  # fmt: skip
    grid = len(_blocks(sizes)) // 2
    return Launch(_adamw, arguments, constants, grid, {"num_warps": _WARPS}, {"addresses": held})


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4  # base 0: every correction is 1


@functools.lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Tensor and first round of each block, end to end."""
    each = _BLOCK * _ROUNDS
    return tuple(
        number
        for tensor, size in enumerate(sizes)
        for start in range(0, size, each)
        for number in (tensor, start // _BLOCK)
    )


@functools.lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device; kept, because a bucket has the same tensors at the next step, mostly at the same addresses."""
    return torch.tensor(numbers, dtype=dtype).to(device)


# -- the referee -------------------------------------------------------------------------------------------


def agrees(device: torch.device, reference: Any) -> bool:
    """Whether the kernel does on a device what `reference`, torch's update of lists of tensors, does."""
    answers = []
    for is_ours in (True, False):
        generator = torch.Generator().manual_seed(0)
        weights, gradients, firsts = (
            [torch.randn(size, generator=generator).to(device) for size in (5000, 20_003, 1)] for _ in range(3)
        )
        seconds = [one.square() for one in firsts]
        halves = [one.half() for one in weights]
        counts = [torch.full((), 3.0, device=device) for _ in weights]
        given: dict[str, Any] = {"rate": 1e-3, "decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
        if is_ours:
            prepare(weights, gradients, firsts, seconds, halves, counts, factor=0.25, **given).start()
        else:
            torch._foreach_mul_(gradients, 0.25)
            reference(weights, gradients, firsts, seconds, [one - 1 for one in counts], **given)
            torch._foreach_copy_(halves, weights)
        answers.append(torch.cat([*weights, *firsts, *seconds, *[one.float() for one in halves]]).cpu())
    return torch.allclose(answers[0], answers[1], rtol=1e-3, atol=1e-6) and torch.allclose(
        answers[0][:25_004], answers[1][:25_004], rtol=1e-5, atol=1e-7
    )
