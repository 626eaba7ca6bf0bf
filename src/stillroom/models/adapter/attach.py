"""Attach a low-rank adapter to a student: Hu et al. 2021 (LoRA), Liu et al. 2024 (DoRA), by peft.

The adapter is made of layers inside the network, which keeps its class: whoever runs the student does not know of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config.adapter import AdapterConfig
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.models.adapter.frozen_base import weights_identity
from stillroom.models.adapter.targets import choose_targets
from stillroom.models.load.open import explained

NAME = "default"  # peft's name of the one adapter
_TRIAL_LENGTH = 16
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
    num_base = sum(parameter.numel() for parameter in network.parameters())
    network.requires_grad_(False)
    identity = weights_identity(network)
    peft_config, targets = insert(network, config, name=name, seed=seed)
    peft_config.base_model_name_or_path = base_name
    adapter = Adapter(network, peft_config, targets, base_name, identity, ())
    _check_layers(adapter)
    notes = [_describe(config, adapter, num_base), *_try(adapter, name)]
    return Adapter(network, peft_config, targets, base_name, identity, tuple(notes))


def insert(network: Any, config: AdapterConfig, *, name: str, seed: int) -> tuple[Any, tuple[str, ...]]:
    """Put the adapter's layers into a frozen network. Return peft's configuration and the layers that were chosen."""
    inject, make_config = _peft(name)
    targets = choose_targets(network, config.targets)
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
        inject(peft_config, network)
    return peft_config, targets


def _peft(name: str) -> tuple[Any, Any]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise BrokenAtStart(f"student.adapter on {name} needs peft", advice=["pip install 'stillroom[peft]'"]) from None
    return inject_adapter_in_model, LoraConfig


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


def _try(adapter: Adapter, name: str) -> list[str]:
    """A backward pass on a few tokens: an adapter without a gradient is on a layer that the network does not call.

    Networks that read a layer's weight themselves pass the adapter by, and it would never learn.
    """
    network = adapter.network
    was_training = network.training
    ids = torch.arange(_TRIAL_LENGTH).unsqueeze(0) % int(network.get_input_embeddings().weight.shape[0])
    network.eval()
    try:
        with explained(name, "adapter"), torch.enable_grad():
            logits: Tensor = network(input_ids=ids.to(next(network.parameters()).device), use_cache=False).logits
            if logits.requires_grad:
                logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
        idle = [target for target, layer in adapter.layers() if layer.lora_B[NAME].weight.grad is None]
    finally:
        network.zero_grad(set_to_none=True)
        network.train(was_training)
    if len(idle) == len(adapter.targets):
        raise ConfigError(
            f"no adapted layer of {name} has a gradient: the network does not call {_listed(idle)} as a layer",
            where="student.adapter.targets",
            advice=["name other layers", "leave student.adapter out to train all weights"],
        )
    return [f"adapter: without a gradient on a trial row: {_listed(idle)}"] if idle else []


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
