"""The matrix products of a head, a chunk of positions at a time, into scratch that is used again.

Everything is multiplied and accumulated in the work dtype (FP32, or FP64 for FP64 inputs). On a CPU, FP16 is
emulated and 3 to 28 times slower than casting the weight once and multiplying in FP32; on a GPU the logits of
half-precision inputs come from the native product, which accumulates in FP32, and are then upcast.

Legend: N positions, C positions of a chunk, V real vocabulary (the weight may have padding rows after it), D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stillroom.objectives.head.buffers import POOL
from stillroom.objectives.head.row_kernel import Logits
from stillroom.types import HeadWeights

_STRIDE = 64  # an odd row length makes the logits product a third slower: rows start at multiples of this
_SCRATCH_BYTES = 128 * 2**20  # for student and teacher together, when the chunk is chosen here
_LEAST_CHUNK, _MOST_CHUNK = 64, 1024  # products of fewer rows waste half the machine; of more gain nothing
_HALVES = (torch.float16, torch.bfloat16)


def chunk_size(asked: int, num_rows: int, num_tokens: int, width: int) -> int:
    """Positions in a chunk: as asked, or chosen (0) from the vocabulary.

    The scratch may take 128 MB, or as much as the weight's FP32 gradient where that is more: it lies there anyway.
    Chosen chunks are of equal size, so that no small one is left over.
    """
    if asked:
        return max(1, min(asked, num_rows))
    budget = max(_SCRATCH_BYTES, 4 * num_tokens * width)
    most = budget // (2 * 4 * num_tokens) // _LEAST_CHUNK * _LEAST_CHUNK
    most = min(max(most, _LEAST_CHUNK), _MOST_CHUNK)
    num_chunks = max(1, math.ceil(num_rows / most))
    return max(1, math.ceil(num_rows / num_chunks))


def scratch_bytes(chunk_tokens: int, num_tokens: int, *, has_dense_teacher: bool) -> int:
    """What a pass holds beside inputs and gradients, for whoever plans memory."""
    return (2 if has_dense_teacher else 1) * 4 * chunk_tokens * _padded(num_tokens)


def _padded(num_tokens: int) -> int:
    return math.ceil(num_tokens / _STRIDE) * _STRIDE


class Products:
    """Logits of one head and, where wanted, the gradients of its inputs, accumulated over chunks."""

    def __init__(
        self,
        hidden: Tensor,
        head: HeadWeights,
        dtype: torch.dtype,
        chunk_tokens: int,
        *,
        wants_hidden: bool = False,
        wants_weight: bool = False,
        wants_bias: bool = False,
    ) -> None:
        self._hidden, self._head, self._dtype = hidden, head, dtype
        self._num_real = head.num_real
        self._is_native = hidden.is_cuda and hidden.dtype == head.weight.dtype and hidden.dtype in _HALVES
        needs_cast_weight = not self._is_native or wants_hidden
        self._weight = head.weight[: self._num_real]  # [V, D]
        self._work_weight = _cast(self._weight, dtype) if needs_cast_weight else self._weight
        self._bias = None if head.bias is None else head.bias[: self._num_real].to(dtype)
        self._scratch = POOL.borrow((chunk_tokens, _padded(self._num_real)), dtype, hidden.device)
        self.hidden_gradient = torch.empty_like(hidden, dtype=dtype) if wants_hidden else None
        self.weight_gradient = _rows_like(head.weight, self._num_real, dtype) if wants_weight else None
        self.bias_gradient = None
        if wants_bias and head.bias is not None:
            self.bias_gradient = torch.zeros_like(head.bias, dtype=dtype)
        self._is_first = True

    def logits(self, part: slice) -> Logits:
        """Bare products of a chunk, in scratch that the next chunk overwrites."""
        raw = self._rows(part)
        if self._is_native:
            raw.copy_(torch.mm(self._hidden[part], self._weight.t()))
        else:
            torch.mm(self._hidden[part].to(self._dtype), self._work_weight.t(), out=raw)
        return Logits(raw, self._bias, self._head.scale, self._head.softcap, self._head.clamp)

    def pull_back(self, part: slice) -> None:
        """Take the gradient that a kernel left in the scratch to hidden states, weight and bias."""
        gradient = self._rows(part)
        if self.hidden_gradient is not None:
            torch.mm(gradient, self._work_weight, out=self.hidden_gradient[part])
        if self.weight_gradient is not None:
            real = self.weight_gradient[: self._num_real]
            hidden = self._hidden[part].to(self._dtype)
            if self._is_first:
                torch.mm(gradient.t(), hidden, out=real)
            else:
                real.addmm_(gradient.t(), hidden)
        if self.bias_gradient is not None:
            self.bias_gradient[: self._num_real] += gradient.sum(0)
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
    """The same for a model that answers with its own logits: nothing to multiply, but the scratch is still a copy,
    because kernels leave gradients in it."""

    def __init__(
        self, logits: Tensor, head: HeadWeights, dtype: torch.dtype, chunk_tokens: int, *, wants_hidden: bool = False
    ) -> None:
        self._logits, self._head = logits, head
        self._num_real = head.num_real
        self._scratch = POOL.borrow((chunk_tokens, self._num_real), dtype, logits.device)
        self.hidden_gradient = torch.zeros_like(logits, dtype=dtype) if wants_hidden else None

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


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype == dtype:
        return weight
    return POOL.borrow(tuple(weight.shape), dtype, weight.device).copy_(weight)
