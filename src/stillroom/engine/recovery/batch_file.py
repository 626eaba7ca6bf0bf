"""A batch as a file keeps it: its tensors by name, and the rest of its fields as JSON.

Fields are taken from the record itself, so a batch that is read back has all that was written. What a batch computes
from its tensors is not written: reading computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from torch import Tensor

from stillroom.types import Batch

_OTHER = "other"  # the one field that is itself a batch


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch, and under `other.` those of its second reading."""
    found = {one.name: getattr(batch, one.name) for one in _given() if one.type == "Tensor"}
    if batch.other is not None:
        found |= {f"{_OTHER}.{name}": tensor for name, tensor in tensors_of(batch.other).items()}
    return found


def facts_of(batch: Batch) -> dict[str, Any]:
    """Everything else, in shapes that JSON has."""
    found: dict[str, Any] = {}
    for one in _given():
        value = getattr(batch, one.name)
        if one.name == _OTHER:
            found[_OTHER] = None if batch.other is None else facts_of(batch.other)
        elif one.type == "tuple[str, ...]":
            found[one.name] = list(value)
        elif one.type == "int":
            found[one.name] = int(value)
        elif one.type != "Tensor":
            raise TypeError(f"Batch.{one.name} is {one.type}: no file keeps that")
    return found


def batch_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, prefix: str = "") -> Batch:
    """The batch that was written. A file from before a field existed has its default; KeyError where there is none."""
    found: dict[str, Any] = {}
    for one in _given():
        if one.type == "Tensor":
            found[one.name] = tensors[prefix + one.name]
        elif one.name in facts or one.default is MISSING:
            found[one.name] = _read(one, tensors, facts[one.name], prefix)
    return Batch(**found)


def _read(one: Field[Any], tensors: Mapping[str, Tensor], value: Any, prefix: str) -> Any:
    if one.name == _OTHER:
        return None if value is None else batch_of(tensors, value, prefix=f"{prefix}{_OTHER}.")
    if one.type == "int":
        return int(value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{one.name} is not a list of names")
    return tuple(value)


def _given() -> Iterator[Field[Any]]:
    """The fields that whoever makes a batch gives."""
    return (one for one in fields(Batch) if one.init)
