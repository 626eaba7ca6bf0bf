"""The body of a model as torch.compile makes it, for static shapes, with the plain body to fall back on.

Lengths are padded to a multiple of 64 on the right, which no scored position can see, so a run has few shapes. A shape
beyond the first eight, taps, and whatever does not compile use the plain body, and the log says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stillroom.models.anatomy import backbone

_LENGTH_STEP = 64
_MAX_SHAPES = 8
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest value


# Dynamo, inductor and the C++ compiler each raise their own kinds, most of them RuntimeErrors.
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
            error_size, is_close = compare(
                lambda: _last_hidden(self._compiled, ids), lambda: _last_hidden(self._body, ids), self._body, ids
            )
        except torch.OutOfMemoryError:
            raise
        except COMPILER_ERRORS as error:
            self._is_usable = False
            self._tell(f"compile: the {self._role} cannot be compiled and runs as it is: {_first_line(error)}")
            return False
        if not is_close:
            self._is_usable = False
            self._tell(f"compile: the compiled {self._role} differs by {error_size:.1e} and is not used")
            return False
        seconds = time.monotonic() - began
        self._tell(f"compile: {self._role}, {ids.shape[0]} rows of {ids.shape[1]}, in {seconds:.0f} s")
        return True


def compare(
    compiled: Callable[[], Tensor], plain: Callable[[], Tensor], network: nn.Module, inputs: Tensor
) -> tuple[float, bool]:
    """Run both from one random state. Return their difference relative to the largest value, and if it is rounding.

    With dropout any difference passes: it draws other random numbers once it is compiled.
    """
    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        seed = torch.initial_seed()
        torch.manual_seed(seed)
        answer = compiled()
        torch.manual_seed(seed)
        own = plain()
    apart = float(((answer - own).abs().max() / own.abs().max().clamp_min(1e-30)).detach())
    has_dropout = any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in network.modules())
    return apart, has_dropout or apart <= max(TOLERANCE.get(dtype, 1e-4) for dtype in (own.dtype, product_dtype(own)))


def product_dtype(states: Tensor) -> torch.dtype:
    """The dtype of the products around a tensor: under autocast FP32 states come from half products."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def raise_recompile_limit(num_parts: int) -> None:
    """Dynamo gives up in silence beyond its limit of shapes for one piece of code."""
    limit = 2 * _MAX_SHAPES * num_parts
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)


def _last_hidden(body: Any, ids: Tensor) -> Tensor:
    answer: Tensor = body(input_ids=ids, use_cache=False).last_hidden_state
    return answer


# -- compiled layers -------------------------------------------------------------------------------
# The layers of a sharded model, each as torch.compile makes it.
#
# FSDP2 gathers a layer in a hook before its forward, so what is compiled is the forward inside of the hooks. A whole
# body cannot be compiled and compared as an unsharded one is: a process that meets a new shape would gather all
# layers again, and the others would not. Here a layer is compared with itself while it is gathered.


class CompiledLayers(CompiledBody):
    """Called with token ids [B, L], answers with the last hidden states [B, L, D]."""

    def __init__(
        self, model: Any, blocks: Sequence[nn.Module], role: str, tell: Callable[[str], object], **options: Any
    ) -> None:
        super().__init__(model, role, tell, **options)
        self._layers = [_Layer(block, self._backend, self._refuse) for block in blocks]
        self._compiled = self._with_layers
        self._begun: dict[tuple[int, ...], float] = {}  # when a shape was first met, until it is told of

    def _compile(self, ids: Tensor) -> bool:
        """Each layer compiles itself when it is called."""
        raise_recompile_limit(len(self._layers))
        self._begun[tuple(ids.shape)] = time.monotonic()
        return True

    def _with_layers(self, input_ids: Tensor, **options: Any) -> Any:
        for layer in self._layers:
            layer.is_on = True
        try:
            answer = self._body(input_ids=input_ids, **options)
        finally:
            for layer in self._layers:
                layer.is_on = False
        began = self._begun.pop(tuple(input_ids.shape), None)
        if began is not None and self._layers[0].is_usable:
            rows, length = input_ids.shape
            seconds = time.monotonic() - began
            self._tell(f"compile: {self._role}, layer by layer, {rows} rows of {length}, in {seconds:.0f} s")
        return answer

    def _refuse(self, reason: str) -> None:
        """Run every layer uncompiled if one must, so that the log can say what runs."""
        if not all(layer.is_usable for layer in self._layers):
            return
        for layer in self._layers:
            layer.is_usable = False
        self._tell(f"compile: the layers of the {self._role} run as they are: {reason}")


class _Layer:
    """The forward of one block: compiled while it is on, and as it was otherwise."""

    def __init__(self, block: nn.Module, backend: Any, refuse: Callable[[str], None]) -> None:
        self._block, self._plain, self._refuse = block, block.forward, refuse
        self._compiled: Any = torch.compile(block.forward, dynamic=False, backend=backend)
        self._shapes: set[tuple[Any, ...]] = set()
        self.is_on, self.is_usable = False, True
        block.forward = self

    def __call__(self, hidden: Tensor, *others: Any, **named: Any) -> Any:
        if not (self.is_on and self.is_usable):
            return self._plain(hidden, *others, **named)
        shape = (*hidden.shape, hidden.requires_grad)
        if shape not in self._shapes:
            self._shapes.add(shape)
            self._compare(hidden, *others, **named)
        return (self._compiled if self.is_usable else self._plain)(hidden, *others, **named)

    def _compare(self, hidden: Tensor, *others: Any, **named: Any) -> None:
        """Compile for one shape and compare with the plain layer."""
        try:
            apart, is_close = compare(
                lambda: _states(self._compiled(hidden, *others, **named)),
                lambda: _states(self._plain(hidden, *others, **named)),
                self._block,
                hidden,
            )
        except torch.OutOfMemoryError:
            raise
        except COMPILER_ERRORS as error:
            self._refuse(_first_line(error))
            return
        if not is_close:
            self._refuse(f"a compiled one differs by {apart:.1e}")


def _states(answer: Any) -> Tensor:
    states: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return states
