"""Heads in half precision near convergence, and their gradients in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from head_cases import FORWARD_KL, Case, grads_of, reference_rows, run
from torch import Tensor

from stillroom.core.types import DenseSignal, HeadWeights


def near_convergence(
    mean: float, teacher_dtype: torch.dtype, temperature: float, *, device: str = "cpu", seed: int = 0
) -> Case:
    """An FP16 student whose logits lie around `mean`, and a teacher at a KL of about 1e-3 from it."""
    num_rows, num_tokens, width = 48, 4096, 64
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, weight = draw(num_rows, width), draw(num_tokens, width) * (2.0 / math.sqrt(width))
    hidden[:, 0], weight[:, 0] = 4.0, mean / 4.0
    hidden, weight = hidden.half().to(device), weight.half().to(device)
    apart = draw(num_tokens, width) * math.sqrt(2e-3 / width) * temperature
    apart[:, 0] = 0.0  # a shift of all logits is no difference
    goal = (weight.double() + apart.to(device)).to(teacher_dtype)
    teacher = DenseSignal(hidden.to(teacher_dtype), HeadWeights(goal))
    targets = torch.randint(num_tokens, (num_rows,), generator=generator).to(device)
    return Case(hidden.requires_grad_(), HeadWeights(weight.requires_grad_()), teacher, targets)


def with_fp32_digits(case: Case, product_dtype: torch.dtype) -> Case:
    """The case with an FP32 student none of whose numbers is a half one, as far from its teacher as before."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = case.hidden.detach().float(), case.head.weight.detach().float()
    hidden = hidden * (1 + 1e-3 * torch.randn(hidden.shape, generator=generator))
    moved = 1e-3 * torch.randn(weight.shape, generator=generator) * weight.abs()
    teacher_dtype = case.teacher.hidden.dtype
    goal = (case.teacher.head.weight.float() + moved).to(teacher_dtype)
    asked = product_dtype if teacher_dtype == torch.float32 else None
    teacher = DenseSignal(hidden.to(teacher_dtype), HeadWeights(goal, product_dtype=asked))
    head = HeadWeights((weight + moved).requires_grad_(), product_dtype=product_dtype)
    return replace(case, hidden=hidden.requires_grad_(), head=head, teacher=teacher)


def gradients(case: Case, **options: Any) -> dict[str, Tensor]:
    """The head's own FP32 gradients, before they are cast to the inputs' dtype."""
    options = {"kd_weight": 1 / 48, "ce_weight": 0.0, "chunk_tokens": 20, **options}
    saved = run(case, **options).loss.grad_fn.saved_tensors
    return {"hidden": saved[0], "weight": saved[1]}


def exact(case: Case, temperature: float, kd_weight: float = 1 / 48) -> tuple[float, dict[str, Tensor]]:
    """Mean KL at the temperature, and the gradients in float64."""
    wide = replace(case.copy(torch.float64), targets=case.targets)
    kd, _ = reference_rows(wide, FORWARD_KL, temperature)
    (kd.sum() * kd_weight).backward()
    return float(kd.detach().mean()) / temperature**2, grads_of(wide)


def distance(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())
