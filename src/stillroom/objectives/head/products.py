"""The matrix products of a head, a chunk of positions at a time, into scratch that is used again.

Logits and gradients have the work dtype: FP32, or FP64 for FP64 inputs. Which dtype the operands have is decided in
`multiply.py`.

Legend: N positions, C positions of a chunk, V real vocabulary (the weight may have padding rows after it), D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stillroom.objectives.head.buffers import POOL
from stillroom.objectives.head.chunks import padded
from stillroom.objectives.head.multiply import choose_multiplier
from stillroom.objectives.head.row_kernel import Logits
from stillroom.types import HeadWeights


@dataclass(frozen=True)
class Wanted:
    """Which inputs of a head get a gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False


_NOTHING = Wanted()


def products_of(
    hidden: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int, wanted: Wanted = _NOTHING
) -> Products | GivenLogits:
    """The products of a head, or the model's own logits where it gave those."""
    made = GivenLogits if head.is_identity else Products
    return made(hidden, head, dtype, chunk_tokens, wanted)


class Products:
    """Logits of one head and, where wanted, the gradients of its inputs, accumulated over chunks."""

    def __init__(
        self, hidden: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int, wanted: Wanted = _NOTHING
    ) -> None:
        self._head, self._num_real = head, head.num_real
        self._multiplier = choose_multiplier(hidden, head, dtype)
        self._hidden = self._multiplier.operand(hidden)  # [N, D]
        self._weight = self._multiplier.operand(head.weight[: self._num_real])  # [V, D]
        self._bias = None if head.bias is None else head.bias[: self._num_real].to(dtype)
        self._scratch = POOL.borrow((chunk_tokens, padded(self._num_real)), dtype, hidden.device)
        self.hidden_gradient = torch.empty_like(hidden, dtype=dtype) if wanted.hidden else None
        self.weight_gradient = _rows_like(head.weight, self._num_real, dtype) if wanted.weight else None
        self.bias_gradient = None
        if wanted.bias and head.bias is not None:
            self.bias_gradient = torch.zeros_like(head.bias, dtype=dtype)
        self._is_first = True

    def logits(self, part: slice) -> Logits:
        """Bare products of a chunk, in scratch that the next chunk overwrites."""
        raw = self._rows(part)
        self._multiplier.logits(self._hidden[part], self._weight, out=raw)
        return Logits(raw, self._bias, self._head.scale, self._head.softcap, self._head.clamp)

    def pull_back(self, part: slice) -> None:
        """Take the gradient that a kernel left in the scratch to hidden states, weight and bias."""
        if self.bias_gradient is not None:
            self.bias_gradient[: self._num_real] += self._rows(part).sum(0)
        if self.hidden_gradient is not None or self.weight_gradient is not None:
            gradient = self._multiplier.gradient(self._rows(part))
            if self.hidden_gradient is not None:
                self._multiplier.to_hidden(gradient, self._weight, out=self.hidden_gradient[part])
            if self.weight_gradient is not None:
                real = self.weight_gradient[: self._num_real]
                self._multiplier.to_weight(gradient, self._hidden[part], out=real, adds=not self._is_first)
        self._is_first = False

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden states, weight and bias; zero where no chunk came by."""
        if self._is_first:
            for gradient in (self.hidden_gradient, self.weight_gradient):
                if gradient is not None:
                    gradient.zero_()
        return self.hidden_gradient, self.weight_gradient, self.bias_gradient

    def _rows(self, part: slice) -> Tensor:
        return self._scratch[: part.stop - part.start, : self._num_real]


class GivenLogits:
    """The same for a model that answers with its own logits. They are copied, because kernels overwrite their input."""

    def __init__(
        self, logits: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int, wanted: Wanted = _NOTHING
    ) -> None:
        self._logits, self._head = logits, head
        self._num_real = head.num_real
        self._scratch = POOL.borrow((chunk_tokens, self._num_real), dtype, logits.device)
        self.hidden_gradient = torch.zeros_like(logits, dtype=dtype) if wanted.hidden else None

    def logits(self, part: slice) -> Logits:
        raw = self._scratch[: part.stop - part.start]
        raw.copy_(self._logits[part, : self._num_real])
        return Logits(raw, clamp=self._head.clamp)

    def pull_back(self, part: slice) -> None:
        if self.hidden_gradient is not None:
            self.hidden_gradient[part, : self._num_real] = self._scratch[: part.stop - part.start]

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden_gradient, None, None


def _rows_like(weight: Tensor, num_real: int, dtype: torch.dtype) -> Tensor:
    """Room for a gradient: padding rows are 0, the others are written by the first chunk."""
    gradient = POOL.borrow(tuple(weight.shape), dtype, weight.device)
    gradient[num_real:].zero_()
    return gradient
