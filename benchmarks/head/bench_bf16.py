"""Rates of the three products of a head on a CPU: FP32, torch's BF16, and BF16 parts with FP32 results.

    PYTHONPATH=src python benchmarks/head/bench_bf16.py

GFLOP/s in CPU seconds, the best of turns. Those of two parts are useful ones: three products are made for one. torch's
int8 product is there to tell whether an int8 teacher would be faster still.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import busy_processes, machine

from stillroom.losses.head.kernel import bf16_products

RESULTS = Path(__file__).with_name("results")
VOCABULARY, WIDTH, TURNS = 49_152, 576, 5
Work = Callable[[], object]


def _works(chunk: int) -> dict[str, dict[str, Work]]:
    hidden, weight = torch.randn(chunk, WIDTH), torch.randn(VOCABULARY, WIDTH) / 10
    logits, to_hidden, to_weight = torch.randn(chunk, VOCABULARY), torch.empty_like(hidden), torch.empty_like(weight)
    half = hidden.bfloat16(), weight.bfloat16(), logits.bfloat16()
    works: dict[str, dict[str, Work]] = {
        "FP32": {
            "logits": lambda: torch.mm(hidden, weight.t(), out=logits),
            "to hidden": lambda: torch.mm(logits, weight, out=to_hidden),
            "to weight": lambda: torch.mm(logits.t(), hidden, out=to_weight),
        },
        "torch BF16, BF16 results": {
            "logits": lambda: torch.mm(half[0], half[1].t()),
            "to hidden": lambda: torch.mm(half[2], half[1]),
            "to weight": lambda: torch.mm(half[2].t(), half[0]),
        },
        "torch int8, int32 results": {"logits": _int8(hidden, weight)},
    }
    made = bf16_products()
    if made is not None:
        products = made
        works["BF16 operands, FP32 results"] = {"logits": lambda: products.logits(half[0], half[1], logits, parts=1)}
        works["FP32 operands in BF16 parts, FP32 results"] = {
            "logits": lambda: products.logits(hidden, weight, logits, parts=2),
            "logits, one part": lambda: products.logits(hidden, weight, logits, parts=1),
            "to hidden": lambda: products.to_hidden(logits, weight, to_hidden),
            "to weight": lambda: products.to_weight(logits, hidden, to_weight, adds=False),
            "to weight, added": lambda: products.to_weight(logits, hidden, to_weight, adds=True),
        }
    return works


def _int8(hidden: torch.Tensor, weight: torch.Tensor) -> Work:
    left, right = (tensor.mul(20).round().clamp(-127, 127).to(torch.int8) for tensor in (hidden, weight))
    return lambda: torch._int_mm(left, right.t())


def main() -> None:
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result: dict[str, Any] = {"benchmark": "products of the head", "date": started, "machine": machine()}
    result |= {"vocabulary": VOCABULARY, "width": WIDTH, "threads": torch.get_num_threads(), "rates": {}}
    result |= {"busy_around": busy_processes(), "load": os.getloadavg()[0]}
    for chunk in (256, 512):
        works = _works(chunk)
        best = {(name, form): float("inf") for name, forms in works.items() for form in forms}
        for _turn in range(TURNS):
            for name, form in best:
                begin = time.process_time()
                works[name][form]()
                best[name, form] = min(best[name, form], time.process_time() - begin)
        for (name, form), seconds in best.items():
            rate = 2e-9 * chunk * VOCABULARY * WIDTH / seconds
            result["rates"].setdefault(f"chunk {chunk}", {}).setdefault(name, {})[form] = round(rate, 1)
            print(f"chunk {chunk}  {name:44s} {form:18s} {rate:6.0f} GFLOP/s", flush=True)
    path = RESULTS / f"bf16_products_{result['threads']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
