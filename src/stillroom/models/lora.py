"""Attach a low-rank adapter to a student: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA), by peft.

The adapter is made of layers inside the network, which keeps its class: whoever runs the student does not know of it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stillroom.config.schema import AdapterConfig
from stillroom.core.errors import BrokenAtStart, CannotSave, ConfigError
from stillroom.models.anatomy import in_eval_mode, layers_if_any
from stillroom.models.check import ReadBack, compare_logits, in_main_memory, logits_of
from stillroom.models.coded import WidenedLinear, coded, widened
from stillroom.models.files import listed, one_line
from stillroom.models.load import explained

_WHERE = "student.adapter.targets"
NAME = "default"  # peft's name of the one adapter
_SHOWN = 4


@dataclass(frozen=True)
class Adapter:
    """An adapter in a network."""

    network: Any
    peft_config: Any  # as peft writes it to adapter_config.json
    targets: tuple[str, ...]  # full names of the layers
    base_name: str  # what the base is loaded from; empty where it has no folder
    base_identity: str  # hash of the frozen weights as they were loaded, in FP32
    notes: tuple[str, ...]
    outline: Any = None  # the network without values, where the network itself is sharded

    def layers(self) -> Iterator[tuple[str, Any]]:
        """The adapted layers by name. Each has its frozen layer as `base_layer`."""
        for name in self.targets:
            yield name, self.network.get_submodule(name)

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)


def attach(network: Any, config: AdapterConfig, *, name: str, base_name: str, seed: int) -> Adapter:
    """Freeze a network and attach an adapter to it. Before the first update it changes no answer.

    Its weights depend on the seed alone. `base_name` is what peft may load the base from.
    """
    targets, left_out = adapted_layers(network, config, name=name)
    num_base = sum(parameter.numel() for parameter in network.parameters())
    network.requires_grad_(False)
    identity = weights_identity(network)
    peft_config = insert(network, config, targets, name=name, seed=seed)
    peft_config.base_model_name_or_path = base_name
    adapter = Adapter(network, peft_config, targets, base_name, identity, ())
    _check_layers(adapter)
    notes = [
        f"adapter: {config.kind} of rank {config.rank} on {len(targets)} linear layers, "
        f"{adapter.num_trained:,} parameters are trained and {num_base:,} are frozen "
        f"({100 * adapter.num_trained / num_base:.2f} %)"
    ]
    if left_out:
        notes.append(f"adapter: not on layers that peft takes for parts of stacked experts: {listed(left_out, _SHOWN)}")
    return replace(adapter, notes=tuple(notes))


def adapted_layers(network: Any, config: AdapterConfig, *, name: str) -> tuple[tuple[str, ...], list[str]]:
    """The layers that get an adapter, and those that peft cannot adapt under their own names."""
    _inject_in_model, make_config = _peft(name)
    targets, left_out = _named_as_layers(network, choose_targets(network, config.targets), make_config)
    if left_out and (config.targets or not targets):
        raise ConfigError(
            f"peft takes {left_out[0]} for a part of stacked experts, and would adapt those instead",
            where=_WHERE,
            advice=["leave it out of student.adapter.targets", "name the layers of the attention alone"],
        )
    return targets, left_out


def insert(network: Any, config: AdapterConfig, targets: Sequence[str], *, name: str, seed: int) -> Any:
    """Put the adapter's layers into a frozen network. Return peft's configuration."""
    inject, make_config = _peft(name)
    peft_config = make_config(
        r=config.rank,
        lora_alpha=config.scaled_alpha,
        lora_dropout=config.dropout,
        target_modules=list(targets),
        use_dora=config.kind == "dora",
        fan_in_fan_out=not isinstance(network.get_submodule(targets[0]), nn.Linear),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with explained(name, "adapter"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out of mixed layers, which peft then sets right
        torch.manual_seed(seed)
        try:
            inject(peft_config, network)
        except ValueError as error:  # peft's word for a layer that it does not adapt
            raise ConfigError(
                f"no adapter for {name}: {one_line(error)}",
                where=_WHERE,
                advice=["name the layers in student.adapter.targets, without this one"],
            ) from error
    return peft_config


def _peft(name: str) -> tuple[Any, Any]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise BrokenAtStart(f"student.adapter on {name} needs peft", advice=["pip install 'stillroom[peft]'"]) from None
    return inject_adapter_in_model, LoraConfig


def _named_as_layers(network: Any, names: Sequence[str], make_config: Any) -> tuple[tuple[str, ...], list[str]]:
    """The names that mean a layer to peft, and those that mean something else.

    In families whose experts became stacked tensors, peft reads names like gate_proj, anywhere, as those tensors. It
    does so again when an adapter is loaded, so such layers cannot be adapted under their own names.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # a version that does not do this
        return tuple(names), []
    kept: list[str] = []
    left_out: list[str] = []
    for name in names:
        alone = make_config(target_modules=[name])
        try:
            convert(alone, network, None)
        except ValueError:  # it is a part of what is stacked, and the other parts are not named
            alone.target_modules = ()
        (kept if name in alone.target_modules else left_out).append(name)
    return tuple(kept), left_out


def _check_layers(adapter: Adapter) -> None:
    """peft chooses by its own rules for names: they must have found the same layers."""
    found = {name for name, part in adapter.network.named_modules() if hasattr(part, "lora_A")}
    if found != set(adapter.targets):
        odd = sorted(found ^ set(adapter.targets))[:_SHOWN]
        raise BrokenAtStart(
            f"peft attaches the adapter to other layers than were chosen: {', '.join(odd)}",
            where=_WHERE,
            advice=["name the layers in full in student.adapter.targets"],
        )


# -- targets ---------------------------------------------------------------------------------------------
# Choose the linear layers that get an adapter, by name. A layer whose weight is also another layer's (a tied head) is
# refused: merged, the change would reach both, while the adapter reaches one. peft warns and merges wrongly.


def choose_targets(network: Any, patterns: Sequence[str]) -> tuple[str, ...]:
    """Full names of the layers, in the network's order. No pattern: all linear layers of the decoder's blocks."""
    linear = {name: module for name, module in network.named_modules() if is_linear(module)}
    if patterns:
        chosen = _matching(network, list(linear), patterns)
    else:
        blocks = {id(part) for block in layers_if_any(network) for part in block.modules()}
        head = network.get_output_embeddings()
        chosen = [name for name, part in linear.items() if (id(part) in blocks if blocks else part is not head)]
    if not chosen:
        raise ConfigError(
            f"{type(network).__name__} has no linear layer in its blocks for an adapter",
            where=_WHERE,
            advice=["leave student.adapter out to train all weights"],
        )
    for name in chosen:
        _check_sharing(network, name)
    return tuple(chosen)


def is_linear(module: nn.Module) -> bool:
    """A linear layer. A subclass must also answer as one does: the routers of some families are such subclasses."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    return isinstance(module, nn.Linear) and _answers_linearly(module)


@torch.no_grad()
def _answers_linearly(layer: nn.Linear) -> bool:
    try:
        answer = layer(layer.weight.new_zeros(1, 1, layer.in_features))
    except (RuntimeError, TypeError, ValueError, IndexError):  # it wants another input
        return False
    return isinstance(answer, Tensor) and answer.shape == (1, 1, layer.out_features)


def _matching(network: Any, linear: Sequence[str], patterns: Sequence[str]) -> list[str]:
    named = [name for name, module in network.named_modules() if name and not isinstance(module, nn.ModuleList)]
    for pattern in patterns:
        if any(_matches(name, pattern) for name in linear):
            continue
        others = [name for name in named if _matches(name, pattern)]
        if not others:
            what = f"no linear layer of the student is called {pattern!r}"
            raise ConfigError(what, where=_WHERE, advice=[_available(linear)])
        _check_sharing(network, others[0])
        kind = type(network.get_submodule(others[0])).__name__
        raise ConfigError(
            f"{others[0]} is a {kind} and no linear layer: an adapter is attached to linear layers only",
            where=_WHERE,
            advice=[_available(linear)],
        )
    return [name for name in linear if any(_matches(name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith(f".{pattern}")


def _available(linear: Sequence[str]) -> str:
    names = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    return f"linear layers of the student: {listed(names, 24)}"


def _check_sharing(network: Any, name: str) -> None:
    """Raise if the layer, or its weight, is in the network under a second name."""
    layer = network.get_submodule(name)
    twice = [other for other, part in network.named_modules(remove_duplicate=False) if part is layer and other != name]
    weight = getattr(layer, "weight", None)
    if weight is not None and not twice:
        everywhere = network.named_parameters(remove_duplicate=False)
        names = [other.rpartition(".")[0] for other, part in everywhere if part is weight]
        twice = [other for other in names if other != name]
    if twice:
        raise ConfigError(
            f"{name} has the same weight as {twice[0]} (they are tied): an adapter on one of them, merged, would "
            "change both",
            where=_WHERE,
            advice=["leave it out of student.adapter.targets", "leave targets out: all linear layers of the blocks"],
        )


# -- frozen base -----------------------------------------------------------------------------------
# The weights under an adapter: their identity, and the dtype they are stored in.
#
# They never change, so they are in no checkpoint: a hash says which they are, and a run is continued on those alone.


@torch.no_grad()
def weights_identity(network: Any) -> str:
    """A hash over name, type, shape and bytes of every weight and persistent buffer, as they are in memory now."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


@torch.no_grad()
def store_base(network: Any, dtype: torch.dtype | str, *, whole: bool, has_values: bool = True) -> int:
    """Store frozen weights in a dtype; return how many numbers that are. Adapters stay in FP32.

    `whole`: all of them, and the network then computes in that dtype. Else the matrices of linear layers alone, which
    autocast casts anyway; embeddings, norms, the head and other kinds of layers stay in FP32. int8 are codes with a
    scale for each output, the name of a block format codes with a scale for each block. A network of shapes alone has
    no values that could be out of range.
    """
    layers: dict[str, nn.Linear] = {}
    if whole:
        chosen = dict(network.named_parameters())
    else:
        kept = {id(part.weight) for part in (network.get_input_embeddings(), network.get_output_embeddings())}
        found = {name: part for name, part in network.named_modules() if type(part) is nn.Linear}
        layers = {name: part for name, part in found.items() if id(part.weight) not in kept}
        chosen = {f"{name}.weight": part.weight for name, part in layers.items()}
    if dtype == torch.int8 or isinstance(dtype, str):
        return _store_codes(network, layers, dtype if isinstance(dtype, str) else "int8")
    num_stored = 0
    for name, weight in chosen.items():
        if weight.requires_grad or not weight.is_floating_point() or weight.dtype == dtype:
            continue
        if has_values:
            _check_range(name, weight, dtype)
        weight.data = weight.data.to(dtype)
        num_stored += weight.numel()
    for name, part in layers.items():
        if part.weight.dtype in (torch.float16, torch.bfloat16):
            network.set_submodule(name, WidenedLinear(part))
    return num_stored


def _store_codes(network: Any, layers: dict[str, nn.Linear], kind: str) -> int:
    frozen = {name: part for name, part in layers.items() if not part.weight.requires_grad}
    if not frozen:
        raise BrokenAtStart(
            f"a {type(network).__name__} has no linear layers that could be stored in {kind}",
            where="student.adapter.base_dtype",
            advice=["--set student.adapter.base_dtype=float16"],
        )
    num_stored = sum(part.weight.numel() for part in frozen.values())
    for name, part in frozen.items():
        network.set_submodule(name, coded(part, kind, name, where="student.adapter.base_dtype"))
    return num_stored


def _check_range(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise BrokenAtStart(
            f"the frozen weight {name} reaches {largest:.3g}, which {str(dtype).removeprefix('torch.')} cannot hold",
            where="student.adapter.base_dtype",
            advice=["--precision fp32 with student.adapter.base_dtype = 'float32'", "--precision bf16-mixed"],
        )


# -- merge -----------------------------------------------------------------------------------------
# Write a student with an adapter as a plain folder: merged, read back, and compared by its answers.
#
# Merged in FP32 whatever the base is stored in: a change far smaller than its weight would be rounded away in FP16.


FOLDER = "adapter"  # inside the student's folder


def save_merged(adapter: Adapter, folder: Path, ids: Tensor) -> str:
    """Write the merged student to a folder and the adapter to a folder in it. Return a note about their difference.

    `ids` [B, L] are tokens that both are compared on. Raise if they differ. The network is left as it was.
    """
    network = adapter.network
    with in_eval_mode(network), torch.random.fork_rng(devices=[]), torch.no_grad():
        with widened(network), in_main_memory(network):
            trained = logits_of(network, ids)
            with merged(adapter):
                network.save_pretrained(folder)
            save_adapter(adapter, folder / FOLDER)
        written = logits_of(type(network).from_pretrained(folder, dtype=torch.float32).eval(), ids)
    return compare(trained, written)


def compare(trained: Tensor, written: Tensor) -> str:
    """A sentence about the largest difference of two answers. Raise if it is above the bound, or not finite."""
    found = compare_logits(trained, written)
    if not found.is_equal:
        raise CannotSave(
            f"the merged student does not answer like the trained one: {found.reason}",
            where="student.adapter",
            advice=["the adapter is in the checkpoints: stillroom resume the run with another version of peft"],
        )
    return f"adapter: merged into the student that is written; logits differ by {found.difference:.1e} at most"


@contextmanager
def merged(adapter: Adapter) -> Iterator[Any]:
    """In the body the network has plain layers with the merged weights. After it, its own, to the last bit."""
    network = adapter.network
    layers = dict(adapter.layers())
    kept = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    peft_config = vars(network).pop("peft_config", None)
    try:
        for name, layer in layers.items():
            layer.merge(safe_merge=True)  # into a copy of the weight
            network.set_submodule(name, layer.get_base_layer())
        yield network
    finally:
        for name, layer in layers.items():
            network.set_submodule(name, layer)
            layer.merged_adapters.clear()
            layer.get_base_layer().weight.data = kept[name]
        if peft_config is not None:
            network.peft_config = peft_config


def save_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the adapter alone, as peft reads it."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(adapter.network, adapter_name=NAME, save_embedding_layers=False)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter.peft_config.save_pretrained(folder)
    written = {"base_model": adapter.base_name or None, "base_sha256_32": adapter.base_identity}
    (folder / "base.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


# -- adapter trial ---------------------------------------------------------------------------------
# Try an adapter before anything is trained: is each adapted layer reached, and would the merged student answer alike?
#
# A network that reads a layer's weight itself passes the adapter by: it never learns there, and what is merged
# differs from what was trained. Found at the end of a run, that would cost the run.


_LENGTH = 16
_SEED = 20_241
_SCALE = 0.02  # of the weights that the trial gives to what is zero before training


def try_adapter(adapter: Adapter, name: str) -> list[str]:
    """Notes about layers that have no gradient. Raise if none has, or if a merge would change the answers.

    Weights, random state and mode of the network are left as they were.
    """
    network = adapter.network
    ids = (torch.arange(2 * _LENGTH) % int(network.get_input_embeddings().weight.shape[0])).view(2, _LENGTH)
    ids = ids.to(next(network.parameters()).device)
    with in_eval_mode(network), explained(name, "adapter"), torch.random.fork_rng(devices=[]):
        idle = _without_gradient(adapter, ids)
        found = _compare_merged(adapter, ids)
    if len(idle) == len(adapter.targets):
        raise ConfigError(
            f"no adapted layer of {name} has a gradient: the network does not call {listed(idle, _SHOWN)} as a layer",
            where=_WHERE,
            advice=["name other layers", "leave student.adapter out to train all weights"],
        )
    if not found.is_equal:
        raise ConfigError(
            f"merged, the adapter of {name} would not answer as it was trained: {found.reason}"
            + (f"; the network does not call {listed(idle, _SHOWN)} as a layer" if idle else ""),
            where=_WHERE,
            advice=["name other layers: the projections of the attention, say"],
        )
    return [f"adapter: without a gradient on a trial row: {listed(idle, _SHOWN)}"] if idle else []


def _without_gradient(adapter: Adapter, ids: Tensor) -> list[str]:
    """Adapted layers that a backward pass on the rows does not reach."""
    with torch.enable_grad():
        logits = logits_of(adapter.network, ids)
        if logits.requires_grad:
            logits.square().mean().backward()  # type: ignore[no-untyped-call]
    idle = [target for target, layer in adapter.layers() if layer.lora_B[NAME].weight.grad is None]
    adapter.network.zero_grad(set_to_none=True)
    return idle


@torch.no_grad()
def _compare_merged(adapter: Adapter, ids: Tensor) -> ReadBack:
    """Compare the logits before and after an adapter that does something is merged."""
    generator = torch.Generator().manual_seed(_SEED)
    zeros = [layer.lora_B[NAME].weight for _name, layer in adapter.layers()]
    try:
        for weight in zeros:
            weight.copy_(_SCALE * torch.randn(weight.shape, generator=generator))
        trained = logits_of(adapter.network, ids)
        with merged(adapter):
            written = logits_of(adapter.network, ids)
    finally:
        for weight in zeros:
            weight.zero_()
    return compare_logits(trained, written)


# -- outline ---------------------------------------------------------------------------------------
# A network without values: its layers as they are, its parameters without memory, to be filled from a file.
#
# Where a student is sharded, no process has a network that could be merged and written. An outline is taken before it
# is sharded, with the adapter and the stored base in place, and filled at the end.


def outline_of(network: Any) -> Any:
    """A copy whose parameters are on the meta device, tied ones tied. Buffers are copied: they are small."""
    memo: dict[int, Any] = {
        id(one): nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad) for one in network.parameters()
    }
    return copy.deepcopy(network, memo)


@torch.no_grad()
def fill(outline: Any, values: Mapping[str, Tensor]) -> None:
    """Give every parameter its value, and every buffer that has one; a tied parameter has one name."""
    made = {
        id(one): nn.Parameter(values[name], requires_grad=one.requires_grad) for name, one in outline.named_parameters()
    }
    for module in outline.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made[id(parameter)]
    for name, buffer in outline.named_buffers():
        if name in values:
            buffer.copy_(values[name])
