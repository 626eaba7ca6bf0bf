"""Where the weights of a live teacher are: on the device, in main memory between visits, or streamed layer by layer.

Streaming is for a teacher that does not fit on the device. The weights of its layers stay in its safetensors files, or
in main memory where the files have to be converted. A layer's weights come to the device when its forward begins and
are let go of when it ends, and a thread reads those of the next layer meanwhile: at most two layers are in memory.
Embeddings, norms and the head stay. A batch reads all layers once. On a CPU, where each row of a sparse signal is asked
by itself, each row does: the products of a row of a few hundred tokens take longer than reading the weights, and the
thread hides it. The offload hooks of accelerate do not read ahead, and write a second copy of the weights to disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart, ConfigError, StillroomError
from stillroom.core.files import reason_of
from stillroom.core.types import HeadWeights
from stillroom.models import LoadedModel, load_teacher, load_tokenizer, try_model
from stillroom.models.anatomy import layers_if_any
from stillroom.models.files import Source, check_weight_files, fetch, runs_code
from stillroom.models.gguf import empty_network
from stillroom.models.load import CONSTANTS, explained, read_config
from stillroom.parallel import Parallel
from stillroom.parallel.base import Processes, check_torch
from stillroom.teachers.base import Placement

if TYPE_CHECKING:
    from stillroom.parallel.fsdp import FrozenParts

_HOME = torch.device("cpu")
_NUMBERS = {"F32", "F16", "BF16"}
_ALIGNED = 64  # bytes at which a tensor begins in a block
_ADVICE = ["--set teacher.placement=offload", "write its answers to disk on a larger machine: stillroom cache"]


# -- pinned memory ------------------------------------------------------------------------------------
# torch's allocator of pinned memory rounds every block up to a power of two: tensor by tensor, Qwen2.5-7B would take 29
# GB for 15. So tensors share blocks whose size is a power of two already.


def pinned_blocks(sizes: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lay tensors of these bytes out in blocks of a power of two: (bytes of the block, [(number, offset)]).

    The largest first, each into the first block with room. A block has the size of the largest tensor, rounded up;
    the last ones shrink to what they hold.
    """
    rounded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    room = _power_of_two(max(rounded, default=0))
    blocks: list[tuple[int, list[tuple[int, int]]]] = []
    for number in sorted(range(len(sizes)), key=lambda one: -rounded[one]):
        place = next((i for i, (used, _held) in enumerate(blocks) if used + rounded[number] <= room), len(blocks))
        if place == len(blocks):
            blocks.append((0, []))
        used, held = blocks[place]
        blocks[place] = used + rounded[number], [*held, (number, used)]
    return [(_power_of_two(used), held) for used, held in blocks]


def pinned_bytes(sizes: Sequence[int]) -> int:
    """What tensors of these bytes take in pinned memory."""
    return sum(size for size, _held in pinned_blocks(sizes))


def _power_of_two(size: int) -> int:
    """The smallest that is no less."""
    return 1 << (size - 1).bit_length() if size else 0


class PinnedCopies:
    """Copies of tensors in pinned memory, or the tensors themselves where the system refuses to pin so much.

    A refusal is no shortage of the GPU: smaller micro-batches would not help. Copies from ordinary memory are slower,
    and the host waits for them.
    """

    def __init__(self) -> None:
        self._refusal = ""  # why memory could not be pinned; it is not asked again
        self._is_told = False

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        made = list(tensors)
        for size, held in pinned_blocks([_bytes_of(tensor) for tensor in tensors]):
            block = self._block(size)
            if block is None:
                continue
            for number, offset in held:
                tensor = tensors[number]
                flat = block[offset : offset + _bytes_of(tensor)].view(tensor.dtype)
                made[number] = flat.view(tensor.shape).copy_(tensor)
        return made

    def _block(self, size: int) -> Tensor | None:
        if not size or self._refusal:
            return None
        try:
            return torch.empty(size, dtype=torch.uint8).pin_memory()
        except RuntimeError as error:
            self._refusal = reason_of(error)
            return None

    def tell(self, tell: Callable[[str], object]) -> None:
        """Say once that memory was not pinned. From the thread of the run: layers are read in another one."""
        if self._refusal and not self._is_told:
            self._is_told = True
            tell(f"weights of the teacher are copied from pageable memory, which is slower: {self._refusal}")

    def facts(self) -> dict[str, Any]:
        return {"teacher_pinning_refused": self._refusal} if self._refusal else {}


# -- main memory --------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """A tensor of the network with its values in main memory, and its version when it came to the device."""

    tensor: Tensor
    home: Tensor
    version: int = 0


class Offloaded(Placement):
    """Keep weights in main memory and copy them to the device for a visit.

    They are never copied back: they do not change, so the copy is dropped.

    On CUDA the values at home are pinned: the copies are queued behind the work that is under way, and the program
    continues. They come on the same stream, so that what the student's backward pass has freed is where they go:
    fetched earlier, during that pass, they would need as much memory as a teacher that stays.
    """

    keeps_head = False  # an answer has the copy on the device

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network = network
        self._device = device
        self._kept: dict[int, _Kept] = {}
        self._visits = 0
        self._pinned = PinnedCopies()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The weights are on the device in the body. Visits may be nested: the last one to end sends them home."""
        if self._visits == 0:
            self._bring()
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if self._visits == 0:
                self._send_home()

    def lasting(self, head: HeadWeights) -> HeadWeights:
        """The copy on the device and not the model's parameter, which goes home."""
        bias = head.bias.detach() if head.bias is not None else None
        return replace(head, weight=head.weight.detach(), bias=bias)

    def _bring(self) -> None:
        tensors = self._tensors()
        self._kept = {id(tensor): self._kept[id(tensor)] for tensor in tensors if id(tensor) in self._kept}
        new = [tensor for tensor in tensors if id(tensor) not in self._kept]
        homes = [tensor.data.to(_HOME) for tensor in new]
        if self._device.type == "cuda":
            homes = self._pinned.of(homes)
            self._pinned.tell(self.tell)
        self._kept |= {id(tensor): _Kept(tensor, home) for tensor, home in zip(new, homes, strict=True)}
        for tensor in tensors:
            kept = self._kept[id(tensor)]
            tensor.data = _fetched(kept.home, self._device)
            kept.version = tensor._version

    def _send_home(self) -> None:
        for tensor in self._tensors():
            kept = self._kept.get(id(tensor))
            if kept is None:  # a buffer that the forward made again, as some rotary embeddings do
                tensor.data = tensor.data.to(_HOME)
                continue
            if tensor._version != kept.version:  # a buffer that the forward wrote into
                kept.home.copy_(tensor.data)
            tensor.data = kept.home

    def facts(self) -> dict[str, Any]:
        return self._pinned.facts()

    def _tensors(self) -> list[Tensor]:
        return [*self._network.parameters(), *self._network.buffers()]


def _fetched(home: Tensor, device: torch.device) -> Tensor:
    return home.to(device, non_blocking=True)


# -- layer by layer -----------------------------------------------------------------------------------


class Shelf(Protocol):
    """Where the weights of layers lie."""

    where: str

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight in main memory."""


class FileShelf:
    """Safetensors. A file is mapped only while it is read, so what was read does not stay in main memory."""

    where = "in its files"

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as opened:
                mapped: Tensor = opened.get_tensor(name)
                return mapped.to(dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise BrokenAtStart(
                f"{name} of the teacher cannot be read from its file any more: {reason_of(error)}",
                where=str(path),
                advice=["put the file back; `stillroom resume` continues the run"],
            ) from error


class MemoryShelf:
    """Main memory. Where the device is main memory too, the weight itself is handed out."""

    where = "in main memory"

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._weights[name].to(dtype)


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
        self._pinned = PinnedCopies()
        self._weights = _weights_of(network, layers)
        self._placeholders = [
            [nn.Parameter(torch.empty_like(weight.here, device="meta"), requires_grad=False) for weight in held]
            for held in self._weights
        ]
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
        self._pinned.tell(self.tell)

    def note(self) -> str:
        sizes = [sum(_bytes_of(placeholder) for placeholder in held) for held in self._placeholders]
        stays = sum(_bytes_of(weight) for weight in self._network.parameters() if not weight.is_meta)
        two = max((sum(pair) for pair in pairwise(sizes)), default=sum(sizes))
        return (
            f"the teacher's {len(sizes)} layers ({sum(sizes) / 1e6:,.1f} MB) stay {self._shelf.where}; at most two "
            f"({two / 1e6:,.1f} MB) are brought in at once, next to {stays / 1e6:,.1f} MB that stay on the device"
        )

    def facts(self) -> dict[str, Any]:
        return {
            "teacher_streaming": {
                "layers": len(self._weights),
                "stored": self._shelf.where,
                "peak_layers": self.peak_layers,
                "peak_bytes": self.peak_bytes,
                "layers_read": self.num_reads,
            },
            **self._pinned.facts(),
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
        pairs = zip(self._weights[index], dtypes, strict=True)
        weights = [self._shelf.read(weight.name, dtype) for weight, dtype in pairs]
        return self._pinned.of(weights) if self._device.type == "cuda" else weights


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


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# -- a network in its files ---------------------------------------------------------------------------


# The ordinary loader renames, merges and converts weights for some families. Here nothing is converted: a folder that
# needs it is not read from disk, and the caller is told why.


def _open_on_disk(section: TeacherConfig, dtype: torch.dtype) -> tuple[Any, FileShelf, list[str]] | str:
    """The network without weights, their files and notes, or why the weights must be loaded and converted first."""
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
    return network, FileShelf(files), [source.note] if source.note else []


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
    wanted = _wanted_tensors(network)
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


def _wanted_tensors(network: Any) -> dict[str, Tensor]:
    """The tensors that a file must hold: each parameter once, and the buffers that are saved."""
    parameters = dict(network.named_parameters())
    kept = network.state_dict()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in kept}
    return {**parameters, **buffers}


# -- opening ------------------------------------------------------------------------------------------


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
    found = _open_on_disk(section, dtype)
    if not isinstance(found, str):
        network, shelf, notes = found
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
    """Fill in every tensor that is not a layer's own."""
    owners, parameters = _owners(network), dict(network.named_parameters())
    for name, tensor in _wanted_tensors(network).items():
        if name in stream.names:
            continue
        values = shelf.read(name, tensor.dtype)
        if name in parameters:
            _Weight(name, tuple(owners[id(tensor)])).put(nn.Parameter(values, requires_grad=False))
        else:
            place, _, attribute = name.rpartition(".")
            network.get_submodule(place)._buffers[attribute] = values


# -- shards ----------------------------------------------------------------------------------------
# A teacher of which each process of a run holds a part.


class Shards(Placement):
    """What is outside of layers is whole while the teacher is asked, and from the first answer of a window to its end.

    The head is needed until the student's backward: inside a window it is the gathered one, elsewhere a copy.
    """

    writes_text = False  # each token would gather every layer
    is_shared = True
    keeps_head = False

    def __init__(self, parts: FrozenParts) -> None:
        self._parts = parts
        self._visits = 0
        self._is_whole = False
        self._is_window = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if not self._is_whole:
            self._parts.gather()
            self._is_whole = True
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            if not self._is_window:
                self._release()

    def begin_window(self) -> None:
        self._is_window = True

    def end_window(self) -> None:
        self._is_window = False
        self._release()

    def lasting(self, head: HeadWeights) -> HeadWeights:
        if self._is_window or head.is_identity:
            return head
        return replace(head, weight=head.weight.clone(), bias=None if head.bias is None else head.bias.clone())

    def facts(self) -> dict[str, Any]:
        return {"teacher_shards": self._parts.facts()}

    def _release(self) -> None:
        if self._visits == 0 and self._is_whole:
            self._parts.release()
            self._is_whole = False


def reads_layers_one_by_one(config: Config, parallel: Parallel | None) -> bool:
    """Whether a process needs no more of the teacher than its part: a student that is cut from it needs the whole."""
    has_peers = parallel is not None and parallel.size > 1
    return has_peers and config.teacher.placement == "shard" and config.student.init != "shrink"


def shard_teacher(
    config: Config,
    loaded: LoadedModel | None,
    parallel: Parallel,
    device: torch.device,
    *,
    tell: Callable[[str], object],
) -> Placement | None:
    """Leave this process a part of each weight of the teacher where that was asked for, else None."""
    if loaded is None or config.teacher.placement != "shard":
        return None
    if not isinstance(parallel, Processes):
        tell("teacher.placement = 'shard' has no effect: there is one process, which holds the whole teacher")
        return None
    if config.train.batch_size == "auto" and device.type != "cpu":
        raise ConfigError(
            "a sharded teacher does not work with train.batch_size = 'auto': a trial that runs out of memory in one "
            "process leaves the others waiting",
            where="train.batch_size",
            advice=["give train.batch_size a number", "--set teacher.placement=device"],
        )
    check_torch(is_sharded=True)
    from stillroom.parallel.fsdp import shard_frozen  # it takes half a second to import

    blocks = layers_if_any(loaded.network)
    options: dict[str, Any] = {"device": device.type, "where": "teacher.placement"}
    if isinstance(loaded, StreamedModel) and loaded.stream is not None:
        loaded.stream.settle(device)
        loaded.stream.stop()
        options["bring"] = loaded.stream.bring
    parts = shard_frozen(parallel, loaded.network, blocks, **options)
    held, whole = (parts.facts()[name] / 1e6 for name in ("held_bytes", "whole_bytes"))
    tell(f"the teacher is sharded: this process holds {held:,.1f} MB of {whole:,.1f} MB between answers")
    return Shards(parts)
