"""Choose the linear layers that an adapter is attached to, by name.

A layer whose weight is also another layer's (a tied head) is refused: merged, the change would reach both, while the
adapter reaches one. peft warns and merges wrongly.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.models.anatomy import layers_if_any

_WHERE = "student.adapter.targets"
_SHOWN = 24  # names in a message


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
            raise _nothing(pattern, linear)
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


def _nothing(pattern: str, linear: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"no linear layer of the student is called {pattern!r}", where=_WHERE, advice=[_available(linear)]
    )


def _available(linear: Sequence[str]) -> str:
    names = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"linear layers of the student: {', '.join(names[:_SHOWN])}{more}"


def tied_layers(network: Any) -> list[str]:
    """Layers of a network with an adapter whose frozen weight is also another layer's. They cannot be merged."""
    owners: dict[int, int] = {}
    for _name, parameter in network.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    found = []
    for name, module in network.named_modules():
        weight = getattr(getattr(module, "base_layer", None), "weight", None)
        if owners.get(id(weight), 0) > 1:
            found.append(name)
    return found


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


# -- patterns --------------------------------------------------------------------------------------
# Try the regular expressions of an adapter's configuration before peft matches names with them.
#
# They come with the adapter, and one that backtracks without end would hang the process: Python cannot interrupt a
# match.


_SECONDS = 5.0  # ordinary patterns take milliseconds for ten thousand names
_PLAIN = re.compile(r"[\w.\-]*")
# In the forms in which peft uses a pattern. One that does not compile is left for peft to report.
_TRIAL = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    start, end = rf"(?:^|.*?\.){pattern}", rf"{pattern}($|\..*)"
    for form in (pattern, rf"(.*\.)?({pattern})$", rf"(^|.*\.){end}", rf"{start}\.(?P<i>\d+)\."):
        for name in names:
            re.match(form, name), re.fullmatch(form, name)
"""


def check_patterns(config: Mapping[str, Any], names: Sequence[str], adapter: str) -> None:
    """Raise if a pattern does not come to an end on the names of a network's parts."""
    patterns = [pattern for pattern in _patterns(config) if not _PLAIN.fullmatch(pattern)]
    if not patterns:
        return
    trial = json.dumps([patterns, list(names)]).encode()
    command = [sys.executable, "-I", "-c", _TRIAL]
    try:
        subprocess.run(command, input=trial, timeout=_SECONDS, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        raise BrokenAtStart(
            f"adapter_config.json of {adapter} has a pattern that does not come to an end on the names of its base",
            where="target_modules, exclude_modules, rank_pattern ...",
            advice=["list the names of the layers in target_modules", "get the adapter from a place you trust"],
        ) from None


def _patterns(config: Mapping[str, Any]) -> list[str]:
    """Every string of a configuration that peft may use as a pattern."""
    keys = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters")
    found: list[Any] = []
    for key in (*keys, "rank_pattern", "alpha_pattern"):
        value = config.get(key)
        found += value if isinstance(value, list | dict) else [value]  # of a table, its keys
    return [pattern for pattern in found if isinstance(pattern, str)]


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
