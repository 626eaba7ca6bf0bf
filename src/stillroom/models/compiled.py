"""The body of a model as torch.compile makes it, for static shapes, with the plain body to fall back on.

Lengths are padded to a multiple of 64 on the right, which no scored position can see, so a run has few shapes. A shape
beyond the first eight, taps, and whatever does not compile use the plain body, and the log says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stillroom.models.anatomy import backbone

_LENGTH_STEP = 64
_WORTH_COMPILING = 1e14  # FLOPs of the student in a run on a CPU: below, compiling takes longer than it saves
_MAX_SHAPES = 8
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest value


def what_to_compile(wanted: str, device_type: str, student_flops: float) -> str:
    """`auto` as "off" or "student": by counts alone, so that a resumed run decides alike on any machine."""
    if wanted != "auto":
        return wanted
    return "student" if device_type == "cpu" and student_flops >= _WORTH_COMPILING else "off"


# Dynamo, inductor and the C++ compiler each raise kinds of their own, most of them RuntimeErrors.
COMPILER_ERRORS = (RuntimeError, ImportError, AssertionError, TypeError, ValueError, AttributeError)


class CompiledBody:
    """Called with token ids [B, L], answers with the last hidden states [B, L, D]."""

    def __init__(self, model: Any, role: str, tell: Callable[[str], object], *, backend: str = "inductor") -> None:
        self._body = backbone(model)
        self._backend = backend
        self._compiled: Callable[..., Any] = torch.compile(self._body, dynamic=False, backend=backend)
        self._role, self._tell = role, tell
        self._shapes: dict[tuple[int, int, bool], bool] = {}  # whether the shape is compiled
        self._is_usable = True

    def __call__(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        padded = functional.pad(ids, (0, -length % _LENGTH_STEP))
        shape = (len(padded), padded.shape[1], torch.is_grad_enabled())
        if self._is_usable and shape not in self._shapes:
            self._shapes[shape] = len(self._shapes) < _MAX_SHAPES and self._compile(padded)
            if len(self._shapes) == _MAX_SHAPES + 1:
                self._tell(
                    f"compile: the {self._role} meets more than {_MAX_SHAPES} shapes, the others are not compiled"
                )
        if not self._is_usable or not self._shapes[shape]:
            return _last_hidden(self._body, ids)
        return _last_hidden(self._compiled, padded)[:, :length]

    def _compile(self, ids: Tensor) -> bool:
        """Compile for one shape and compare with the plain body. False: use that one."""
        raise_recompile_limit(1)
        began = time.monotonic()
        try:
            with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
                seed = torch.initial_seed()
                torch.manual_seed(seed)
                answer = _last_hidden(self._compiled, ids)
                torch.manual_seed(seed)
                plain = _last_hidden(self._body, ids)
        except torch.OutOfMemoryError:
            raise
        except COMPILER_ERRORS as error:
            self._is_usable = False
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._tell(f"compile: the {self._role} cannot be compiled and runs as it is: {reason}")
            return False
        error_size = float(((answer - plain).abs().max() / plain.abs().max().clamp_min(1e-30)).detach())
        if not has_chance(self._body) and error_size > TOLERANCE.get(plain.dtype, 1e-4):
            self._is_usable = False
            self._tell(f"compile: the compiled {self._role} differs by {error_size:.1e} and is not used")
            return False
        seconds = time.monotonic() - began
        self._tell(f"compile: {self._role}, {ids.shape[0]} rows of {ids.shape[1]}, in {seconds:.0f} s")
        return True


def has_chance(network: nn.Module) -> bool:
    """Dropout draws other random numbers once it is compiled."""
    return any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in network.modules())


def raise_recompile_limit(num_parts: int) -> None:
    """Dynamo gives up in silence beyond its limit of shapes for one piece of code."""
    limit = 2 * _MAX_SHAPES * num_parts
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)


def _last_hidden(body: Any, ids: Tensor) -> Tensor:
    answer: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return answer
