"""Kernels that cannot run on tensors without values, by what was counted on their PTX: one for rows, one for AdamW.

The recorder runs the product's own step, its Triton kernel for rows included: where that would start, `noted_rows`
writes it down with its bytes an element from `kernel_bytes.json`. The optimizer is replaced afterwards: one pass for
the norm of the gradients, one that unscales, clips, updates and writes the half copy.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorder import Kernel, Recorder

from stillroom.precision.gpus import Kernels

_COUNTED = Path(__file__).with_name("kernel_bytes.json")
OPTIMIZER = "optimizer"
ROW_KERNEL = "row kernel"
ONE_PASS, PASSES = "one pass", "passes"
_FP16 = 2  # bytes of what is written in the counted cases


@functools.cache
def row_bytes() -> dict[str, dict[str, tuple[float, float]]]:
    """(read, written) bytes for each element of a chunk, by form and divergence.

    What is read again by each warp comes from a cache, and is left out: weights of rows, sums of blocks.
    """
    found: dict[str, dict[str, tuple[float, float]]] = {ONE_PASS: {}, PASSES: {}}
    for name, forms in json.loads(_COUNTED.read_text())["head"].items():
        for form, counted in forms.items():
            found[form][name] = (float(counted["read"]), float(counted["written"]))
    return found


ROW_BYTES_FROM = f"counted on the PTX of sm_75, {_COUNTED.name}"


def noted_rows(launch: Any, recorder: Recorder) -> None:
    """Write down a launch of the row kernel for forward KL."""
    given = launch.arguments
    form = ONE_PASS if "num_parts" in given else PASSES
    recorder.note(ROW_KERNEL, 0, given["out"].dtype, [given["student"], given["teacher"]], [given["out"]], launches=1)
    recorder.kernels[-1] = _with_bytes(recorder.kernels[-1], row_bytes()[form]["forward_kl"])


def _with_bytes(kernel: Kernel, pair: tuple[float, float]) -> Kernel:
    elements = math.prod(kernel.shape)
    width = _FP16 if kernel.dtype in ("float16", "bfloat16") else 4
    return replace(kernel, bytes_read=int(pair[0] * elements), bytes_written=int((pair[1] - _FP16 + width) * elements))


def with_row_kernel(
    kernels: Sequence[Kernel], pair: tuple[float, float], *, vocabulary: int, is_sparse: bool = False
) -> list[Kernel]:
    """The same stream for another divergence. `is_sparse`: stored answers, so no product makes the teacher's logits."""
    out: list[Kernel] = []
    is_teachers_turn = False
    for kernel in kernels:
        if kernel.is_product and kernel.shape[-1:] == (vocabulary,):  # student's and teacher's, by turns
            if not (is_teachers_turn and is_sparse):
                out.append(kernel)
            is_teachers_turn = not is_teachers_turn
        else:
            out.append(_with_bytes(kernel, pair) if kernel.name == ROW_KERNEL else kernel)
    return out


def with_fused_adamw(kernels: Sequence[Kernel], num_trained: int, *, gradient_bytes: int) -> list[Kernel]:
    """28 bytes a parameter in every mode: weight or master 8, moments 16, gradient 4 or 2 with a half copy of 2."""
    rest = [kernel for kernel in kernels if kernel.phase != OPTIMIZER or kernel.waits]
    waits = [kernel for kernel in rest if kernel.phase == OPTIMIZER]
    launches = 1 + num_trained // (320 * 65_536)
    norm = Kernel("norm", OPTIMIZER, 0, "float32", gradient_bytes * num_trained, 4096, launches + 1, ())
    update = Kernel("fused AdamW", OPTIMIZER, 0, "float32", 16 * num_trained, 12 * num_trained, launches, ())
    return [*(kernel for kernel in rest if kernel.phase != OPTIMIZER), norm, *waits, update]


def grouped(kernels: Sequence[Kernel]) -> list[Kernels]:
    """Kernels that are alike, counted: what a prediction is made of."""
    counts: dict[tuple[float, str, float, int], int] = {}
    for kernel in kernels:
        dtype = "half" if kernel.dtype in ("float16", "bfloat16") or not kernel.flops else "fp32"
        key = (kernel.flops, dtype, kernel.bytes_read + kernel.bytes_written, kernel.launches)
        counts[key] = counts.get(key, 0) + 1
    return [Kernels(count, flops, dtype, moved, launches) for (flops, dtype, moved, launches), count in counts.items()]  # type: ignore[arg-type]
