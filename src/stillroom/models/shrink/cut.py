"""Cut a student from its teacher: fewer layers, and in supported families fewer channels, neurons and heads.

The student starts with the teacher's weights, which helps more than any change of loss (Muralidharan et al. 2024).
The result is an ordinary model of the teacher's family.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config.schema import ShrinkConfig
from stillroom.errors import ConfigError
from stillroom.models.anatomy import anatomy_of, layers_of
from stillroom.models.shrink.bypass import Bypass, blocks_of, cannot_be_cut
from stillroom.models.shrink.layer_choice import Choice, Tell, choose_layers
from stillroom.models.shrink.passages import passages
from stillroom.models.shrink.proof import Fit, built, check_layers, check_logits
from stillroom.models.shrink.width import Keep, check_widths, choose, measure, shrink_config, shrink_tensor
from stillroom.types import Batch


@dataclass(frozen=True)
class Cut:
    """The student, the teacher's layers it keeps, and a line for the log."""

    model: Any
    choice: Choice
    summary: str

    @property
    def kept_layers(self) -> tuple[int, ...]:
        return self.choice.layers

    @property
    def notes(self) -> tuple[str, ...]:
        if self.choice.method in ("all", "given"):
            return (self.summary, *self.choice.why)
        return (self.summary, *(f"layers kept by {self.choice.method}: {text}" for text in self.choice.why))


def cut(
    teacher: Any,
    wanted: ShrinkConfig,
    batches: Iterable[Batch] = (),
    *,
    choice: Choice | None = None,
    tell: Tell = lambda _text: None,
) -> Cut:
    """Make a smaller model of the teacher's family, in FP32, from the teacher's weights.

    `batches` are the text on which layers and channels are ranked. A `choice` that was made before is used unchanged.
    """
    if wanted.cuts_width:
        check_widths(teacher, wanted)
    was_training = teacher.training
    teacher.eval()
    try:
        return _cut(teacher, wanted, list(batches), choice, tell)
    finally:
        teacher.train(was_training)


def _cut(teacher: Any, wanted: ShrinkConfig, batches: list[Batch], choice: Choice | None, tell: Tell) -> Cut:
    if choice is None:
        device = next(teacher.parameters()).device
        texts = passages(batches, wanted.choice_tokens, device)
        choice = choose_layers(teacher, wanted, texts, Fit(teacher), tell)
    layers = choice.layers
    keep = Keep()
    if wanted.cuts_width:
        removed = set(range(len(blocks_of(teacher)))) - set(layers)
        with Bypass(teacher).without(removed):  # rank for the student, not for the whole teacher
            importance = measure(teacher, batches)
        keep = choose(teacher, wanted, importance, layers)
    student = built(teacher, layers, lambda text: shrink_config(text, wanted)).float()
    _undo_rescaling(teacher)
    _check_fit(teacher, student, _fill(teacher, student, layers, keep))
    check_layers(teacher, student, layers, with_numbers=not wanted.cuts_width)
    if not wanted.cuts_width:
        check_logits(teacher, student, layers)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return Cut(student, choice, _summary(teacher, student, layers, wanted))


@torch.no_grad()
def _fill(teacher: Any, student: Any, layers: tuple[int, ...], keep: Keep) -> list[str]:
    """Copy the teacher's weights into the student. Return the names of tensors without a counterpart of their shape."""
    source, prefix = teacher.state_dict(), _prefix(teacher)
    misfits = []
    for name, target in student.state_dict().items():
        layer, origin = None, name
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            layer, origin = int(number), f"{prefix}{layers[int(number)]}.{rest}"
        weight: Tensor | None = source.get(origin)
        weight = None if weight is None else shrink_tensor(name, weight.float(), keep, layer)
        if weight is None or weight.shape != target.shape:
            misfits.append(name)
        else:
            target.copy_(weight)
    return misfits


def _undo_rescaling(teacher: Any) -> None:
    """RWKV divides weights of later layers in place in evaluation mode; its training mode multiplies them back."""
    for module in teacher.modules():
        if getattr(module, "layers_are_rescaled", False):
            module.training = True
            module._rescale_layers()
            module.training = False


def _prefix(model: Any) -> str:
    """The prefix of the parameter names of a model's layers."""
    first = layers_of(model)[0]
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is first:
            return f"{name}."
    raise LookupError(f"the layers of {type(model).__name__} have no name")


def _check_fit(teacher: Any, student: Any, misfits: list[str]) -> None:
    if misfits:
        raise cannot_be_cut(
            teacher,
            f"the layers differ from one another, and {', '.join(misfits[:3])} has no counterpart",
            ("choose layers of the right kinds with student.shrink.layers = [...]",),
        )
    if anatomy_of(student).is_tied != anatomy_of(teacher).is_tied:
        raise ConfigError("the teacher ties its embeddings in a way that a cut does not keep", where="student.shrink")


def _summary(teacher: Any, student: Any, layers: tuple[int, ...], wanted: ShrinkConfig) -> str:
    before, after = anatomy_of(teacher), anatomy_of(student)
    parts = [f"layers {', '.join(map(str, layers))} of {before.num_layers}"]
    for name, value in (("width", wanted.width), ("mlp width", wanted.mlp_width), ("heads", wanted.heads)):
        if value:
            parts.append(f"{name} {value:,}")
    dtype = str(next(teacher.parameters()).dtype).removeprefix("torch.")
    size = f"{after.num_parameters:,} of {before.num_parameters:,} parameters"
    summary = f"student cut from the teacher's {dtype} weights: {'; '.join(parts)}; {size}"
    return summary if after.num_parameters < before.num_parameters else f"{summary}: nothing was cut, it is a copy"
