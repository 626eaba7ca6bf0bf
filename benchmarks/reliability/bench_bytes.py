"""Bytes of training state a parameter costs in each precision policy: measured on living tensors, not computed.

    python benchmarks/reliability/bench_bytes.py

A model of square matrices takes one backward pass and one update; then every tensor that is alive (weights, gradients,
masters or residuals, moments) is found through the garbage collector and its storage counted once.

The bars are those of the matrices. Biases and gains keep FP32 masters in every FP16 policy, which adds thousandths of a
byte a parameter here and is allowed for.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
from typing import Any

from common import write

BARS = {
    ("fp32", "float32"): 16,
    ("fp16-mixed", "float32"): 16,
    ("fp16-master", "float32"): 16,
    ("fp16-split", "float32"): 14,
    ("fp16-sr", "float32"): 12,
    ("fp16-split", "bfloat16"): 10,
    ("fp16-sr", "bfloat16"): 8,
}


def measure(mode: str, moments: str) -> dict[str, Any]:
    import torch
    from torch import nn

    from stillroom.config.schema import PrecisionConfig, TrainConfig
    from stillroom.precision import ParameterGroup, resolve

    layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))
    precision = resolve(mode, config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    optimizer = precision.optimizer([ParameterGroup("student", 1e-3, tuple(layers.named_parameters()))], TrainConfig())
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in layers.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        gc.collect()
        alive = _living_bytes(torch)
        precision.step(optimizer, 1.0, {"student": 1.0})
    count = sum(parameter.numel() for parameter in layers.parameters())
    return {"mode": mode, "moments": moments, "parameters": count, "bytes_per_parameter": alive / count}


def _living_bytes(torch: Any) -> int:
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def main() -> None:
    lines = []
    for (mode, moments), bar in BARS.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            line = pool.apply(measure, (mode, moments))
        line |= {"bar": bar, "passed": line["bytes_per_parameter"] <= bar + 0.1}
        print(json.dumps(line), flush=True)
        lines.append(line)
    write("bytes", {"runs": lines})


if __name__ == "__main__":
    main()
