"""A teacher whose layers come to the device one at a time, for a model that does not fit there.

The weights of its layers stay in its safetensors files, or in main memory where the files have to be converted. A
layer's weights come to the device when its forward begins and are let go of when it ends, and a thread reads those of
the next layer meanwhile: at most two layers are in memory beside the files. Embeddings, norms and the head stay.

A batch reads all layers once. On a CPU, where each row of a sparse signal is asked by itself, each row does: the
products of a row of a few hundred tokens take longer than reading the weights, and the thread hides it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stillroom.config.schema import TeacherConfig
from stillroom.errors import BrokenAtStart, StillroomError
from stillroom.files import reason_of
from stillroom.models import LoadedModel, load_teacher, load_tokenizer, try_model
from stillroom.models.anatomy import layers_if_any
from stillroom.models.load.on_disk import OnDisk, open_on_disk, wanted_tensors
from stillroom.teachers.placement import Placement

_ADVICE = ["--set teacher.placement=offload", "write its answers to disk on a larger machine: stillroom cache"]


class Shelf(Protocol):
    """Where the weights of layers lie."""

    where: str

    def read(self, name: str, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """A weight in main memory; pinned where it will be copied to a card."""


class FileShelf:
    """Safetensors. A file is mapped only while it is read, so what was read does not stay in main memory."""

    where = "in its files"

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def read(self, name: str, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as opened:
                mapped: Tensor = opened.get_tensor(name)
                weight = mapped.to(dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise BrokenAtStart(
                f"{name} of the teacher cannot be read from its file any more: {reason_of(error)}",
                where=str(path),
                advice=["put the file back; `stillroom resume` continues the run"],
            ) from error
        return weight.pin_memory() if is_pinned else weight


class MemoryShelf:
    """Main memory. Where the device is main memory too, the weight itself is handed out."""

    where = "in main memory"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)

    def read(self, name: str, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        weight = self._weights[name]
        if is_pinned and not weight.is_pinned():
            weight = self._weights[name] = weight.pin_memory()
        return weight.to(dtype)


@dataclass(frozen=True)
class _Weight:
    """A weight of one layer: its name, and every module that has it."""

    name: str
    owners: tuple[tuple[nn.Module, str], ...]

    def put(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter

    @property
    def here(self) -> nn.Parameter:
        module, attribute = self.owners[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter


class Streamed(Placement):
    """Brings the weights of each layer for its forward, and sends them off again.

    While a layer is away its parameters are placeholders on the meta device; their dtype is the one it comes in.
    """

    writes_text = False  # each token would read every layer

    def __init__(self, network: Any, layers: Sequence[nn.Module], shelf: Shelf) -> None:
        self._network, self._shelf = network, shelf
        self._device = torch.device("cpu")
        self._weights = _weights_of(network, layers)
        self._placeholders = [[_placeholder(weight.here) for weight in held] for held in self._weights]
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[list[Tensor]]] | None = None
        self._bytes: dict[int, int] = {}  # of the layers that are in memory or being read
        self.names = {weight.name for held in self._weights for weight in held}
        self.reset_counts()
        self._hooks: list[RemovableHandle] = []
        for index, layer in enumerate(layers):
            self._send_off(index)
            self._hooks.append(layer.register_forward_pre_hook(self._entering(index)))
            self._hooks.append(layer.register_forward_hook(self._leaving(index), always_call=True))

    def reset_counts(self) -> None:
        self.peak_layers = self.peak_bytes = self.num_reads = 0

    # -- as a placement ----------------------------------------------------------------------------------

    def settle(self, device: torch.device) -> None:
        """Move what stays to the device; layers come there from now on."""
        self._forget_ahead()
        for module in self._network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    module._parameters[name].data = parameter.data.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        self._device = device

    def stop(self) -> None:
        """From now on layers neither come nor go by themselves; the caller may `bring` each for good."""
        self._forget_ahead()
        for hook in self._hooks:
            hook.remove()
        if self._reader is not None:
            self._reader.shutdown()

    def bring(self, index: int) -> None:
        """Put a layer's weights on the device."""
        for weight, values in zip(self._weights[index], self._taken(index), strict=True):
            # On the stream of the layer before, so that they go where its weights were.
            there = values.to(self._device, non_blocking=True)
            weight.put(nn.Parameter(there, requires_grad=False))

    def note(self) -> str:
        sizes = [sum(_bytes_of(placeholder) for placeholder in held) for held in self._placeholders]
        stays = sum(_bytes_of(weight) for weight in self._network.parameters() if not weight.is_meta)
        two = max((sum(pair) for pair in pairwise(sizes)), default=sum(sizes))
        return (
            f"the teacher's {len(sizes)} layers ({sum(sizes) / 1e6:,.1f} MB) stay {self._shelf.where}; at most two "
            f"({two / 1e6:,.1f} MB) are brought in at once, beside {stays / 1e6:,.1f} MB that stay on the device"
        )

    def facts(self) -> dict[str, Any]:
        return {
            "teacher_streaming": {
                "layers": len(self._weights),
                "stored": self._shelf.where,
                "peak_layers": self.peak_layers,
                "peak_bytes": self.peak_bytes,
                "layers_read": self.num_reads,
            }
        }

    # -- a forward ---------------------------------------------------------------------------------------

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, _inputs: Any) -> None:
            self.bring(index)
            if index + 1 < len(self._weights):
                self._read_ahead(index + 1)

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def hook(_layer: nn.Module, _inputs: Any, _output: Any) -> None:
            self._send_off(index)

        return hook

    def _send_off(self, index: int) -> None:
        for weight, placeholder in zip(self._weights[index], self._placeholders[index], strict=True):
            weight.put(placeholder)
        self._bytes.pop(index, None)

    # -- reading -----------------------------------------------------------------------------------------

    def _taken(self, index: int) -> list[Tensor]:
        if self._ahead is not None and self._ahead[0] == index:
            future, self._ahead = self._ahead[1], None
            return future.result()
        self._forget_ahead()
        return self._read(index, self._expect(index))

    def _read_ahead(self, index: int) -> None:
        self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="teacher-layers")
        self._ahead = index, self._reader.submit(self._read, index, self._expect(index))

    def _forget_ahead(self) -> None:
        """Drop a layer that was read ahead and is not the next: a forward that failed, or goes another way."""
        if self._ahead is not None:
            index, future = self._ahead
            self._ahead = None
            if not future.cancel():
                future.exception()
            self._bytes.pop(index, None)

    def _expect(self, index: int) -> list[torch.dtype]:
        """Count a layer as on its way. The dtypes it comes in."""
        self._bytes[index] = sum(_bytes_of(placeholder) for placeholder in self._placeholders[index])
        self.peak_layers = max(self.peak_layers, len(self._bytes))
        self.peak_bytes = max(self.peak_bytes, sum(self._bytes.values()))
        self.num_reads += 1
        return [placeholder.dtype for placeholder in self._placeholders[index]]

    @torch.no_grad()
    def _read(self, index: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        is_pinned = self._device.type == "cuda"
        pairs = zip(self._weights[index], dtypes, strict=True)
        return [self._shelf.read(weight.name, dtype, is_pinned=is_pinned) for weight, dtype in pairs]


def _weights_of(network: Any, layers: Sequence[nn.Module]) -> list[list[_Weight]]:
    """The weights that each layer has for itself. Those that several parts share stay on the device."""
    owners = _owners(network)
    inside = [{id(module) for module in layer.modules()} for layer in layers]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    uses = Counter(id(parameter) for layer in layers for parameter in {*layer.parameters()})
    return [
        [
            _Weight(names[id(parameter)], tuple(owners[id(parameter)]))
            for parameter in layer.parameters()
            if uses[id(parameter)] == 1 and all(id(module) in own for module, _ in owners[id(parameter)])
        ]
        for layer, own in zip(layers, inside, strict=True)
    ]


def _owners(network: Any) -> dict[int, list[tuple[nn.Module, str]]]:
    """Every module that has a parameter, by the parameter's id: tied weights have several."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in network.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, attribute))
    return owners


def _placeholder(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- opening ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamedModel(LoadedModel):
    """A tested network whose layers are streamed."""

    stream: Streamed | None = None


def open_streamed(
    section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None, *, is_to_stay: bool = True
) -> StreamedModel:
    """Open a teacher whose layers stay where they are, and test it by streaming it.

    Without `is_to_stay` the caller puts the layers elsewhere, one by one.
    """
    tokenizer = tokenizer or load_tokenizer(section, section.model)
    found = open_on_disk(section, dtype)
    if isinstance(found, OnDisk):
        network, notes, shelf = found.network, list(found.notes), FileShelf(found.files)
        network.requires_grad_(False)
        stream = _streamed(section, network, shelf)
        _load_rest(network, stream, shelf)
    else:
        network, notes = load_teacher(section, dtype)
        notes.append(f"the teacher's layers are loaded into main memory and not streamed from its files: {found}")
        stream = _streamed(section, network, MemoryShelf(dict(network.named_parameters())))
    notes += [stream.note()] if is_to_stay else []
    try:
        tried = try_model(network, tokenizer, name=section.model, role="teacher", notes=notes)
    except StillroomError as error:
        if error.__cause__ is None:
            raise
        raise BrokenAtStart(
            f"{section.model} ({type(network).__name__}) cannot be streamed: {error.what}",
            where="teacher.placement",
            advice=["--set teacher.placement=device", *_ADVICE],
        ) from error
    stream.reset_counts()  # the trial may have taken the layers in FP32
    return StreamedModel(**vars(tried), stream=stream)


def _streamed(section: TeacherConfig, network: Any, shelf: Shelf) -> Streamed:
    layers = layers_if_any(network)
    if not layers:
        raise BrokenAtStart(
            f"{section.model} ({type(network).__name__}) cannot be streamed: it is not a list of layers that follow "
            "each other",
            where="teacher.placement",
            advice=["--set teacher.placement=device", *_ADVICE],
        )
    return Streamed(network, layers, shelf)


@torch.no_grad()
def _load_rest(network: Any, stream: Streamed, shelf: Shelf) -> None:
    """Fill in every tensor that is no layer's own."""
    owners, parameters = _owners(network), dict(network.named_parameters())
    for name, tensor in wanted_tensors(network).items():
        if name in stream.names:
            continue
        values = shelf.read(name, tensor.dtype, is_pinned=False)
        if name in parameters:
            _Weight(name, tuple(owners[id(tensor)])).put(nn.Parameter(values, requires_grad=False))
        else:
            place, _, attribute = name.rpartition(".")
            network.get_submodule(place)._buffers[attribute] = values
