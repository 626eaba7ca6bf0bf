"""A number for each position from its logits, a chunk of positions at a time.

The forward keeps the values [N] and drops the logits of each chunk; the backward makes them again. So no [N, V] tensor
outlives its chunk, for any law of a row. Values and gradients are FP32 or better; a gradient is cast to its input's
dtype after it was multiplied by the upstream one, which carries the loss scale.

Legend: N positions, C positions of a chunk, V real vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stillroom.numerics import work_dtype
from stillroom.objectives.head.chunks import choose_chunk
from stillroom.objectives.head.kernel_plain import finish
from stillroom.objectives.head.products import Wanted, products_of
from stillroom.objectives.second_derivative import only_once
from stillroom.types import HeadWeights

RowLaw = Callable[[Tensor, slice], Tensor]  # logits [C, V] of these positions -> values [C]


@dataclass(frozen=True)
class _Task:
    head: HeadWeights
    law: RowLaw
    chunk_tokens: int


def head_values(hidden: Tensor, head: HeadWeights, law: RowLaw, chunk_tokens: int = 0) -> Tensor:
    """`law` at every position of `hidden` [N, D]: [N], differentiable in hidden states, weight and bias."""
    task = _Task(head, law, choose_chunk(chunk_tokens, hidden, head.num_real))
    values: Tensor = _HeadValues.apply(hidden, head.weight, head.bias, task)  # type: ignore[no-untyped-call]
    return values


class _HeadValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.task = task
        head = replace(task.head, weight=weight, bias=bias)
        dtype = work_dtype(hidden, weight)
        values = torch.zeros(hidden.shape[0], dtype=dtype, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            products = products_of(hidden, head, dtype, task.chunk_tokens)
            for part in _parts(len(hidden), task.chunk_tokens):
                values[part] = task.law(finish(products.logits(part)), part)
        return values

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        task: _Task = ctx.task
        head = replace(task.head, weight=weight, bias=bias)
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            wanted = Wanted(*ctx.needs_input_grad[:3])
            products = products_of(hidden, head, work_dtype(hidden, weight), task.chunk_tokens, wanted)
            for part in _parts(len(hidden), task.chunk_tokens):
                logits = products.logits(part)
                raw = logits.raw.clone().requires_grad_()
                with torch.enable_grad():
                    values = task.law(finish(replace(logits, raw=raw)), part)
                (gradient,) = torch.autograd.grad(values, raw, upstream[0][part].to(values.dtype))
                logits.raw.copy_(gradient)
                products.pull_back(part)
            found = zip(products.gradients(), (hidden, weight, bias), strict=True)
            results = [None if gradient is None else gradient.to(given.dtype) for gradient, given in found]
        return (*only_once(results), None)


def _parts(num_rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
