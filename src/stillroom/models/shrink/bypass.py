"""A model run with some of its layers left out, without building another one.

A layer that is left out hands on what it was given. Masks, positions and everything else that a model prepares for each
layer by its number stay as they are, so this is what a cut must compute, whatever the family.
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
    """The layers of a model, each of which can be stepped over."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blocks = blocks_of(model)
        self._rests = self._look()

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def logits(self, ids: Tensor, **options: Any) -> Tensor:
        """The model's own logits of one row, in FP32. [L, V]"""
        found: Tensor = self.model(input_ids=ids, **{"use_cache": False, **options}).logits
        return found[0].float()

    @contextmanager
    def without(self, removed: Collection[int], *, begin: int = 0, entering: Tensor | None = None) -> Iterator[None]:
        """Leave layers out for a while.

        With `entering`, which is what layer `begin` was given in an earlier pass, the layers below are not computed
        again: `begin` must be left out itself, and hands that on.
        """
        skipped = {layer for layer in range(self.num_layers) if layer < begin or layer in removed}
        changed = [self.blocks[layer] for layer in sorted(skipped)]
        for layer in skipped:
            given = entering if layer == begin else None
            # An attribute of the instance is found before the method of its class.
            self.blocks[layer].__dict__["forward"] = _StandIn(given, self._rests[layer])
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            reason = f"it cannot run without layers {sorted(skipped)} ({type(error).__name__}: {error})"
            raise cannot_be_cut(self.model, reason) from error
        finally:
            for block in changed:
                del block.__dict__["forward"]

    @contextmanager
    def listening(self, heard: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Fill `heard` with what each layer was given and what it gave."""

        def listen(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                heard[layer] = (_hidden_of(args, kwargs), output[0] if isinstance(output, tuple) else output)

            return hook

        handles = [
            block.register_forward_hook(listen(layer), with_kwargs=True) for layer, block in enumerate(self.blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _look(self) -> dict[int, tuple[Any, ...] | None]:
        """What each layer returns after the hidden states: None for a layer that returns these alone."""
        rests: dict[int, tuple[Any, ...] | None] = {}
        odd: list[str] = []

        def look(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                given = _hidden_of(args, kwargs)
                first = output[0] if isinstance(output, tuple) else output
                if not isinstance(first, Tensor) or first.shape != given.shape:
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


class _StandIn:
    """Takes the place of a layer's forward pass."""

    def __init__(self, entering: Tensor | None, rest: tuple[Any, ...] | None) -> None:
        self._entering = entering
        self._rest = rest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_of(args, kwargs) if self._entering is None else self._entering
        return hidden if self._rest is None else (hidden, *self._rest)


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(found, Tensor):
        raise LookupError("a layer was given no hidden states")
    return found


def blocks_of(model: Any) -> list[nn.Module]:
    try:
        return layers_of(model)
    except LookupError as error:
        raise cannot_be_cut(model, str(error)) from error


def cannot_be_cut(model: Any, reason: str, advice: tuple[str, ...] = ()) -> ConfigError:
    """The refusal for a family, or a choice of its layers, whose cut would not be the teacher with layers taken out."""
    family = model.config.get_text_config().model_type
    return ConfigError(
        f"a student cannot be cut like this from a teacher of the family {family}: {reason}",
        where="student.shrink",
        advice=[*advice, "or name a smaller model of the family as the student: student.model = ..."],
    )
