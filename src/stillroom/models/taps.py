"""Hidden states of chosen layers, and nothing else.

`output_hidden_states=True` keeps every layer alive. A tap is a forward hook on just the layers a term asked
for; with none asked for, none is placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stillroom.types import Needs


@contextmanager
def tapped(blocks: Sequence[nn.Module], needs: Needs) -> Iterator[dict[str, Tensor]]:
    """A dict that fills with `hidden.<layer>` while the body runs the model."""
    found: dict[str, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            found[f"hidden.{layer}"] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [blocks[layer].register_forward_hook(keep(layer)) for layer in sorted(needs.hidden_layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
