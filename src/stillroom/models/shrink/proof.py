"""Proof that a student cut in depth is its teacher with layers taken out.

Families number their layers in ways that no table knows in full, so each cut is compared with the teacher itself: the
tensors and settings of each layer, and the logits of a few tokens with the teacher's other layers left out. A cut that
is not equal is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.models.attention import NAME
from stillroom.models.shrink.bypass import Bypass, blocks_of, cannot_be_cut
from stillroom.models.shrink.layer_config import config_of_layers

# What a family raises when its configuration makes no model.
_NO_MODEL = (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, StrictDataclassError)

# Settings of a module that are not part of what it computes, or name its place.
_PLACE = ("training", "layer_idx", "layer_id", "layer_index", "gradient_checkpointing")

_NUM_TRIED = 12
# Logits may differ by the order of summation; a teacher in half precision also by rounding, and by an expert that wins
# by less than that. Two unrelated rows of logits differ by 1.4 of their spread.
_TOLERANCE = 1e-3
_TOLERANCE_HALF = 0.3


def built(teacher: Any, layers: Sequence[int], narrow: Callable[[Any], None] = lambda _text: None) -> Any:
    """A model of the teacher's class for these layers; its weights are not the teacher's yet."""
    text = teacher.config.get_text_config()
    if getattr(text, "scale_attn_by_inverse_layer_idx", False) and tuple(layers) != tuple(range(len(layers))):
        raise ConfigError(
            "this teacher scales attention by the number of the layer: layers from the middle cannot be taken out",
            where="student.shrink.layers",
            advice=[f"keep the first ones: student.shrink.layers = {list(range(len(layers)))}"],
        )
    try:
        config = config_of_layers(teacher.config, layers)
        narrow(config.get_text_config())
        if config._attn_implementation == NAME:
            config._attn_implementation = "sdpa"  # ours is chosen again when the student is made ready
        return type(teacher)(config)
    except _NO_MODEL as error:
        raise _makes_no_model(teacher, layers, error) from error


class Fit:
    """Whether a family can be cut to a set of layers. Layers that are all of one kind always can."""

    def __init__(self, teacher: Any) -> None:
        blocks = blocks_of(teacher)
        kinds = [_traits(block, with_numbers=True) for block in blocks]
        is_numbered = bool(getattr(teacher.config.get_text_config(), "scale_attn_by_inverse_layer_idx", False))
        self._teacher = teacher
        self._is_uniform = not is_numbered and all(kind == kinds[0] for kind in kinds)
        self._attending = {layer for layer, block in enumerate(blocks) if has_attention(block)}

    def __call__(self, layers: tuple[int, ...]) -> bool:
        if self._is_uniform:
            return True
        if self._attending and not self._attending & set(layers):
            return False  # a hybrid without attention has no cache that counts positions, and cannot generate
        try:
            with torch.device("meta"):  # shapes and settings alone
                student = built(self._teacher, layers)
            check_layers(self._teacher, student, layers)
        except ConfigError:
            return False
        return True


def has_attention(block: nn.Module) -> bool:
    return any(type(module).__name__.endswith("Attention") for module in block.modules())


def check_layers(teacher: Any, student: Any, layers: Sequence[int], *, with_numbers: bool = True) -> None:
    """Each layer of the student must be made like the one of the teacher that it comes from.

    `with_numbers` False leaves sizes out, for a student whose widths are cut too.
    """
    theirs = blocks_of(teacher)
    for place, (block, layer) in enumerate(zip(blocks_of(student), layers, strict=True)):
        mine, wanted = (_traits(of, with_numbers=with_numbers) for of in (block, theirs[layer]))
        odd = sorted(name for name in mine.keys() | wanted.keys() if mine.get(name) != wanted.get(name))
        if odd:
            raise cannot_be_cut(
                teacher,
                f"layer {layer} would be of another kind as layer {place} of the student: {', '.join(odd[:3])}",
                _advice(teacher),
            )


@torch.no_grad()
def check_logits(teacher: Any, student: Any, layers: Sequence[int]) -> None:
    """The student's logits must be those of the teacher with its other layers left out, with and without a cache."""
    device, dtype = next(teacher.parameters()).device, next(teacher.parameters()).dtype
    was_training = student.training
    student.eval()
    ids = torch.arange(2, 2 + _NUM_TRIED).remainder(student.get_output_embeddings().weight.shape[0]).unsqueeze(0)
    bypass = Bypass(teacher)
    with bypass.without(set(range(bypass.num_layers)) - set(layers)):
        expected = bypass.logits(ids.to(device)).cpu()
    if not bool(expected.isfinite().all()):
        raise BrokenAtStart(
            "the teacher's logits are not finite",
            where="student.shrink",
            advice=["load it in float32: --set teacher.dtype=float32", "check the model folder"],
        )
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_HALF
    for uses_cache in (False, True):
        try:
            found = student(input_ids=ids, use_cache=uses_cache).logits[0].float()
        except _NO_MODEL as error:
            raise _makes_no_model(teacher, layers, error) from error
        error_rms = float((found - expected).square().mean().sqrt() / expected.std().clamp_min(1e-30))
        if not error_rms <= tolerance:
            raise cannot_be_cut(
                teacher,
                f"with layers {list(layers)} its logits differ by {error_rms:.2g} of their spread from the teacher's "
                "with the other layers left out",
                _advice(teacher),
            )
    student.train(was_training)


def _traits(block: nn.Module, *, with_numbers: bool) -> dict[str, Any]:
    """What a layer is made of: shapes of its tensors, classes of its modules, and their plain settings."""
    kinds: tuple[type, ...] = (bool, str, int, float) if with_numbers else (bool, str)
    found: dict[str, Any] = {}
    for name, module in block.named_modules():
        found[name or "layer"] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, kinds) and not key.startswith("_") and key not in _PLACE:
                found[f"{name}.{key}" if name else key] = value
    if with_numbers:
        found.update({name: tuple(tensor.shape) for name, tensor in block.state_dict().items()})
    return found


def _advice(teacher: Any) -> tuple[str, ...]:
    text = teacher.config.get_text_config()
    kinds = next((getattr(text, name) for name in ("layers_block_type", "layer_types") if hasattr(text, name)), None)
    told = f" (they are {', '.join(map(str, kinds))})" if isinstance(kinds, list) else ""
    return (f"choose layers so that every kind has its place, with student.shrink.layers = [...]{told}",)


def _makes_no_model(teacher: Any, layers: Sequence[int], error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    return cannot_be_cut(teacher, f"with layers {list(layers)} it makes no model ({reason})", _advice(teacher))
