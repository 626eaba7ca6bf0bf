"""Write a batch to a file and read it back: tensors by name, all other fields as JSON.

The fields are those of the dataclass, so none is forgotten. Fields that a batch computes from its tensors are not
written: reading computes them again.
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
    tensors = {one.name: getattr(batch, one.name) for one in _given() if one.type == "Tensor"}
    if batch.other is not None:
        tensors |= {f"{_OTHER}.{name}": tensor for name, tensor in tensors_of(batch.other).items()}
    return tensors


def facts_of(batch: Batch) -> dict[str, Any]:
    """The other fields, as JSON values."""
    facts: dict[str, Any] = {}
    for one in _given():
        value = getattr(batch, one.name)
        if one.name == _OTHER:
            facts[_OTHER] = None if batch.other is None else facts_of(batch.other)
        elif one.type == "tuple[str, ...]":
            facts[one.name] = list(value)
        elif one.type == "int":
            facts[one.name] = int(value)
        elif one.type != "Tensor":
            raise TypeError(f"Batch.{one.name} is {one.type}: no file keeps that")
    return facts


def batch_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, prefix: str = "") -> Batch:
    """Read a batch. A field missing from an older file takes its default; KeyError where it has none."""
    values: dict[str, Any] = {}
    for one in _given():
        if one.type == "Tensor":
            values[one.name] = tensors[prefix + one.name]
        elif one.name in facts or one.default is MISSING:
            values[one.name] = _read(one, tensors, facts[one.name], prefix)
    return Batch(**values)


def _read(one: Field[Any], tensors: Mapping[str, Tensor], value: Any, prefix: str) -> Any:
    if one.name == _OTHER:
        return None if value is None else batch_of(tensors, value, prefix=f"{prefix}{_OTHER}.")
    if one.type == "int":
        return int(value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{one.name} is not a list of names")
    return tuple(value)


def _given() -> Iterator[Field[Any]]:
    """The fields that are arguments of `Batch`."""
    return (one for one in fields(Batch) if one.init)
