"""A student cut from its teacher: fewer layers, and where the family is described, fewer channels, neurons and heads.

What is kept are the teacher's own weights, so the student begins near what it is to learn instead of nowhere: worth
more than any change of loss (Muralidharan et al. 2024). The result is an ordinary model of the teacher's family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config.schema import ShrinkConfig
from stillroom.errors import ConfigError
from stillroom.models import probe
from stillroom.models.attention import NAME
from stillroom.models.shrink_width import Keep, check_widths, choose, measure, shrink_config, shrink_tensor
from stillroom.types import Batch

# One entry for each layer, and lists of layer numbers: both are rewritten for the layers that stay.
_FOR_EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_LAYER_NUMBERS = ("mlp_only_layers",)


@dataclass(frozen=True)
class Cut:
    """The student, which of the teacher's layers its own once were, and a sentence for the log."""

    model: Any
    kept_layers: tuple[int, ...]
    told: str


def kept_layers(wanted: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The teacher's layers that stay, counted from 0. 0 keeps all.

    A number takes that many at equal steps from the first to the last: those two do what no other layer does, next to
    the embedding and next to the head.
    """
    where = "student.shrink.layers"
    if isinstance(wanted, int):
        if not 0 <= wanted <= num_layers:
            raise ConfigError(
                f"{wanted} layers cannot be kept of a teacher that has {num_layers}",
                where=where,
                advice=[f"choose from 1 to {num_layers}"],
            )
        if wanted in (0, num_layers):
            return tuple(range(num_layers))
        if wanted == 1:
            return (0,)
        return tuple((2 * i * (num_layers - 1) + wanted - 1) // (2 * (wanted - 1)) for i in range(wanted))
    chosen = tuple(wanted)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ConfigError(
            f"layers {list(chosen)} are not ascending numbers of the teacher's {num_layers} layers",
            where=where,
            advice=[
                f"list each layer once, in order, from 0 to {num_layers - 1}",
                f"for example [0, {num_layers - 1}]",
            ],
        )
    return chosen


def cut(teacher: Any, wanted: ShrinkConfig, batches: Iterable[Batch] = ()) -> Cut:
    """A smaller model of the teacher's family, in FP32, with the teacher's weights where it has any.

    `batches` tell which channels matter; they are looked at only where a width is cut.
    """
    blocks = probe.layers(teacher)
    layers = kept_layers(wanted.layers, len(blocks))
    keep = Keep()
    if wanted.cuts_width:
        check_widths(teacher, wanted)
        keep = choose(teacher, wanted, measure(teacher, batches), layers)
    config = _config_of(teacher, layers, wanted)
    student = type(teacher)(config).float()
    _check_fit(teacher, student, _fill(teacher, student, layers, keep))
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return Cut(student, layers, _told(teacher, student, layers, wanted))


def _config_of(teacher: Any, layers: tuple[int, ...], wanted: ShrinkConfig) -> Any:
    config = copy.deepcopy(teacher.config)
    text = config.get_text_config()
    if getattr(text, "scale_attn_by_inverse_layer_idx", False) and layers != tuple(range(len(layers))):
        raise ConfigError(
            "this teacher scales attention by the number of the layer: layers from the middle cannot be taken out",
            where="student.shrink.layers",
            advice=[f"keep the first ones: student.shrink.layers = {list(range(len(layers)))}"],
        )
    text.num_hidden_layers = len(layers)
    for name in _FOR_EACH_LAYER:
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, [getattr(text, name)[layer] for layer in layers])
    for name in _LAYER_NUMBERS:
        if getattr(text, name, None):
            setattr(text, name, [layers.index(layer) for layer in getattr(text, name) if layer in layers])
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = sum(layer < text.first_k_dense_replace for layer in layers)
    shrink_config(text, wanted)
    if config._attn_implementation == NAME:
        config._attn_implementation = "sdpa"  # ours is chosen again when the student is made ready
    return config


@torch.no_grad()
def _fill(teacher: Any, student: Any, layers: tuple[int, ...], keep: Keep) -> list[str]:
    """Copy what is kept into the student; returns the tensors that found no counterpart of their shape."""
    source, prefix = teacher.state_dict(), _prefix(teacher)
    misfits = []
    for name, target in student.state_dict().items():
        layer, origin = None, name
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            layer, origin = int(number), f"{prefix}{layers[int(number)]}.{rest}"
        found: Tensor | None = source.get(origin)
        found = None if found is None else shrink_tensor(name, found.float(), keep, layer)
        if found is None or found.shape != target.shape:
            misfits.append(name)
        else:
            target.copy_(found)
    return misfits


def _prefix(model: Any) -> str:
    """How the names of a model's layers begin."""
    first = probe.layers(model)[0]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is first:
            return f"{name}."
    raise LookupError(f"the layers of {type(model).__name__} have no name")


def _check_fit(teacher: Any, student: Any, misfits: list[str]) -> None:
    if misfits:
        raise ConfigError(
            f"a cut {probe.anatomy(teacher).family} does not fit its own configuration: {', '.join(misfits[:3])}",
            where="student.shrink",
            advice=["its layers differ from one another: choose layers of one kind with student.shrink.layers = [...]"],
        )
    if probe.anatomy(student).is_tied != probe.anatomy(teacher).is_tied:
        raise ConfigError("the teacher ties its embeddings in a way that a cut does not keep", where="student.shrink")


def _told(teacher: Any, student: Any, layers: tuple[int, ...], wanted: ShrinkConfig) -> str:
    before, after = probe.anatomy(teacher), probe.anatomy(student)
    parts = [f"layers {', '.join(map(str, layers))} of {before.num_layers}"]
    for name, value in (("width", wanted.width), ("mlp width", wanted.mlp_width), ("heads", wanted.heads)):
        if value:
            parts.append(f"{name} {value:,}")
    dtype = str(next(teacher.parameters()).dtype).removeprefix("torch.")
    size = f"{after.num_parameters:,} of {before.num_parameters:,} parameters"
    told = f"student cut from the teacher's {dtype} weights: {'; '.join(parts)}; {size}"
    return told if after.num_parameters < before.num_parameters else f"{told}: nothing was cut, it is a copy"
