"""Run a model with some of its layers left out, without building another model.

A layer that is left out returns its input. Masks, positions and whatever else a model prepares for each layer by its
number are unchanged, so this is what a cut must compute, in any family.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.errors import ConfigError
from stillroom.models.anatomy import layers_of

_NUM_TRIED = 4


class Bypass:
    """A model whose layers can be left out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blocks = blocks_of(model)
        self._rests = self._extra_outputs()

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def logits(self, ids: Tensor, **options: Any) -> Tensor:
        """The model's logits of one sequence, in FP32. [L, V]"""
        logits: Tensor = self.model(input_ids=ids, **{"use_cache": False, **options}).logits
        return logits[0].float()

    @contextmanager
    def without(self, removed: Collection[int], *, begin: int = 0, entering: Tensor | None = None) -> Iterator[None]:
        """Leave layers out in the body.

        `entering` is the input of layer `begin` in an earlier pass. With it the layers below are not computed again;
        `begin` must be left out too, and returns it.
        """
        skipped = {layer for layer in range(self.num_layers) if layer < begin or layer in removed}
        changed = [self.blocks[layer] for layer in sorted(skipped)]
        for layer in skipped:
            hidden = entering if layer == begin else None
            # An attribute of the instance takes precedence over the method of its class.
            self.blocks[layer].__dict__["forward"] = _Skip(hidden, self._rests[layer])
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            reason = f"it cannot run without layers {sorted(skipped)} ({type(error).__name__}: {error})"
            raise cannot_be_cut(self.model, reason) from error
        finally:
            for block in changed:
                del block.__dict__["forward"]

    @contextmanager
    def recording(self, states: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Record each layer's (input, output) in `states`."""

        def record(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                states[layer] = (_hidden_of(args, kwargs), output[0] if isinstance(output, tuple) else output)

            return hook

        handles = [
            block.register_forward_hook(record(layer), with_kwargs=True) for layer, block in enumerate(self.blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _extra_outputs(self) -> dict[int, tuple[Any, ...] | None]:
        """What each layer returns after the hidden states; None for a layer that returns a bare tensor."""
        rests: dict[int, tuple[Any, ...] | None] = {}
        odd: list[str] = []

        def look(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                entering = _hidden_of(args, kwargs)
                first = output[0] if isinstance(output, tuple) else output
                if not isinstance(first, Tensor) or first.shape != entering.shape:
                    odd.append(f"layer {layer} gives something else than it was given")
                rests[layer] = output[1:] if isinstance(output, tuple) else None

            return hook

        handles = [
            block.register_forward_hook(look(layer), with_kwargs=True) for layer, block in enumerate(self.blocks)
        ]
        try:
            device = next(self.model.parameters()).device
            self.logits(torch.arange(_NUM_TRIED, device=device).unsqueeze(0))
        finally:
            for handle in handles:
                handle.remove()
        if odd or len(rests) != len(self.blocks):
            reason = odd[0] if odd else "not every layer is called in a forward pass"
            raise cannot_be_cut(self.model, reason)
        return rests


class _Skip:
    """Replaces a layer's forward: returns its input, or `entering`."""

    def __init__(self, entering: Tensor | None, rest: tuple[Any, ...] | None) -> None:
        self._entering = entering
        self._rest = rest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_of(args, kwargs) if self._entering is None else self._entering
        return hidden if self._rest is None else (hidden, *self._rest)


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise LookupError("a layer was given no hidden states")
    return hidden


def blocks_of(model: Any) -> list[nn.Module]:
    try:
        return layers_of(model)
    except LookupError as error:
        raise cannot_be_cut(model, str(error)) from error


def cannot_be_cut(model: Any, reason: str, advice: tuple[str, ...] = ()) -> ConfigError:
    """The error for a family, or a choice of layers, whose cut would not equal the teacher without the other layers."""
    family = model.config.get_text_config().model_type
    return ConfigError(
        f"a student cannot be cut like this from a teacher of the family {family}: {reason}",
        where="student.shrink",
        advice=[*advice, "or name a smaller model of the family as the student: student.model = ..."],
    )
