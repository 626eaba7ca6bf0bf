"""FP16 matrix products on a CPU: FP16 in, FP32 inside, FP16 out.

A CPU without native FP16 arithmetic multiplies half matrices up to 28 times slower than FP32 ones. A GPU
reads FP16, accumulates in FP32 and rounds once; doing the same with an FP32 product gives the same numbers
as the card would (up to the order of summation) at FP32 speed, which makes the FP16 policies testable and
usable without a card.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, products of FP16 tensors are computed in FP32 and rounded once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and args[-1].dtype == torch.float16:
            wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
            return func(*wide, **(kwargs or {})).to(torch.float16)
        return func(*args, **(kwargs or {}))
