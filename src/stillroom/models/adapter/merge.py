"""Write a student with an adapter as a plain folder: merged, read back, and compared by its answers.

Merged in FP32 whatever the base is stored in: a change that is small beside a weight would be rounded away in FP16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stillroom.errors import CannotSave
from stillroom.models.adapter.attach import NAME, Adapter
from stillroom.models.adapter.frozen_base import widened
from stillroom.models.load.read_back import compare_logits, in_main_memory, logits_of

FOLDER = "adapter"  # inside the student's folder


def save_merged(adapter: Adapter, folder: Path, ids: Tensor) -> str:
    """Write the merged student to a folder and the adapter to a folder in it. Return a note about their difference.

    `ids` [B, L] are tokens that both are compared on. Raise if they differ. The network is left as it was.
    """
    network = adapter.network
    was_training = network.training
    network.eval()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), widened(network), in_main_memory(network):
            trained = logits_of(network, ids)
            with merged(adapter):
                network.save_pretrained(folder)
            save_adapter(adapter, folder / FOLDER)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            written = logits_of(type(network).from_pretrained(folder, dtype=torch.float32).eval(), ids)
    finally:
        network.train(was_training)
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
