"""Try an adapter before anything is trained: is each adapted layer reached, and would the merged student answer alike?

A network that reads a layer's weight itself passes the adapter by: it never learns there, and what is merged differs
from what was trained. Found at the end of a run, that would cost the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stillroom.errors import ConfigError
from stillroom.models.adapter.attach import NAME, Adapter, listed
from stillroom.models.adapter.merge import merged
from stillroom.models.load.open import explained
from stillroom.models.load.read_back import BOUND

_LENGTH = 16
_SEED = 20_241
_SCALE = 0.02  # of the weights that the trial gives to what is zero before training


def try_adapter(adapter: Adapter, name: str) -> list[str]:
    """Notes about layers that have no gradient. Raise if none has, or if a merge would change the answers.

    Weights, random state and mode of the network are left as they were.
    """
    network = adapter.network
    was_training = network.training
    ids = (torch.arange(2 * _LENGTH) % int(network.get_input_embeddings().weight.shape[0])).view(2, _LENGTH)
    ids = ids.to(next(network.parameters()).device)
    network.eval()
    try:
        with explained(name, "adapter"), torch.random.fork_rng(devices=[]):
            idle = _without_gradient(adapter, ids)
            difference, spread = _difference_of_merging(adapter, ids)
    finally:
        network.train(was_training)
    if len(idle) == len(adapter.targets):
        raise ConfigError(
            f"no adapted layer of {name} has a gradient: the network does not call {listed(idle)} as a layer",
            where="student.adapter.targets",
            advice=["name other layers", "leave student.adapter out to train all weights"],
        )
    if not difference <= BOUND * max(spread, 1e-6):
        raise ConfigError(
            f"merged, the adapter of {name} would not answer as it was trained: logits differ by {difference:.2g} at a "
            f"spread of {spread:.2g}" + (f"; the network does not call {listed(idle)} as a layer" if idle else ""),
            where="student.adapter.targets",
            advice=["name other layers: the projections of the attention, say"],
        )
    return [f"adapter: without a gradient on a trial row: {listed(idle)}"] if idle else []


def _without_gradient(adapter: Adapter, ids: Tensor) -> list[str]:
    """Adapted layers that a backward pass on the rows does not reach."""
    with torch.enable_grad():
        logits = _logits(adapter.network, ids)
        if logits.requires_grad:
            logits.square().mean().backward()  # type: ignore[no-untyped-call]
    idle = [target for target, layer in adapter.layers() if layer.lora_B[NAME].weight.grad is None]
    adapter.network.zero_grad(set_to_none=True)
    return idle


@torch.no_grad()
def _difference_of_merging(adapter: Adapter, ids: Tensor) -> tuple[float, float]:
    """The largest difference of the logits when an adapter that does something is merged, and their spread."""
    generator = torch.Generator().manual_seed(_SEED)
    zeros = [layer.lora_B[NAME].weight for _name, layer in adapter.layers()]
    try:
        for weight in zeros:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(_SCALE * drawn)
        trained = _logits(adapter.network, ids)
        with merged(adapter):
            written = _logits(adapter.network, ids)
    finally:
        for weight in zeros:
            weight.zero_()
    return float((trained - written).abs().max()), float(trained.std())


def _logits(network: Any, ids: Tensor) -> Tensor:
    answer: Tensor = network(input_ids=ids, use_cache=False).logits.float()
    return answer
