"""How long a row a model can read, as its configuration says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Scalings whose factor multiplies the original length. `max_position_embeddings` is the original one with some, and
# already the longer one with others, so the larger of both is taken.
_STRETCHING = ("linear", "dynamic", "yarn", "longrope", "llama3")


def num_positions(model: Any) -> int | None:
    """The most positions a row may have; None if the model has no such limit.

    A scaled rotary embedding counts with its factor. A sliding window bounds what a position sees and not the length of
    a row, so it is no limit.
    """
    config = model.config.get_text_config()
    table = int(getattr(config, "max_position_embeddings", 0) or 0)
    if table < 1:
        return None
    return max([table, *(_stretched(scaling, table) for scaling in _scalings(config))])


def _scalings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of the rotary embedding: one for all layers, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            nested = [inner for inner in found.values() if isinstance(inner, Mapping)]
            yield from nested or [found]


def _stretched(scaling: Mapping[str, Any], table: int) -> int:
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in _STRETCHING or not isinstance(factor, int | float):
        return 0
    return int(factor * int(scaling.get("original_max_position_embeddings") or table))
