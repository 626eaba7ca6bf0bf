"""Attach a low-rank adapter to a student: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA), by peft.

The adapter is made of layers inside the network, which keeps its class: whoever runs the student does not know of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stillroom.config.adapter import AdapterConfig
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.models.adapter.frozen_base import weights_identity
from stillroom.models.adapter.targets import choose_targets
from stillroom.models.load.open import explained
from stillroom.models.load.source import one_line

NAME = "default"  # peft's name of the one adapter
_SHOWN = 4


@dataclass(frozen=True)
class Adapter:
    """An adapter in a network."""

    network: Any
    peft_config: Any  # as peft writes it to adapter_config.json
    targets: tuple[str, ...]  # full names of the layers
    base_name: str  # what the base is loaded from; empty where it is in no folder of its own
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
    notes = [_describe(config, adapter, num_base)]
    if left_out:
        notes.append(f"adapter: not on layers that peft takes for parts of stacked experts: {listed(left_out)}")
    return Adapter(network, peft_config, targets, base_name, identity, tuple(notes))


def adapted_layers(network: Any, config: AdapterConfig, *, name: str) -> tuple[tuple[str, ...], list[str]]:
    """The layers that get an adapter, and those that peft cannot adapt under their own names."""
    _inject_in_model, make_config = _peft(name)
    targets, left_out = _named_as_layers(network, choose_targets(network, config.targets), make_config)
    if left_out and (config.targets or not targets):
        raise ConfigError(
            f"peft takes {left_out[0]} for a part of stacked experts, and would adapt those instead",
            where="student.adapter.targets",
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
        _inject(inject, peft_config, network, name)
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


def _inject(inject: Any, peft_config: Any, network: Any, name: str) -> None:
    try:
        inject(peft_config, network)
    except ValueError as error:  # peft's word for a layer that it does not adapt
        raise ConfigError(
            f"no adapter for {name}: {one_line(error)}",
            where="student.adapter.targets",
            advice=["name the layers in student.adapter.targets, without this one"],
        ) from error


def _check_layers(adapter: Adapter) -> None:
    """peft chooses by its own rules for names: they must have found the same layers."""
    found = {name for name, part in adapter.network.named_modules() if hasattr(part, "lora_A")}
    if found != set(adapter.targets):
        odd = sorted(found ^ set(adapter.targets))[:_SHOWN]
        raise BrokenAtStart(
            f"peft attaches the adapter to other layers than were chosen: {', '.join(odd)}",
            where="student.adapter.targets",
            advice=["name the layers in full in student.adapter.targets"],
        )


def _describe(config: AdapterConfig, adapter: Adapter, num_base: int) -> str:
    trained = adapter.num_trained
    return (
        f"adapter: {config.kind} of rank {config.rank} on {len(adapter.targets)} linear layers, "
        f"{trained:,} parameters are trained and {num_base:,} are frozen ({100 * trained / num_base:.2f} %)"
    )


def listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
