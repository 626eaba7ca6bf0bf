"""The layers of a sharded model, each as torch.compile makes it.

FSDP2 gathers a layer in a hook before its forward, so what is compiled is the forward inside of the hooks. A whole body
cannot be compiled and compared as an unsharded one is: a process that meets a new shape would gather all layers again,
and the others would not. Here a layer is compared with itself while it is gathered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.models.compiled import COMPILER_ERRORS, TOLERANCE, CompiledBody, has_chance, raise_recompile_limit


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
        """One layer as it is means all of them: the log then says what runs."""
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
            with torch.random.fork_rng(devices=[hidden.device] if hidden.is_cuda else []):
                seed = torch.initial_seed()
                torch.manual_seed(seed)
                answer = _states(self._compiled(hidden, *others, **named))
                torch.manual_seed(seed)
                plain = _states(self._plain(hidden, *others, **named))
        except torch.OutOfMemoryError:
            raise
        except COMPILER_ERRORS as error:
            self._refuse(str(error).strip().partition("\n")[0] or type(error).__name__)
            return
        apart = float(((answer - plain).abs().max() / plain.abs().max().clamp_min(1e-30)).detach())
        if not has_chance(self._block) and not apart <= TOLERANCE.get(plain.dtype, 1e-4):
            self._refuse(f"a compiled one differs by {apart:.1e}")


def _states(answer: Any) -> Tensor:
    states: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return states
