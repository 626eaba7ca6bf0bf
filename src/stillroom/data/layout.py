"""Records of shapes of one's own: a map of columns, or a template."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from stillroom.config.data import Layout

Segments = tuple[tuple[str, bool], ...]  # (text, is scored), in reading order

OPTIONAL = "input"  # a field that records may lack


def missing_columns(value: Mapping[str, Any], layout: Layout) -> list[str]:
    """The columns of a layout that an object lacks and must have."""
    optional = layout.columns.get(OPTIONAL)
    return [column for column in layout.needed_columns if column not in value and column != optional]


def renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a record, each from its column."""
    return {field: value[column] for field, column in columns.items() if column in value}


def filled(value: Mapping[str, str], layout: Layout) -> Segments:
    """The segments of a template. `value` holds the text of each column.

    Scored are the columns that the layout names, and the text after the last column if that is one of them: what ends
    an answer is learned with it. If none is named, all is scored.
    """
    pieces, segments = layout.pieces, list[tuple[str, bool]]()
    scored = set(layout.scored)
    last = next(name for _, name in reversed(pieces) if name)
    for literal, name in pieces:
        is_end = name is None and last in scored
        segments.append((literal, not scored or is_end))
        if name is not None:
            segments.append((value[name], not scored or name in scored))
    joined = itertools.groupby((one for one in segments if one[0]), key=lambda one: one[1])
    return tuple(("".join(text for text, _ in group), is_scored) for is_scored, group in joined)
