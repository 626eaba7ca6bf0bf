"""Check the layout of records against the first objects of a source.

A mistyped column stops a run with the columns there are, and not as thousands of bad records.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping

from stillroom.config.data import Layout
from stillroom.data.records import OPTIONAL
from stillroom.data.sources.readers import Item
from stillroom.errors import DataError

_NUM_LOOKED_AT = 10
_NUM_NAMED = 12


def checked(items: Iterable[Item], layout: Layout, spec: str) -> Iterator[Item]:
    """The items. Raise if a column of the layout is in none of the first ones."""
    items = iter(items)
    first = list(itertools.islice(items, _NUM_LOOKED_AT)) if layout.has_layout else []
    objects = [value for _, value in first if isinstance(value, Mapping)]
    there = list(dict.fromkeys(str(name) for value in objects for name in value))
    setting = "template" if layout.template else "columns"
    for column in layout.needed_columns if objects else ():
        if column not in there and column != layout.columns.get(OPTIONAL):
            near = difflib.get_close_matches(column, there, n=1)
            more = ", ..." if len(there) > _NUM_NAMED else ""
            raise DataError(
                f"{spec} has no column {column!r}, which data.{setting} names; it has "
                f"{', '.join(there[:_NUM_NAMED]) or 'none'}{more}",
                advice=[*(f"did you mean {name}?" for name in near), f"correct data.{setting}"],
            )
    yield from first
    yield from items
