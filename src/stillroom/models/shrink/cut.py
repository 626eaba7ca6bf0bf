"""Cut a student from its teacher: fewer layers, and in supported families fewer channels, neurons and heads.

The student starts with the teacher's weights, which helps more than any change of loss (Muralidharan et al. 2024).
The result is an ordinary model of the teacher's family.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import Batch, Detail
from stillroom.models.anatomy import anatomy_of, in_eval_mode, layers_of
from stillroom.models.load import not_finite_advice
from stillroom.models.routers import Gate
from stillroom.models.shrink.cut_budget import Counter, candidates
from stillroom.models.shrink.experts import Kept, choose_experts, gates_to_cut, kept_rows, without_experts
from stillroom.models.shrink.layer_choice import (
    BUDGET_CPU,
    BUDGET_GPU,
    CHOICE_TOKENS,
    Bypass,
    Choice,
    Passage,
    Tell,
    blocks_of,
    cannot_be_cut,
    choose_layers,
    mean_loss,
    num_positions,
    num_scored,
    passages,
)
from stillroom.models.shrink.width import (
    Importance,
    Keep,
    check_widths,
    choose,
    config_of_layers,
    measure,
    shrink_config,
    shrink_tensor,
)
from stillroom.models.student import NAME

# -- proof -----------------------------------------------------------------------------------------
# Check that a student cut in depth equals its teacher without the removed layers.
#
# No table covers all the ways in which families number their layers, so compare each cut with the teacher: the
# tensors and settings of each layer, and the logits of a few tokens with the teacher's other layers left out. Refuse
# a cut that differs.


# What a family raises if its configuration is not valid.
_NO_MODEL = (ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError, StrictDataclassError)

# Attributes of a module that do not change what it computes, or that are its number.
_PLACE = ("training", "layer_idx", "layer_id", "layer_index", "gradient_checkpointing")

_NUM_TRIED = 12
# In standard deviations of the logits, which differ by the order of summation; for a teacher in half precision also by
# rounding, and by experts chosen differently because of it. Unrelated logits differ by 1.4.
_TOLERANCE = 1e-3
_TOLERANCE_HALF = 0.3


def built(teacher: Any, layers: Sequence[int], narrow: Callable[[Any], None] = lambda _text: None) -> Any:
    """A model of the teacher's class for these layers, with random weights."""
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
        if hasattr(config, "validate"):
            config.validate()  # as when it is saved, but before it is trained
        if config._attn_implementation == NAME:
            config._attn_implementation = "sdpa"  # ours is set when the student is prepared for training
        return type(teacher)(config)
    except _NO_MODEL as error:
        raise _makes_no_model(teacher, layers, error) from error


class Fit:
    """Whether a family can be cut to a set of layers. Always True if all layers are of one kind."""

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
            return False  # a hybrid without attention cannot generate: its cache does not count positions
        try:
            with torch.device("meta"):  # no weights
                student = built(self._teacher, layers)
            check_layers(self._teacher, student, layers)
        except ConfigError:
            return False
        return True


def has_attention(block: nn.Module) -> bool:
    return any(type(module).__name__.endswith("Attention") for module in block.modules())


def check_layers(teacher: Any, student: Any, layers: Sequence[int], *, with_numbers: bool = True) -> None:
    """Raise if a layer of the student differs in structure from the teacher's layer it comes from.

    `with_numbers` False ignores sizes, for a student whose widths are cut too.
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
def check_logits(
    teacher: Any, student: Any, layers: Sequence[int], gates: Sequence[Gate] = (), experts: Kept | None = None
) -> None:
    """Raise if the student's logits, with or without a cache, differ from the teacher's without its other layers.

    `experts` are those kept of a mixture with these gates.
    """
    device, dtype = next(teacher.parameters()).device, next(teacher.parameters()).dtype
    ids = torch.arange(2, 2 + _NUM_TRIED).remainder(student.get_output_embeddings().weight.shape[0]).unsqueeze(0)
    bypass = Bypass(teacher)
    with bypass.without(set(range(bypass.num_layers)) - set(layers)), without_experts(gates, experts or {}):
        expected = bypass.logits(ids.to(device)).cpu()
    if not bool(expected.isfinite().all()):
        raise BrokenAtStart(
            "the teacher's logits are not finite",
            where="student.shrink",
            advice=not_finite_advice(dtype),
        )
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_HALF
    for uses_cache in (False, True):
        try:
            with in_eval_mode(student):
                logits = student(input_ids=ids, use_cache=uses_cache).logits[0].float()
        except _NO_MODEL as error:
            raise _makes_no_model(teacher, layers, error) from error
        error_rms = float((logits - expected).square().mean().sqrt() / expected.std().clamp_min(1e-30))
        if not error_rms <= tolerance:
            raise cannot_be_cut(
                teacher,
                f"with layers {list(layers)} its logits differ by {error_rms:.2g} of their spread from the teacher's "
                f"with the other layers {'and experts ' if experts else ''}left out",
                ("leave student.shrink.experts out",) if experts else _advice(teacher),
            )


def _traits(block: nn.Module, *, with_numbers: bool) -> dict[str, Any]:
    """A layer's tensor shapes, module classes, and their plain attributes."""
    kinds: tuple[type, ...] = (bool, str, int, float) if with_numbers else (bool, str)
    traits: dict[str, Any] = {}
    for name, module in block.named_modules():
        traits[name or "layer"] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, kinds) and not key.startswith("_") and key not in _PLACE:
                traits[f"{name}.{key}" if name else key] = value
    if with_numbers:
        traits.update({name: tuple(tensor.shape) for name, tensor in block.state_dict().items()})
    return traits


def _advice(teacher: Any) -> tuple[str, ...]:
    text = teacher.config.get_text_config()
    kinds = next((getattr(text, name) for name in ("layers_block_type", "layer_types") if hasattr(text, name)), None)
    listed = f" (they are {', '.join(map(str, kinds))})" if isinstance(kinds, list) else ""
    return (f"choose layers so that every kind has its place, with student.shrink.layers = [...]{listed}",)


def _makes_no_model(teacher: Any, layers: Sequence[int], error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines[:2]) or 'no reason given'}"
    return cannot_be_cut(teacher, f"with layers {list(layers)} it makes no model ({reason})", _advice(teacher))


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
        return (self.summary, *(Detail(f"layers kept by {self.choice.method}: {text}") for text in self.choice.why))


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
    with in_eval_mode(teacher):
        return _cut(teacher, wanted, list(batches), choice, tell)


def _cut(teacher: Any, wanted: ShrinkConfig, batches: list[Batch], choice: Choice | None, tell: Tell) -> Cut:
    def without(layers: tuple[int, ...]) -> AbstractContextManager[None]:
        return Bypass(teacher).without(set(range(len(blocks_of(teacher)))) - set(layers))

    def measured(layers: tuple[int, ...]) -> Importance:
        with without(layers):  # rank for the student, not for the whole teacher
            return measure(teacher, batches)

    def make(sizes: ShrinkConfig, layers: tuple[int, ...], importance: Importance | None) -> Any:
        keep = Keep() if importance is None else choose(teacher, sizes, importance, layers)
        student = built(teacher, layers, lambda text: shrink_config(text, sizes)).float()
        _undo_rescaling(teacher)
        _check_fit(teacher, student, _fill(teacher, student, layers, keep, experts))
        return student

    gates = gates_to_cut(teacher, wanted.experts) if wanted.experts else []
    experts: Kept = {}
    if choice is None and wanted.to:
        choice = _choose_to_budget(teacher, wanted, batches, tell, measure=measured, make=make)
    elif choice is None:
        texts = passages(batches, CHOICE_TOKENS, next(teacher.parameters()).device)
        choice = choose_layers(teacher, wanted, texts, Fit(teacher), tell)
    layers, wanted = choice.layers, wanted.model_copy(update=choice.sizes)
    if gates:
        with without(layers):
            experts = choose_experts(teacher, gates, wanted.experts, batches)
    student = make(wanted, layers, measured(layers) if wanted.cuts_width else None)
    check_layers(teacher, student, layers, with_numbers=not (wanted.cuts_width or gates))
    if not wanted.cuts_width:
        check_logits(teacher, student, layers, gates, experts)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return Cut(student, choice, _summary(teacher, student, layers, wanted))


def _choose_to_budget(
    teacher: Any,
    wanted: ShrinkConfig,
    batches: Sequence[Batch],
    tell: Tell,
    *,
    measure: Callable[[tuple[int, ...]], Importance],
    make: Callable[[ShrinkConfig, tuple[int, ...], Importance | None], Any],
) -> Choice:
    """Choose layers and sizes. `measure` gives the importance of widths with some layers; `make` cuts a student."""
    found = candidates(teacher, wanted)
    device = next(teacher.parameters()).device
    texts = passages(batches, CHOICE_TOKENS, device)
    deepest = min(found, key=lambda one: one.layers)
    choice = choose_layers(teacher, deepest, texts, Fit(teacher), tell)
    if len(found) == 1 and not found[0].cuts_width:
        return choice
    texts = _affordable(texts, len(found) * Counter(teacher)(found[0]), device)
    tell(f"choosing among {len(found)} students within {wanted.to} by loss on {num_scored(texts):,} tokens")
    rows: list[dict[str, Any]] = []
    importance: dict[int, Importance] = {}
    for one in found:
        assert isinstance(one.layers, int)
        layers = choice.at_depth(one.layers, Counter(teacher).num_layers)
        if one.cuts_width and one.layers not in importance:
            importance[one.layers] = measure(layers)
        student = make(one, layers, importance.get(one.layers))
        sizes = {name: getattr(one, name) for name in ("width", "mlp_width", "heads")}
        parameters = anatomy_of(student).num_parameters
        rows.append(
            {"layers": one.layers, **sizes, "parameters": parameters, "loss": mean_loss(student.to(device), texts)}
        )
    row = min(rows, key=lambda row: row["loss"])  # of equals the first
    others = ", ".join(f"{one['loss']:.3f}" for one in rows if one is not row)
    why = (
        f"of {len(rows)} students within {wanted.to} the one with the lowest loss on {num_scored(texts):,} tokens, "
        f"{row['loss']:.3f}; the others have {others}"
    )
    return replace(
        choice,
        layers=choice.at_depth(row["layers"], Counter(teacher).num_layers),
        sizes={name: row[name] for name in ("width", "mlp_width", "heads")},
        candidates=tuple(rows),
        why=(why, *choice.why),
    )


def _affordable(texts: list[Passage], parameters: int, device: torch.device) -> list[Passage]:
    """As many passages as candidates of so many parameters together can read, at least one."""
    limit = (BUDGET_CPU if device.type == "cpu" else BUDGET_GPU) / (2.0 * parameters)
    return [text for place, text in enumerate(texts) if not place or num_positions(texts[: place + 1]) <= limit]


@torch.no_grad()
def _fill(teacher: Any, student: Any, layers: tuple[int, ...], keep: Keep, experts: Kept) -> list[str]:
    """Copy the teacher's weights into the student. Return the names of tensors without a counterpart of their shape."""
    source, prefix = teacher.state_dict(), _prefix(teacher)
    misfits = []
    for name, target in student.state_dict().items():
        layer, origin = None, name
        if name.startswith(prefix):
            number, rest = name.removeprefix(prefix).split(".", 1)
            layer, origin = int(number), f"{prefix}{layers[int(number)]}.{rest}"
        weight: Tensor | None = source.get(origin)
        if weight is not None and experts:
            weight = kept_rows(origin, weight, len(target) if target.ndim else 0, experts)
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
    for name, value in (
        ("width", wanted.width),
        ("mlp width", wanted.mlp_width),
        ("heads", wanted.heads),
        ("experts", wanted.experts),
    ):
        if value:
            parts.append(f"{name} {value:,}")
    dtype = str(next(teacher.parameters()).dtype).removeprefix("torch.")
    size = f"{after.num_parameters:,} of {before.num_parameters:,} parameters"
    whole = "an earlier student" if wanted.of_layers else "the teacher"
    summary = f"student cut from {whole}'s {dtype} weights: {'; '.join(parts)}; {size}"
    return summary if after.num_parameters < before.num_parameters else f"{summary}: nothing was cut, it is a copy"
