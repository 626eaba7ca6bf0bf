"""Parts of a BF16 step on a CPU in CPU milliseconds: attention of short rows, and a teacher's products in int8.

    OMP_NUM_THREADS=1 python benchmarks/training/cpu_parts.py

Attention: torch's fused kernel against the one of `models/student.py` that keeps the probabilities, with both errors
against float64. Int8: a teacher's product from BF16 rows with a BF16 result, as torch's own operators make it. Rows are
quantised when they come, a scale for each; the product is `torch._int_mm`. Contenders take turns; the least of the
rounds is written. Writes results/cpu_parts.json.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "head"))

import torch
from measure import busy_processes, machine
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stillroom.models import student

RESULT = Path(__file__).with_name("results") / "cpu_parts.json"
ROUNDS, TOKENS = 12, 1024
LAYERS = {"135M": (576, 1536), "360M": (960, 2560)}  # width, and that of the feed-forward


def least(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU milliseconds of each, the least of rounds in which they take turns."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            begin = time.process_time()
            work()
            best[name] = min(best[name], 1e3 * (time.process_time() - begin))
    return best


def attention(length: int, sharpness: float) -> dict[str, Any]:
    torch.manual_seed(0)
    drawn = [torch.randn(TOKENS // length, length, 9, 64) * size for size in (sharpness, sharpness, 1.0, 1.0)]
    halves = [one.bfloat16().transpose(1, 2) for one in drawn]
    ways: dict[str, Callable[..., Tensor]] = {
        "fused": lambda *inputs: scaled_dot_product_attention(*inputs, is_causal=True),
        "probabilities kept": lambda *inputs: student._attend(torch.nn.Module(), *inputs, None)[0].transpose(1, 2),
    }

    def both(attend: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        inputs = [one.to(dtype).detach().requires_grad_() for one in halves[:3]]
        answer = attend(*inputs)
        return [answer.detach(), *torch.autograd.grad(answer, inputs, halves[3].to(dtype))]

    exact = both(ways["fused"], torch.float64)
    errors = {
        name: [float((one - right).norm() / right.norm()) for one, right in zip(both(attend), exact, strict=True)]
        for name, attend in ways.items()
    }
    return {
        "length": length,
        "sharpness": sharpness,
        "forward and backward, ms": least({name: lambda way=way: both(way) for name, way in ways.items()}),
        "errors of output, query, key, value": errors,
    }


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(-1, keepdim=True).float().clamp_min(1e-8) / 127
    return (rows / scale).round_().to(torch.int8), scale


def int8(size: str) -> dict[str, Any]:
    """A layer's seven products of the teacher."""
    width, inner = LAYERS[size]
    total: dict[str, float] = {"bf16": 0.0, "int8": 0.0, "int8, the products alone": 0.0}
    for columns, rows, count in ((width, width, 4), (width, inner, 2), (inner, width, 1)):
        inputs, weight = torch.randn(TOKENS, columns).bfloat16(), torch.randn(rows, columns)
        half, (whole, scale), given = weight.bfloat16(), _quantised(weight), _quantised(inputs)[0]

        def product(inputs: Tensor = inputs, whole: Tensor = whole, scale: Tensor = scale) -> Tensor:
            quantised, own = _quantised(inputs)
            return torch._int_mm(quantised, whole.t()).float().mul_(own).mul_(scale.t()).bfloat16()

        works: dict[str, Callable[[], object]] = {
            "bf16": lambda inputs=inputs, half=half: inputs @ half.t(),
            "int8": product,
            "int8, the products alone": lambda given=given, whole=whole: torch._int_mm(given, whole.t()),
        }
        for name, spent in least(works).items():
            total[name] += count * spent
        exact = inputs.double() @ weight.double().t()
        error = float((product().double() - exact).norm() / exact.norm())
        half_error = float(((inputs @ half.t()).double() - exact).norm() / exact.norm())
    return {"size": size, "a layer's products, ms": total, "error of int8": error, "error of bf16": half_error}


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {
        "benchmark": "parts of a BF16 step on a CPU",
        "date": started,
        "machine": machine(),
        "attention": [attention(length, sharpness) for length in (256, 512) for sharpness in (1.0, 3.0)],
        "int8 teacher": [int8(size) for size in LAYERS],
        "busy_around": busy_processes(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("attention", "int8 teacher")}, indent=1))


if __name__ == "__main__":
    main()
