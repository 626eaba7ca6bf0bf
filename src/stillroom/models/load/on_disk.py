"""A network whose weights stay in its files: which file holds which weight, under the model's own names.

The ordinary loader renames, merges and converts weights for some families. Here nothing is converted: a folder that
needs it is not read from disk, and the caller is told why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stillroom.config.schema import TeacherConfig
from stillroom.errors import BrokenAtStart
from stillroom.models.load.empty import empty_network
from stillroom.models.load.files import check_weight_files
from stillroom.models.load.kinds import read_config
from stillroom.models.load.open import CONSTANTS, explained
from stillroom.models.load.source import Source, fetch, runs_code

_NUMBERS = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class OnDisk:
    """A network without weights, and the file of each of its tensors."""

    network: Any
    files: Mapping[str, Path]
    notes: tuple[str, ...] = ()


def open_on_disk(section: TeacherConfig, dtype: torch.dtype) -> OnDisk | str:
    """The network and its files, or the reason why its weights have to be loaded and converted first."""
    source = fetch(section, section.model, weights=True)
    if source.is_gguf:
        return "the weights of a GGUF file are unpacked when they are loaded"
    if source.is_adapter:
        return "an adapter is merged into its base model when it is loaded"
    with explained(section.model, "weights"):
        config = read_config(section, source)
        if getattr(config, "quantization_config", None) is not None:
            raise BrokenAtStart(
                f"the weights of {section.model} are quantised: they cannot be read layer by layer",
                where="teacher.placement",
                advice=["--set teacher.placement=device", "use the model as it was before it was quantised"],
            )
        stored = _stored(source)
        network = empty_network(config, dtype, trust_remote_code=runs_code(section, source))
        reason = _difference(network, stored, dtype)
    if reason:
        return reason
    files = {name: source.folder / tensor.file for name, tensor in stored.items()}
    return OnDisk(network, files, (source.note,) if source.note else ())


@dataclass(frozen=True)
class _Stored:
    file: str
    kind: str
    shape: tuple[int, ...]


def _stored(source: Source) -> dict[str, _Stored]:
    found = {}
    for file in check_weight_files(source):
        with safe_open(source.folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                part = tensors.get_slice(name)
                found[name] = _Stored(file, str(part.get_dtype()), tuple(part.get_shape()))
    return found


def _difference(network: Any, stored: Mapping[str, _Stored], dtype: torch.dtype) -> str:
    """Why the files do not hold the network's tensors as they are; empty where they do."""
    if dtype != torch.float32 and (network._keep_in_fp32_modules or network._keep_in_fp32_modules_strict):
        return "some of its weights stay in FP32 whatever the dtype of the others"
    wanted = wanted_tensors(network)
    missing = [name for name, tensor in wanted.items() if name not in stored or stored[name].shape != tensor.shape]
    if missing:
        return f"its files name or cut {len(missing):,} of {len(wanted):,} weights otherwise than the model does"
    coded = [name for name in wanted if stored[name].kind not in _NUMBERS]
    if coded:
        return f"{coded[0]} is stored as {stored[coded[0]].kind}"
    ignored = [re.compile(pattern) for pattern in network._keys_to_ignore_on_load_unexpected or ()]
    own = network.state_dict().keys()
    unknown = [name for name in stored if name not in own and not CONSTANTS.search(name)]
    unknown = [name for name in unknown if not any(pattern.search(name) for pattern in ignored)]
    return f"its files hold {unknown[0]}, which the model does not have" if unknown else ""


def wanted_tensors(network: Any) -> dict[str, torch.Tensor]:
    """The tensors that a file must hold: each parameter once, and the buffers that are saved."""
    parameters = dict(network.named_parameters())
    kept = network.state_dict()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in kept}
    return {**parameters, **buffers}
