"""Cut channels, neurons and heads; keep those with the largest activations on real text.

Importance is the mean absolute activation over a few batches (Muralidharan et al. 2024): of a channel of the residual
stream, after the norms; of a neuron, before the MLP's last matrix; of a group of heads, before attention's last matrix.
Channels are chosen once for the whole model, because every layer reads and writes the same stream; neurons and heads
are chosen in each layer separately.

A norm divides by the root mean square over all channels. Correct the gain of each norm by the share of the energy in
the removed channels, so that the remaining ones keep their size: removing channels that are 0 changes nothing.

Legend: D width, M neurons, H heads, G query heads for each key-value head, E size of a head.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch
from stillroom.models.anatomy import backbone, in_eval_mode, layers_of

CALIBRATION_BATCHES = 8  # of training data that the importance of widths is measured on
# Families whose blocks match the table below exactly, and whose forward pass uses no other width.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of their number in configurations

# The axes of each tensor, by the end of its name. The size of a head is never cut.
_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(embed_tokens|lm_head)\.weight$", ("vocabulary", "width")),
    (r"(^|\.)norm\.weight$|_layernorm\.weight$", ("width",)),
    (r"q_proj\.weight$", ("queries", "width")),
    (r"[kv]_proj\.weight$", ("keys", "width")),
    (r"q_proj\.bias$", ("queries",)),
    (r"[kv]_proj\.bias$", ("keys",)),
    (r"o_proj\.weight$", ("width", "queries")),
    (r"[qk]_norm\.weight$", ("head",)),
    (r"(gate|up)_proj\.weight$", ("neurons", "width")),
    (r"(gate|up)_proj\.bias$", ("neurons",)),
    (r"down_proj\.weight$", ("width", "neurons")),
    (r"(o|down)_proj\.bias$", ("width",)),
)


@dataclass(frozen=True)
class Keep:
    """Indices kept on each axis, for the student's layers in order. An axis that is not listed is kept whole."""

    width: Tensor | None = None
    neurons: tuple[Tensor, ...] = ()
    queries: tuple[Tensor, ...] = ()
    keys: tuple[Tensor, ...] = ()
    gains: dict[str, float] = field(default_factory=dict)  # factor on a norm's gain, by the norm's name in the student

    @property
    def is_everything(self) -> bool:
        return self.width is None and not (self.neurons or self.queries)

    def along(self, axis: str, layer: int | None) -> Tensor | None:
        if axis == "width":
            return self.width
        chosen: tuple[Tensor, ...] = {"neurons": self.neurons, "queries": self.queries, "keys": self.keys}.get(axis, ())
        return chosen[layer] if chosen and layer is not None else None


@dataclass
class Importance:
    """Sums over positions. Layers are the teacher's."""

    num_positions: int = 0
    channels: dict[str, Tensor] = field(default_factory=dict)  # norm's name -> sum of |output| [D]
    energy: dict[str, Tensor] = field(default_factory=dict)  # norm's name -> sum of x^2 / |x|^2 of its input [D]
    neurons: dict[int, Tensor] = field(default_factory=dict)  # [M]
    queries: dict[int, Tensor] = field(default_factory=dict)  # [H * E]


# -- is it possible --------------------------------------------------------------------------------------


def check_widths(teacher: Any, wanted: ShrinkConfig) -> None:
    """Raise if the widths cannot be cut, before anything is measured."""
    config = teacher.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"the widths of {config.model_type} are not described: only its layers can be cut",
            where="student.shrink",
            advice=["set student.shrink.layers alone", f"families whose widths can be cut: {', '.join(FAMILIES)}"],
        )
    sizes = (
        ("width", wanted.width, int(config.hidden_size)),
        ("mlp_width", wanted.mlp_width, int(config.intermediate_size)),
        ("heads", wanted.heads, int(config.num_attention_heads)),
    )
    for name, size, whole in sizes:
        if size > whole:
            raise ConfigError(
                f"student.shrink.{name} is {size:,} and the teacher has {whole:,}",
                where=f"student.shrink.{name}",
                advice=[f"choose at most {whole:,}, or 0 to keep it whole"],
            )
    groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
    if wanted.heads % groups:
        raise ConfigError(
            f"{groups} query heads share one key-value head: {wanted.heads} heads would split a group",
            where="student.shrink.heads",
            advice=[f"choose a multiple of {groups}"],
        )


# -- what matters ----------------------------------------------------------------------------------------


@torch.no_grad()
def measure(teacher: Any, batches: Iterable[Batch]) -> Importance:
    """Run the batches through the teacher; sum the activations of channels, neurons and heads, without padding."""
    importance = Importance()
    device = next(teacher.parameters()).device
    for batch in batches:
        places = batch.attention_mask.reshape(-1).nonzero().squeeze(-1).to(device)
        importance.num_positions += int(places.numel())
        with in_eval_mode(teacher), _recording(teacher, importance, places):
            backbone(teacher)(input_ids=batch.input_ids.to(device), use_cache=False)
    if not importance.num_positions:
        raise ConfigError(
            "a width is cut by what the teacher says on real text, and there is no text",
            where="student.shrink",
            advice=["give data.train"],
        )
    return importance


@contextmanager
def _recording(teacher: Any, importance: Importance, places: Tensor) -> Iterator[None]:
    def chosen(states: Tensor) -> Tensor:
        return states.reshape(-1, states.shape[-1]).index_select(0, places).float()

    def norm(name: str) -> Any:
        def hook(_module: Any, inputs: Any, output: Tensor) -> None:
            _add(importance.channels, name, chosen(output).abs().sum(0))
            energy = chosen(inputs[0]).square()
            _add(importance.energy, name, (energy / energy.sum(1, keepdim=True).clamp_min(1e-30)).sum(0))

        return hook

    def last_matrix(sums: dict[int, Tensor], layer: int) -> Any:
        def hook(_module: Any, inputs: Any) -> None:
            _add(sums, layer, chosen(inputs[0]).abs().sum(0))

        return hook

    handles = []
    for name, module in teacher.named_modules():
        if re.search(r"(^|\.)norm$|_layernorm$", name):
            handles.append(module.register_forward_hook(norm(name)))
    for layer, block in enumerate(layers_of(teacher)):
        for name, sums in (("mlp.down_proj", importance.neurons), ("self_attn.o_proj", importance.queries)):
            handles.append(block.get_submodule(name).register_forward_pre_hook(last_matrix(sums, layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


# -- what stays ------------------------------------------------------------------------------------------


def choose(teacher: Any, wanted: ShrinkConfig, importance: Importance, layers: Sequence[int]) -> Keep:
    """The channels, neurons and heads with the highest importance, in their original order."""
    config = teacher.config.get_text_config()
    width, gains = None, {}
    if wanted.width and wanted.width < int(config.hidden_size):
        sums_by_norm = {name: sums for name, sums in importance.channels.items() if _student_name(name, layers)}
        width = _strongest(torch.stack(list(sums_by_norm.values())).sum(0), wanted.width)
        for name in sums_by_norm:
            share = float(importance.energy[name][width].sum()) / importance.num_positions
            gains[f"{_student_name(name, layers)}.weight"] = (share * config.hidden_size / wanted.width) ** 0.5
    neurons: tuple[Tensor, ...] = ()
    if wanted.mlp_width:
        neurons = tuple(_strongest(importance.neurons[layer], wanted.mlp_width) for layer in layers)
    queries: tuple[Tensor, ...] = ()
    keys: tuple[Tensor, ...] = ()
    if wanted.heads:
        groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
        size = importance.queries[layers[0]].numel() // int(config.num_attention_heads)
        heads = [
            _strongest(importance.queries[layer].view(-1, groups * size).sum(1), wanted.heads // groups)
            for layer in layers
        ]
        queries = tuple(_entries(group, groups * size) for group in heads)
        keys = tuple(_entries(group, size) for group in heads)
    return Keep(width, neurons, queries, keys, gains)


def _strongest(importance: Tensor, number: int) -> Tensor:
    return importance.argsort(descending=True, stable=True)[:number].sort().values


def _entries(groups: Tensor, size: int) -> Tensor:
    """The indices of all entries of these groups of `size`."""
    return (groups[:, None] * size + torch.arange(size, device=groups.device)).reshape(-1)


def _student_name(name: str, layers: Sequence[int]) -> str:
    """The name in the student of a norm of the teacher; empty if its layer is not kept."""
    match = re.search(r"\blayers\.(\d+)\.", name)
    if not match:
        return name
    layer = int(match[1])
    return f"{name[: match.start(1)]}{layers.index(layer)}{name[match.end(1) :]}" if layer in layers else ""


# -- the cut ---------------------------------------------------------------------------------------------


def shrink_config(config: Any, wanted: ShrinkConfig) -> None:
    """Write the new sizes into a configuration, and the size of a head, which would else be derived from the width."""
    for name in EXPERTS:
        if wanted.experts and name in vars(config):
            setattr(config, name, wanted.experts)
    if not wanted.cuts_width:
        return
    groups = int(config.num_attention_heads) // int(config.num_key_value_heads)
    config.head_dim = getattr(config, "head_dim", None) or int(config.hidden_size) // int(config.num_attention_heads)
    if wanted.width:
        config.hidden_size = wanted.width
    if wanted.mlp_width:
        config.intermediate_size = wanted.mlp_width
    if wanted.heads:
        config.num_attention_heads = wanted.heads
        config.num_key_value_heads = wanted.heads // groups


def kept_size(name: str, shape: Sequence[int], config: Any, wanted: ShrinkConfig) -> int:
    """The number of elements that `shrink_tensor` keeps of a tensor of the teacher."""
    if not wanted.cuts_width:
        return math.prod(shape)
    whole_heads = int(config.num_attention_heads)
    heads = wanted.heads or whole_heads
    sizes = {"width": wanted.width, "neurons": wanted.mlp_width}
    axes = next(axes for pattern, axes in _AXES if re.search(pattern, name))
    kept = [sizes.get(axis) or size for axis, size in zip(axes, shape, strict=True)]
    parts = [heads / whole_heads if axis in ("queries", "keys") else 1.0 for axis in axes]
    return math.prod(round(size * part) for size, part in zip(kept, parts, strict=True))


def shrink_tensor(name: str, tensor: Tensor, keep: Keep, layer: int | None) -> Tensor | None:
    """The kept part of a tensor; None if a width is cut and the table does not list the tensor."""
    if keep.is_everything:
        return tensor
    axes = next((axes for pattern, axes in _AXES if re.search(pattern, name)), None)
    if axes is None or len(axes) != tensor.ndim:
        return None
    for dimension, axis in enumerate(axes):
        index = keep.along(axis, layer)
        if index is not None:
            tensor = tensor.index_select(dimension, index.to(tensor.device))
    return tensor * keep.gains[name] if name in keep.gains else tensor


# -- layer config ----------------------------------------------------------------------------------
# Rewrite a model's configuration for a subset of its layers.
#
# Families encode the kind of each layer differently: a list with an entry for each layer, a list of layer numbers, a
# count of leading layers, a period. Each is rewritten for the layers kept. What a family's settings cannot express
# stays unchanged; `models/shrink/cut.py` then finds that the layers differ from the teacher's, and refuses.


# One entry for each layer.
_FOR_EACH_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "activation_sparsity_pattern",
)  # fmt: skip
# Numbers of layers.
_LAYER_NUMBERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
# Number of leading layers of another kind.
_LEADING = ("first_k_dense_replace", "num_dense_layers")
# Layers with number % period == offset are of another kind.
_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """A copy of a model's configuration for these layers, as it would be after saving and loading."""
    new = copy.deepcopy(config)
    text = new.get_text_config()
    num_layers = int(text.num_hidden_layers)
    if vars(text).get("rescale_every"):
        # RWKV halves weights in place in evaluation mode, against FP16 overflow: a student saved then would be wrong.
        text.rescale_every = 0
    if tuple(layers) == tuple(range(num_layers)):
        return _read_back(new)
    own = vars(text)
    for name in _FOR_EACH_LAYER:
        if isinstance(own.get(name), list | tuple) and len(own[name]) >= num_layers:
            setattr(text, name, [own[name][layer] for layer in layers])
    _rewrite_sparse_step(text, num_layers)
    for name in _LAYER_NUMBERS:
        if own.get(name):
            setattr(text, name, [place for place, layer in enumerate(layers) if layer in own[name]])
    for name in _LEADING:
        if own.get(name):
            setattr(text, name, sum(layer < own[name] for layer in layers))
    for names in _PERIODS:
        _rewrite_period(text, names, layers)
    _rewrite_range(text, layers)
    _rewrite_tiles(text, layers, num_layers)
    text.num_hidden_layers = len(layers)
    return _read_back(new)


def _read_back(config: Any) -> Any:
    """The configuration as it would be after saving and loading: derived values are computed again."""
    loaded = type(config).from_dict(config.to_dict())
    loaded._attn_implementation = config._attn_implementation
    return loaded


def _rewrite_sparse_step(text: Any, num_layers: int) -> None:
    """Rewrite "every nth layer is sparse" as a list of the dense layers."""
    step = vars(text).get("decoder_sparse_step")
    if not step or step == 1 or not isinstance(vars(text).get("mlp_only_layers"), list):
        return
    dense = {layer for layer in range(num_layers) if (layer + 1) % step} | set(text.mlp_only_layers)
    text.mlp_only_layers = sorted(dense)
    text.decoder_sparse_step = 1


def _rewrite_period(text: Any, names: tuple[str, str], layers: Sequence[int]) -> None:
    period, offset = (vars(text).get(name) for name in names)
    if not period or offset is None:
        return
    rewritten = find_period([layer % period == offset for layer in layers])
    if rewritten is not None:
        for name, value in zip(names, rewritten, strict=True):
            setattr(text, name, value)


def find_period(marks: Sequence[bool]) -> tuple[int, int] | None:
    """The smallest period, with its offset, that gives exactly the marked layers; None if there is none."""
    for period in range(1, len(marks) + 2):
        for offset in range(period):
            if all((place % period == offset) == mark for place, mark in enumerate(marks)):
                return period, offset
    return None


def _rewrite_range(text: Any, layers: Sequence[int]) -> None:
    """Rewrite a range of sparse layers."""
    own = vars(text)
    first, last = own.get("moe_layer_start_index"), own.get("moe_layer_end_index")
    if first is None or last is None or own.get("moe_layer_interval", 1) != 1:
        return
    last = max(layers) if last < 0 else last
    inside = [place for place, layer in enumerate(layers) if first <= layer <= last]
    text.moe_layer_start_index = inside[0] if inside else len(layers)
    text.moe_layer_end_index = inside[-1] if inside else len(layers)


def _rewrite_tiles(text: Any, layers: Sequence[int], num_layers: int) -> None:
    """Write out a pattern of layer kinds that the family repeats."""
    own = vars(text)
    tile = own.get("block_types")
    if isinstance(tile, list | tuple) and tile:
        text.block_types = [tile[layer % len(tile)] for layer in layers]
    kinds = own.get("attention_layers")
    if isinstance(kinds, list) and len(kinds) == num_layers and "attention_types" in own:
        text.attention_types = [[[kinds[layer]], 1] for layer in layers]
        text.attention_layers = [kinds[layer] for layer in layers]
