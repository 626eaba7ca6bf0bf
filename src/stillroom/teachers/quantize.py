"""Store a teacher's weights in fewer bits, and measure it against itself before it is used.

The full teacher answers a few rows of the data, its linear layers are quantised in place, it answers the same rows
again, and KL(full || quantised) decides. The head and the embeddings stay as they are: the fused head multiplies with
a plain weight, and a tied head is the embedding.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import BrokenAtStart
from stillroom.core.shortages import is_out_of_memory
from stillroom.core.types import Batch, DenseSignal, HeadWeights, StudentView
from stillroom.data import Rows, fixed_batches
from stillroom.losses.divergences import make
from stillroom.losses.head.loss import score_head
from stillroom.models import LoadedModel
from stillroom.models.coded import coded
from stillroom.models.files import is_gguf
from stillroom.models.student import last_hidden
from stillroom.precision.blocks import FORMATS, row_bytes

SUMMARY = "teacher_quantisation"  # the entry in a run's summary, and in what a cache says of its teacher
PROBE_POSITIONS = 1_024  # scored: their mean KL has a standard error of a few per cent
_PROBE_ROWS = 64  # spread over the data; they are taken until there are enough positions
_OWN_LOGITS_POSITIONS = 64  # of a teacher whose head cannot be described: its answers are [positions, vocabulary]
_PACKAGES = {"int8": "torchao", "bnb-8bit": "bitsandbytes", "bnb-4bit": "bitsandbytes"}
_EXTRAS = {"torchao": "quantised", "bitsandbytes": "bitsandbytes"}


@dataclass(frozen=True)
class Quantisation:
    """What quantising a teacher changed."""

    kind: str
    kl: float  # KL(full || quantised), nats a position
    max_kl: float
    positions: int  # it was measured on
    layers: int  # linear layers that are quantised
    full_bytes: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_quantisation(section: TeacherConfig, device: torch.device) -> None:
    """Refuse what this machine cannot do, before anything is loaded."""
    kind = section.quantisation
    if kind == "none" or kind in FORMATS:
        return
    if kind == "file":
        if not is_gguf(Path(section.model).expanduser()):
            raise BrokenAtStart(
                f"teacher.quantisation = 'file' keeps the codes of a GGUF file, and {section.model} is none",
                where="teacher.quantisation",
                advice=["--set teacher.quantisation=q4_0 rounds any teacher", "name a .gguf file"],
            )
        return
    package = _PACKAGES[kind]
    if package == "bitsandbytes" and device.type != "cuda":
        raise BrokenAtStart(
            f"teacher.quantisation = {kind!r} is computed by kernels for a CUDA GPU, and the run is on {device}",
            where="teacher.quantisation",
            advice=["--set teacher.quantisation=int8, which runs on any device", "--device cuda"],
        )
    try:
        with _quiet():
            importlib.import_module(package)
    except ImportError as error:
        raise BrokenAtStart(
            f"teacher.quantisation = {kind!r} needs {package}, which cannot be imported: {error}",
            where="teacher.quantisation",
            advice=[f"pip install 'stillroom[{_EXTRAS[package]}]'", "--set teacher.quantisation=none"],
        ) from error


def quantised(
    loaded: LoadedModel, section: TeacherConfig, rows: Iterable[Batch], *, vocab_size: int, device: torch.device
) -> tuple[LoadedModel, Quantisation]:
    """Quantise a loaded teacher in place and measure what that changed. Refuse a change above the configured bound.

    `rows` are batches of the data, taken until there are enough scored positions.
    """
    network, probe = loaded.network, _Probe(loaded, vocab_size)
    full_bytes = stored_bytes(network)
    try:
        full = probe.answers(rows, device)
    except (MemoryError, RuntimeError) as error:
        if device.type == "cpu" or not is_out_of_memory(error):
            raise
        network.to("cpu")  # the full teacher need not fit on the device: that is what quantising is for
        full = probe.answers(rows, torch.device("cpu"))
    num_layers = quantise_layers(network, section.quantisation, device, name=section.model)
    network.to(device)
    kl, positions = probe.divergence(full, device)
    bound, num_bytes = section.max_quantisation_kl, stored_bytes(network)
    found = Quantisation(section.quantisation, kl, bound, positions, num_layers, full_bytes, num_bytes)
    if not kl <= bound:
        raise BrokenAtStart(
            f"teacher.quantisation = {found.kind!r} changes the teacher's answers by {kl:.4g} nats a token (KL of the "
            f"full to the quantised teacher, {positions:,} positions of the data), above "
            f"teacher.max_quantisation_kl = {bound:g}",
            where=section.model,
            advice=[
                "use more bits, or none: --set teacher.quantisation=none",
                f"if the student may learn that error, raise the bound: --set teacher.max_quantisation_kl={2 * kl:.2g}",
            ],
        )
    return replace(loaded, facts={**loaded.facts, SUMMARY: found.to_dict()}), found


def quantise_layers(network: Any, kind: str, device: torch.device, *, name: str) -> int:
    """Quantise every linear layer but the head, in place. The number of layers.

    Embeddings, norms and banks of experts that are one tensor are not linear layers and stay as they are.
    """
    layers = _layers_of(network)
    if not layers:
        raise BrokenAtStart(
            f"{name} has no linear layers that could be quantised: its products are made by its own modules "
            f"({type(network).__name__})",
            where="teacher.quantisation",
            advice=["--set teacher.quantisation=none"],
        )
    with _quiet():
        if kind in FORMATS:
            for own, layer in layers.items():
                network.set_submodule(own, coded(layer, kind, own, where="teacher.quantisation"))
        elif kind == "int8":
            # Eight bits a weight with a scale for each output, multiplied in the dtype of the activations.
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(network, Int8WeightOnlyConfig(), filter_fn=lambda _module, name: name in layers)
        else:
            _to_bitsandbytes(network, layers, kind, device)
    return len(layers)


def _layers_of(network: Any) -> dict[str, nn.Linear]:
    head = network.get_output_embeddings()
    return {part: layer for part, layer in network.named_modules() if type(layer) is nn.Linear and layer is not head}


def _to_bitsandbytes(network: Any, layers: dict[str, nn.Linear], kind: str, device: torch.device) -> None:
    """Replace each layer by that of bitsandbytes, which quantises its weight on the way to the GPU."""
    bnb: Any = importlib.import_module("bitsandbytes")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a line for each layer
    for name, layer in layers.items():
        weight, sizes = layer.weight.data.cpu(), (layer.in_features, layer.out_features, layer.bias is not None)
        if kind == "bnb-8bit":
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
            new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        else:
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, quant_type="nf4")
            new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        if layer.bias is not None:
            new.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, new.to(device))


# Bytes of a weight, and how many weights share a scale; 0: those of one output.
_STORED = {"int8": (1.0, 0), "bnb-8bit": (1.0, 0), "bnb-4bit": (0.5, 64)}


def quantised_bytes(network: Any, kind: str) -> int:
    """What the weights of a network that is not quantised yet will take.

    Scales are FP32. torchao's int8 also has a zero point of a byte for each output.
    """
    total: int = sum(weight.numel() * weight.element_size() for weight in network.parameters())
    if kind in ("none", "file"):  # of a file the layers are codes already
        return total
    if kind in FORMATS:
        sizes = [layer.weight.numel() * layer.weight.element_size() for layer in _layers_of(network).values()]
        codes = [row_bytes(layer.in_features, kind) * layer.out_features for layer in _layers_of(network).values()]
        return total - sum(sizes) + sum(codes)
    each, shared = _STORED[kind]
    for layer in _layers_of(network).values():
        weight = layer.weight
        num_scales = weight.numel() / shared if shared else layer.out_features
        scale = 5 if kind == "int8" else 4
        total += int(weight.numel() * (each - weight.element_size()) + num_scales * scale)
    return total


def stored_bytes(network: Any) -> int:
    """What the weights and buffers of a network take, tied ones once."""
    tensors = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return sum(_bytes_of(tensor) for tensor in tensors.values())


def _bytes_of(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao's: codes and scales in one tensor
        return sum(_bytes_of(getattr(tensor, part)) for part in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


# -- measuring -------------------------------------------------------------------------------------------


_Answer = tuple[Batch, Tensor]  # a row, and its hidden states at the scored positions [N, D]


class _Probe:
    """Asks a network the same rows before and after. What is kept is the input of the head, not log-probabilities."""

    def __init__(self, loaded: LoadedModel, vocab_size: int) -> None:
        self._loaded, self._vocab_size = loaded, vocab_size
        self._most = PROBE_POSITIONS if loaded.is_described else _OWN_LOGITS_POSITIONS

    def answers(self, rows: Iterable[Batch], device: torch.device) -> list[_Answer]:
        self._loaded.network.to(device)
        found: list[_Answer] = []
        left = self._most
        for batch in rows:
            if batch.num_scored:
                found.append((batch, self._ask(batch, device)[0][:left].clone()))
                left -= len(found[-1][1])
            if left <= 0:
                break
        return found

    @torch.no_grad()
    def divergence(self, full: Sequence[_Answer], device: torch.device) -> tuple[float, int]:
        """KL(full || now) in nats a position, and the number of positions; NaN where one cannot be compared."""
        total, count, unusable = 0.0, 0, 0
        for batch, before in full:
            num = len(before)
            hidden, head = self._ask(batch, device)
            signal = DenseSignal(before.to(device), head)
            targets = batch.scored_targets[:num].to(device)
            scored = score_head(
                StudentView(hidden[:num], head), signal, targets,
                kd_weight=1.0, ce_weight=0.0, divergence=make("forward_kl"),
            )  # fmt: skip
            total += float(scored.terms["kd"].total)
            count += num
            unusable += int(scored.counters["bad_teacher_rows"])
        return (total / count if count and not unusable else float("nan")), count

    @torch.no_grad()
    def _ask(self, batch: Batch, device: torch.device) -> tuple[Tensor, HeadWeights]:
        there = batch.to(device)
        hidden, head = last_hidden(self._loaded.network, there, self._vocab_size, self._loaded.is_described)
        return hidden.reshape(-1, hidden.shape[-1]).index_select(0, there.positions), head


@contextmanager
def _quiet() -> Iterator[None]:
    """Both libraries log about GPUs and Python versions when they are imported."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


# -- for a run -------------------------------------------------------------------------------------------


def quantise_teacher(
    config: Config,
    loaded: LoadedModel,
    rows: Rows,
    vocab_size: int,
    device: torch.device,
    *,
    write: Callable[..., object],
) -> LoadedModel:
    """The teacher as `teacher.quantisation` says, measured on rows of the training data; an event says by how much."""
    if config.teacher.quantisation in ("none", "file"):
        return loaded
    check_quantisation(config.teacher, device)
    probe = list(fixed_batches(rows, 1, _PROBE_ROWS))
    ready, found = quantised(loaded, config.teacher, probe, vocab_size=vocab_size, device=device)
    write("teacher_quantised", **found.to_dict())
    return ready


def plainly_quantised(config: Config, loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """The teacher as `teacher.quantisation` says, not measured."""
    if config.teacher.quantisation not in ("none", "file"):
        check_quantisation(config.teacher, device)
        quantise_layers(loaded.network, config.teacher.quantisation, device, name=config.teacher.model)
    return loaded
