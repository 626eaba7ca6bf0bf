"""The laws of the head's Triton kernels in Triton's interpreter: prints what was found as JSON.

A process of its own: Triton reads TRITON_INTERPRET when a kernel is defined. Blocks run one after the other there, so
the form in one pass is only run with one block a row; `ptx.py` runs it with several.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import torch
from half_cases import distance, exact, gradients, near_convergence
from ptx_cases import RowCase
from ptx_table import DENSE

from stillroom.losses.head import loss, products
from stillroom.losses.head.kernel import KernelChoice
from stillroom.losses.head.kernel_triton import TritonKernel
from stillroom.losses.head.rows import Logits, PlainKernel, RowPlan, RowRecord


def against_float64() -> dict[str, dict[str, float]]:
    """Errors of every divergence and form; JSD also near its ends."""
    cases: dict[str, dict[str, Any]] = {}
    members = {**DENSE, "jsd 0.05": {"beta": 0.05}, "jsd 0.95": {"beta": 0.95}}
    for name, settings in members.items():
        given = {"divergence": name.split()[0], "settings": settings, "half": None}
        cases[f"{name} dense"] = {**given, "num_tokens": 1003, "temperature": None, "num_rows": 2}
        cases[f"{name} near"] = {**given, "gap": 1e-2}
        cases[f"{name} top-k"] = {**given, "kind": "top-k", "num_kept": 8, "temperature": 2.0}
        cases[f"{name} at once"] = {**given, "num_tokens": 1003, "num_blocks": 1}
        cases[f"{name} top-k at once"] = {**cases[f"{name} top-k"], "num_blocks": 1}
    far = {"half": None, "num_tokens": 1003}
    cases |= {
        "softcap": {**far, "softcap": 8.0, "temperature": 2.0},
        "softcap top-k": {**far, "softcap": 8.0, "kind": "top-k"},
        "low logits": {**far, "mean": -100.0},
        "sampled": {**far, "kind": "sampled", "num_kept": 7, "temperature": 2.0},
        "sampled at once": {**far, "kind": "sampled", "num_kept": 7, "temperature": 2.0, "num_blocks": 1},
        "labels alone": {**far, "kind": "none"},
        "labels alone at once": {**far, "kind": "none", "num_blocks": 1},
    }
    found = {}
    for name, options in cases.items():
        case = RowCase(**options)
        case.launch.start()
        errors = case.errors()
        found[name] = {"kd": errors.kd, "ce": errors.ce, "gradient": errors.gradient}
    return found


def half_rows() -> dict[str, Any]:
    """FP16 and BF16 over the logits: the row sums with what rounding took, powers known and not known to the host."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        for is_known in (True, False):
            for kind in ("dense", "top-k"):
                case = RowCase(num_tokens=1003, kind=kind, half=dtype, is_heaviest_known=is_known, num_rows=2)
                case.launch.start()
                errors = case.errors()
                name = f"{str(dtype).removeprefix('torch.')} {kind} {is_known}"
                found[name] = {"gradient": errors.gradient, "row_sum": errors.row_sum}
    return found


def odd_rows() -> dict[str, dict[str, list[float]]]:
    """Teachers that are no distribution, impossible tokens, a student that is not finite; by both kernels."""
    found = {}
    for name, num_blocks in (("passes", 0), ("at once", 1)):
        answers = []
        for kernel in (TritonKernel(PlainKernel(), num_blocks), PlainKernel()):
            generator = torch.Generator().manual_seed(0)
            student, teacher = (torch.randn(7, 70, generator=generator) * 3 for _ in range(2))
            teacher[1, 3], teacher[2, 4], teacher[3] = math.nan, math.inf, -math.inf
            teacher[4, 7:], student[5, 9], student[6, 2] = -math.inf, math.nan, math.inf
            third = torch.full((7,), 1 / 3)
            rows = RowRecord(torch.arange(7), torch.full((7,), 2.0), third, third, torch.zeros(7), torch.zeros(7),
                             torch.zeros(7, dtype=torch.bool))  # fmt: skip
            plan = RowPlan(RowCase("jsd").plan.divergence, True, False, True, False)
            kernel.run(Logits(student), Logits(teacher), rows, plan)
            answer = {"kd": rows.kd, "ce": rows.ce, "is_bad": rows.is_bad, "gradient": student[:5].flatten()}
            answer["spoiled"] = student[5:].isfinite()
            answers.append({key: value.tolist() for key, value in answer.items()})
        found[name] = answers
    return found


def whole_head() -> dict[str, dict[str, float]]:
    """Gradients of a head of half weights through kernel and products, over two chunks, against float64."""
    found = {}
    choice = KernelChoice(TritonKernel(PlainKernel()), "interpreted")
    for name, options in (("one power", {}), ("row powers", {"token_weights": torch.ones(48)})):
        _, expected = exact(near_convergence(-20.0, torch.float16, 1.0), 1.0)
        with (
            mock.patch.object(products, "multiplies_half", return_value=True),
            mock.patch.object(loss, "choose_kernel", return_value=choice),
        ):
            answer = gradients(near_convergence(-20.0, torch.float16, 1.0), temperature=1.0, **options)
        found[name] = {key: distance(value, expected[key]) for key, value in answer.items()}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts = (against_float64, half_rows, odd_rows, whole_head)
    print(json.dumps({part.__name__: part() for part in parts}))
