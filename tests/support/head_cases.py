"""Small heads and their float64 reference, shared by the laws of the fused head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stillroom.core.types import Batch, DenseSignal, HeadWeights, StudentView
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.loss import score_head


def buckets(probs: Tensor, ids: Tensor) -> Tensor:
    """(K+1)-way probabilities: those of the kept ids, and one minus their sum. [N, K + 1]"""
    kept = probs.gather(-1, ids)
    return torch.cat((kept, 1 - kept.sum(-1, keepdim=True)), -1)


def logits_of(hidden: Tensor, head: HeadWeights) -> Tensor:
    """What a head makes of hidden states [N, D], in float64. [N, V]"""
    logits = hidden.double() @ head.weight[: head.num_real].double().T
    if head.bias is not None:
        logits = logits + head.bias[: head.num_real].double()
    return finished(logits, head.scale, head.softcap)


def finished(logits: Tensor, scale: float = 1.0, softcap: float | None = None) -> Tensor:
    logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    head: HeadWeights
    teacher: DenseSignal
    targets: Tensor

    @property
    def view(self) -> StudentView:
        return StudentView(self.hidden, self.head)

    @property
    def batch(self) -> Batch:
        return batch_of(self.targets)

    def leaves(self) -> dict[str, Tensor]:
        named = {
            "hidden": self.hidden,
            "weight": self.head.weight,
            "bias": self.head.bias,
            "teacher": self.teacher.hidden,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None and tensor.requires_grad}

    def copy(self, dtype: torch.dtype | None = None, *, trains_teacher: bool = False) -> Case:
        """Fresh leaves of the same numbers."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_()

        bias, goal = self.head.bias, self.teacher.head
        teacher_hidden = leaf(self.teacher.hidden).requires_grad_(trains_teacher)
        return Case(
            leaf(self.hidden),
            replace(self.head, weight=leaf(self.head.weight), bias=None if bias is None else leaf(bias)),
            replace(
                self.teacher,
                hidden=teacher_hidden,
                head=replace(
                    goal,
                    weight=goal.weight.to(dtype or goal.weight.dtype),
                    bias=None if goal.bias is None else goal.bias.to(dtype or goal.bias.dtype),
                ),
            ),
            self.targets,
        )


def batch_of(targets: Tensor) -> Batch:
    """One row with these targets."""
    row = targets.unsqueeze(0)
    return Batch(torch.zeros_like(row), torch.ones_like(row), row, torch.zeros_like(row), ("row",))


def make_case(
    seed: int = 0,
    num_rows: int = 7,
    num_tokens: int = 13,
    *,
    widths: tuple[int, int] = (4, 5),
    has_bias: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    padding: tuple[int, int] = (0, 0),
    spread: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(spread).to(dtype)

    student_rows, teacher_rows = num_tokens + padding[0], num_tokens + padding[1]
    head = HeadWeights(
        draw(student_rows, widths[0]), draw(student_rows) if has_bias else None, scale, softcap, num_tokens
    )
    teacher = DenseSignal(
        draw(num_rows, widths[1]),
        HeadWeights(
            draw(teacher_rows, widths[1]), draw(teacher_rows) if has_bias else None, scale, softcap, num_tokens
        ),
    )
    targets = torch.randint(num_tokens, (num_rows,), generator=generator)
    return Case(draw(num_rows, widths[0]), head, teacher, targets)


def reference_rows(case: Case, divergence: Divergence, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """kd and ce of each row in float64, by autograd."""
    student, teacher = logits_of(case.hidden, case.head), logits_of(case.teacher.hidden, case.teacher.head)
    if isinstance(temperature, Tensor):
        column = temperature.double()[:, None]
        kd = divergences.on_logits(divergence, student / column, teacher / column) * temperature.double() ** 2
    else:
        kd = divergences.on_logits(divergence, student, teacher, temperature)
    return kd, functional.cross_entropy(student, case.targets, reduction="none")


def grads_of(case: Case) -> dict[str, Tensor]:
    return {name: tensor.grad.clone() for name, tensor in case.leaves().items() if tensor.grad is not None}


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Largest deviation over the largest entry."""
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


FORWARD_KL = divergences.make("forward_kl")


def run(case: Case, divergence: Divergence = FORWARD_KL, **options: Any) -> Any:
    options = {"kd_weight": 0.7, "ce_weight": 0.3, "temperature": 2.0, "chunk_tokens": 3, **options}
    return score_head(case.view, case.teacher, case.targets, divergence=divergence, **options)
