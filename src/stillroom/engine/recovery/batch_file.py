"""Write a batch to a file and read it back: tensors by name, all other fields as JSON.

The fields are those of the dataclass, so none is forgotten. Fields that a batch computes from its tensors are not
written: reading computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from torch import Tensor

from stillroom.files import LARGEST
from stillroom.types import IGNORED, Batch

_OTHER = "other"  # the one field that is itself a batch
_TENSORS = ("Tensor", "Tensor | None")
_LARGEST_TOKEN = 2**31 - 1


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch, and under `other.` those of its second reading."""
    tensors = {one.name: getattr(batch, one.name) for one in _given() if one.type in _TENSORS}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
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
        elif one.type not in _TENSORS:
            raise TypeError(f"Batch.{one.name} is {one.type}: no file keeps that")
    return facts


def batch_of(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, prefix: str = "") -> Batch:
    """Read a batch. A field missing from an older file takes its default; KeyError where it has none.

    Raise ValueError for tensors that are not whole numbers [B, L] in their range, and for names that are not B.
    """
    values: dict[str, Any] = {}
    for one in _given():
        if one.type == "Tensor":
            values[one.name] = tensors[prefix + one.name]
        elif one.type in _TENSORS:
            values[one.name] = tensors.get(prefix + one.name)
        elif one.name in facts or one.default is MISSING:
            values[one.name] = _read(one, tensors, facts[one.name], prefix)
    _check(values)
    return Batch(**values)


def _check(values: Mapping[str, Any]) -> None:
    shape = values["input_ids"].shape
    if len(shape) != 2 or not values["input_ids"].numel():
        raise ValueError(f"input_ids has the shape {tuple(shape)}")
    for name, value in values.items():
        if isinstance(value, Tensor):
            least, most = _range(name, int(shape[1]))
            if value.shape != shape or value.is_floating_point() or value.is_complex():
                raise ValueError(f"{name} is {value.dtype} of the shape {tuple(value.shape)}")
            if int(value.min()) < least or int(value.max()) > most:
                raise ValueError(f"{name} has values outside of {least} to {most}")
        elif isinstance(value, tuple) and (value or name == "sample_ids") and len(value) != shape[0]:
            raise ValueError(f"{name} has {len(value)} names for {shape[0]} rows")


def _range(name: str, length: int) -> tuple[int, int]:
    """The smallest and largest value of a tensor of a batch."""
    match name:
        case "attention_mask" | "is_exact":
            return 0, 1
        case "targets":
            return IGNORED, _LARGEST_TOKEN
        case "segments" | "spans":
            return -1, length
        case _:
            return 0, _LARGEST_TOKEN


def _read(one: Field[Any], tensors: Mapping[str, Tensor], value: Any, prefix: str) -> Any:
    if one.name == _OTHER:
        return None if value is None else batch_of(tensors, value, prefix=f"{prefix}{_OTHER}.")
    if one.type == "int":
        if not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise ValueError(f"{one.name} is not a count")
        return value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{one.name} is not a list of names")
    return tuple(value)


def _given() -> Iterator[Field[Any]]:
    """The fields that are arguments of `Batch`."""
    return (one for one in fields(Batch) if one.init)
