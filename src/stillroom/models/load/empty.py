"""A network of a configuration with real buffers and no weights, to be given weights from somewhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM


def empty_network(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """Its parameters are on the meta device. Buffers that no file holds, such as rotary tables, are computed."""
    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return network.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter goes to the meta device when a module takes it, before it is initialised."""
    kind: Any = nn.Module
    register = kind.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    kind.register_parameter = register_on_meta
    try:
        yield
    finally:
        kind.register_parameter = register
