"""A recorded step with the kernels of the design in the place of what was recorded: one for rows, one for AdamW.

The recorder runs PyTorch on tensors without values, where a Triton kernel cannot run: its bytes an element come from
`kernel_bytes.json`, where they were counted on the PTX of a T4, or from the design where that file is not there.
Products are those that were recorded. What is replaced:

- rows: everything that is as large as a chunk of logits [C, V] becomes one kernel a chunk;
- what multiplied or added to the weight's gradient [V, D] afterwards: the products accumulate by themselves (addmm),
  and the loss scale is a weight of the rows;
- the optimizer: one pass for the norm of the gradients, one that unscales, clips, updates and writes the half copy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recorder import Kernel

from stillroom.precision.gpus import Kernels

# (read, written) bytes for each element of a chunk, by form and divergence, as designed.
DESIGNED = {
    "one pass": {"forward_kl": (8.0, 2.0), "jsd": (8.0, 2.0), "reverse_kl": (8.0, 2.0)},
    "passes": {"forward_kl": (16.0, 2.0), "jsd": (24.0, 2.0), "reverse_kl": (24.0, 2.0), "top-k": (8.0, 2.0)},
}
_COUNTED = Path(__file__).with_name("kernel_bytes.json")
_SMALL = 4 << 20  # bytes: sums of a row's values and the like stay as they were recorded
HEAD, OPTIMIZER = "head", "optimizer"


def row_bytes() -> tuple[dict[str, dict[str, tuple[float, float]]], str]:
    """Bytes an element, and where they are from."""
    if not _COUNTED.exists():
        return DESIGNED, "as designed; they were not counted"
    found: dict[str, dict[str, tuple[float, float]]] = {form: {} for form in DESIGNED}
    for name, forms in json.loads(_COUNTED.read_text())["head"].items():
        for form, counted in forms.items():
            # What is read again by each warp comes from a cache, and is left out: weights of rows, sums of blocks.
            found[form][name] = (float(counted["read"]), float(counted["written"]))
    return found, f"counted on the PTX of sm_75, {_COUNTED.name}"


def with_row_kernel(
    kernels: Sequence[Kernel], pair: tuple[float, float], *, vocabulary: int, is_sparse: bool = False
) -> list[Kernel]:
    """`is_sparse`: stored answers, so the teacher's logits are not computed."""
    out: list[Kernel] = []
    is_teachers_turn = True
    for kernel in kernels:
        if kernel.phase not in (HEAD, "head rows"):
            out.append(kernel)
        elif kernel.is_product:
            makes_logits = kernel.shape[-1:] == (vocabulary,)
            if makes_logits and is_sparse and not is_teachers_turn:
                is_teachers_turn = True
                continue
            out.append(replace(kernel, phase=HEAD))
            if makes_logits and (not is_teachers_turn or is_sparse):  # the second one of a chunk: rows follow
                elements = kernel.shape[0] * vocabulary
                out.append(
                    Kernel("row kernel", HEAD, 0, "float32", int(pair[0] * elements), int(pair[1] * elements), 2,
                           kernel.shape)
                )  # fmt: skip
            if makes_logits:
                is_teachers_turn = not is_teachers_turn
        elif _is_cast_of_weight(kernel, vocabulary) or kernel.bytes_read + kernel.bytes_written < _SMALL:
            out.append(replace(kernel, phase=HEAD))
    return out


def _is_cast_of_weight(kernel: Kernel, vocabulary: int) -> bool:
    """FP32 weights are cast to half once a step; the mean of their rows is taken some steps apart and not counted."""
    return kernel.name == "_to_copy" and len(kernel.shape) == 2 and kernel.shape[0] == vocabulary


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
