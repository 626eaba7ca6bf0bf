"""What a pass of the fused head holds, as an autograd node without arithmetic.

Legend: N scored positions, C positions of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stillroom.objectives.head.chunks import TEMPORARIES, padded

_POOLED = 1 << 20  # on a CPU blocks of this size stay with the pool between passes


def scratch_bytes(
    chunk: int, vocabulary: int, *, has_teacher_logits: bool, is_plain: bool, half_products: bool = False
) -> int:
    """Logits of both models, a half operand of the products, and temporaries where the rows are not fused."""
    blocks = 1 + has_teacher_logits + 0.5 * half_products + TEMPORARIES * is_plain
    return int(4 * chunk * padded(vocabulary) * blocks)


@dataclass(frozen=True)
class HeadShape:
    """The blocks of a pass."""

    scratch: int  # bytes of logits and temporaries
    teacher_weight: tuple[int, int, torch.dtype] | None  # rows, width and dtype of a dense teacher's head
    is_card: bool
    half_products: bool  # operands of the products are half

    def operands(self, weight: Tensor) -> int:
        """Copies of the heads' weights in the dtype of the products."""
        wanted = torch.float16 if self.is_card and self.half_products else torch.float32
        found = []
        if weight.element_size() != wanted.itemsize:
            found.append(weight.numel() * wanted.itemsize)
        if self.teacher_weight is not None and self.teacher_weight[2].itemsize != wanted.itemsize:
            found.append(self.teacher_weight[0] * self.teacher_weight[1] * wanted.itemsize)
        return sum(found)

    def kept_between_passes(self, weight: Tensor) -> int:
        """On a CPU a pool keeps large blocks: they are there all the time."""
        held = self.scratch + self.operands(weight)
        return 0 if self.is_card or held < _POOLED else held


class HeadPass(torch.autograd.Function):
    """Takes hidden states [N, D] and a weight [V, D]; gives a scalar, and gradients of the right size."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, shape: HeadShape) -> Tensor:
        during = 0 if shape.kept_between_passes(weight) else shape.scratch + shape.operands(weight)
        blocks = [torch.empty(during, dtype=torch.uint8)]
        if hidden.dtype != torch.float32 and not shape.half_products:
            blocks.append(torch.empty_like(hidden, dtype=torch.float32))
        gradients = [torch.empty_like(hidden, dtype=torch.float32)]
        if ctx.needs_input_grad[1]:
            gradients.append(torch.empty_like(weight, dtype=torch.float32))
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        del blocks
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = [tensor.to(dtype) for tensor, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return found[0], found[1] if len(found) > 1 else None, None
