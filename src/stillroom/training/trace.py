"""Run one micro-batch on fake tensors and follow the bytes that are alive at once.

Both models are built from their configurations as shapes without memory, stored as the precision stores them. Nothing
is assumed of a family: what its layers keep for the backward pass is what autograd keeps. An operation whose result
depends on values (a mixture of experts that picks rows) cannot be run on shapes: `Untraceable` is raised inside, and a
formula estimates the activations, with a note that says so.

Legend: B rows, L positions of a row, N = B L scored positions, C positions of a chunk, V vocabulary, D width.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stillroom.config import Config
from stillroom.core.errors import BrokenAtStart
from stillroom.losses.head.kernel import choose_kernel
from stillroom.losses.head.rows import TEMPORARIES, chunk_size, fused_temporaries, padded
from stillroom.models.anatomy import backbone, hidden_matrices, layers_if_any
from stillroom.models.load import student_shape, teacher_shape
from stillroom.models.lora import adapted_layers, insert, store_base
from stillroom.precision.device import DeviceFacts
from stillroom.precision.policy import POLICIES, Precision
from stillroom.teachers.quantize import quantised_bytes

ACTIVATIONS, CASTS, GRADIENTS, HEAD, DATA = "activations", "casts", "gradients", "head", "data"
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_CAST = torch.ops.aten._to_copy.default
_BATCH_TENSORS = 5  # of eight bytes a position: tokens, targets, masks, scored positions and their targets
_POOLED = 1 << 20  # on a CPU the head's buffer pool keeps blocks of this size between passes
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Untraceable(BrokenAtStart):
    """A network that cannot be built or run on shapes."""


# ---- Bytes alive at once


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sum the storages that operations make while active, without those of `known` tensors.

    Works on fake tensors and on real ones. `at_peak` has the bytes of each part when the sum was largest.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = list(known)  # keeps their storages, so that no other one gets the same address
        self._known = {_address(tensor) for tensor in self._held}
        self._parts: dict[int, str] = {}
        self.by_part: Counter[str] = Counter()
        self.live = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._part = "other"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what the body makes under this name."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is _CAST and _address(args[0]) in self._known
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._hold(tensor, CASTS if is_cast else self._part)
        return result

    def _hold(self, tensor: Tensor, part: str) -> None:
        address = _address(tensor)
        if address in self._known or address in self._parts:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._parts[address] = part
        self.by_part[part] += size
        self.live += size
        weakref.finalize(storage, self._drop, address, size)
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, {name: held for name, held in self.by_part.items() if held}

    def _drop(self, address: int, size: int) -> None:
        self.by_part[self._parts.pop(address)] -= size
        self.live -= size


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def shapes_only(mode: FakeTensorMode) -> Iterator[None]:
    """Make tensors in the body that have shapes and no memory. Those of two modes cannot meet."""
    was_silent, _LOG.disabled = _LOG.disabled, True  # torch prints the traceback of what is raised below
    try:
        with mode:
            yield
    except RuntimeError as error:  # an operation needs values, or a kernel has no shapes
        raise Untraceable(str(error).partition("\n")[0] or type(error).__name__) from error
    finally:
        _LOG.disabled = was_silent


# ---- The fused head


@dataclass(frozen=True)
class HeadShape:
    """What a pass of the fused head holds."""

    scratch: int  # bytes of logits and temporaries
    teacher_weight: tuple[int, int, torch.dtype] | None  # rows, width and dtype of a dense teacher's head
    is_gpu: bool
    half_products: bool  # operands of the products are half

    def operands(self, weight: Tensor) -> int:
        """Bytes of copies of the heads' weights in the dtype of the products."""
        wanted = torch.float16 if self.is_gpu and self.half_products else torch.float32
        copies = []
        if weight.element_size() != wanted.itemsize:
            copies.append(weight.numel() * wanted.itemsize)
        if self.teacher_weight is not None and self.teacher_weight[2].itemsize != wanted.itemsize:
            copies.append(self.teacher_weight[0] * self.teacher_weight[1] * wanted.itemsize)
        return sum(copies)

    def kept_between_passes(self, weight: Tensor) -> int:
        """Bytes that the pool of a CPU keeps: large blocks are there all the time."""
        held = self.scratch + self.operands(weight)
        return 0 if self.is_gpu or held < _POOLED else held

    def during(self, weight: Tensor) -> int:
        """Bytes that a pass allocates and frees."""
        return 0 if self.kept_between_passes(weight) else self.scratch + self.operands(weight)


class HeadPass(torch.autograd.Function):
    """Stand in for the fused head: takes hidden states [N, D] and a weight [V, D], gives a scalar without arithmetic.

    Holds the blocks of a real pass, and gives gradients of the right size.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, shape: HeadShape) -> Tensor:
        blocks = [torch.empty(shape.during(weight), dtype=torch.uint8)]
        if hidden.dtype != torch.float32 and not shape.half_products:
            blocks.append(torch.empty_like(hidden, dtype=torch.float32))
        gradients = [torch.empty_like(hidden, dtype=torch.float32)]
        if ctx.needs_input_grad[1]:
            gradients.append(torch.empty_like(weight, dtype=torch.float32))
        ctx.save_for_backward(*gradients)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        del blocks
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [tensor.to(dtype) for tensor, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return gradients[0], gradients[1] if len(gradients) > 1 else None, None


# ---- One micro-batch


@dataclass(frozen=True)
class Micro:
    """The shape of a micro-batch, and how it is computed."""

    mode: str
    rows: int
    length: int
    accumulates: bool  # gradients of earlier micro-batches are there
    recomputes: bool
    is_open: bool = False  # attention keeps its probabilities


@dataclass(frozen=True)
class StudentTrace:
    """Bytes of a micro-batch without the student's state."""

    at_peak: dict[str, int]  # by part, when the sum was largest
    kept: int  # for the backward pass: activations and casts, at the end of the forward pass
    casts: int  # of `kept`: half copies of weights
    head_kept: int  # what the head's pool keeps all the time


@dataclass(frozen=True)
class TeacherTrace:
    weights: int  # as they are stored: quantised, or in the dtype they are loaded in
    work: int  # the largest sum while it answers
    answer: int  # hidden states that the objectives read


def trace_student(
    network: Any,
    micro: Micro,
    *,
    head: HeadShape,
    autocast: torch.dtype | None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StudentTrace:
    """Run forward, head and backward of one micro-batch. Call it inside `shapes_only`.

    `products` is how the precision multiplies.
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    weight = network.get_output_embeddings().weight
    live = LiveTensors([*network.parameters(), *network.buffers()])
    with live:
        with live.part(GRADIENTS):
            sums = _earlier_gradients(trained) if micro.accumulates else []
        before = live.live
        with live.part(DATA):
            batch = [torch.zeros(micro.rows, micro.length, dtype=torch.long) for _ in range(_BATCH_TENSORS)]
        with products():
            with (
                live.part(ACTIVATIONS),
                torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=bool(autocast)),
            ):
                hidden = backbone(network)(input_ids=batch[0], use_cache=False).last_hidden_state
                chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch[1].reshape(-1))
                del hidden
            kept, casts = live.live - before, live.by_part[CASTS]
            with live.part(HEAD):
                loss: Tensor = HeadPass.apply(chosen, weight, head)  # type: ignore[no-untyped-call]
            del chosen
            with live.part(GRADIENTS):
                loss.backward()  # type: ignore[no-untyped-call]
        del loss, sums
    for parameter in trained:
        parameter.grad = None
    return StudentTrace(dict(live.at_peak), kept, casts, head.kept_between_passes(weight))


def _earlier_gradients(trained: list[Any]) -> list[Tensor]:
    """Make gradients to add to. Those of FP16 parameters are summed in FP32, and their own freed."""
    sums = []
    for parameter in trained:
        if parameter.dtype == torch.float16:
            sums.append(torch.zeros_like(parameter, dtype=torch.float32))
            parameter.register_post_accumulate_grad_hook(_free_gradient)
        else:
            parameter.grad = torch.zeros_like(parameter)
    return sums


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@torch.no_grad()
def trace_teacher(network: Any, rows: int, length: int) -> tuple[int, int]:
    """Run the teacher on one micro-batch: bytes of its work and of its answer. Call it inside `shapes_only`."""
    live = LiveTensors([*network.parameters(), *network.buffers()])
    with live:
        ids = torch.zeros(rows, length, dtype=torch.long)
        hidden = backbone(network)(input_ids=ids, use_cache=False).last_hidden_state
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, ids.reshape(-1))
    return live.peak, chosen.numel() * chosen.element_size()


def _estimated_activations(network: Any, rows: int, length: int, itemsize: int) -> int:
    """Estimate a network that cannot be traced: 16 widths and 4 widths of the feed-forward a token and layer.

    Of a mixture, each token visits several feed-forwards. An estimate by the usual layers, not a law.
    """
    config = network.config.get_text_config()
    visited = int(getattr(config, "num_experts_per_tok", 0) or 1)
    inner = int(getattr(config, "moe_intermediate_size", 0) or getattr(config, "intermediate_size", 0) or 0)
    inner = inner or 4 * int(config.hidden_size)
    each = 16 * int(config.hidden_size) + 4 * visited * inner
    return rows * length * int(config.num_hidden_layers) * each * itemsize


def _estimated_student(network: Any, micro: Micro, sizes: Sizes, head: HeadShape) -> StudentTrace:
    kept = _estimated_activations(network, micro.rows, micro.length, 2 if micro.mode != "fp32" else 4)
    if micro.recomputes:
        kept = kept // sizes.layers + micro.rows * micro.length * sizes.width * 4 * sizes.layers
    weight = network.get_output_embeddings().weight
    head_bytes = head.during(weight) + 4 * sizes.width * sizes.vocabulary
    parts = {ACTIVATIONS: kept, HEAD: head_bytes, GRADIENTS: 4 * sizes.num_trained}
    return StudentTrace(parts, kept, 0, head.kept_between_passes(weight))


# ---- Both models of a configuration


@dataclass(frozen=True)
class Sizes:
    """Counts and bytes of a network without weights."""

    parameters: int
    trained: tuple[tuple[int, int], ...]  # (numbers, axes) of each trained parameter
    hidden: int  # trained numbers in matrices of the layers, which Muon may update
    frozen_bytes: int
    embedding: int  # numbers that are looked up and not multiplied, unless they are the head too
    layers: int
    layer_bytes: tuple[int, ...]
    tensor_bytes: tuple[int, ...]  # of each parameter and buffer, as it is stored
    experts: int  # numbers of experts' weights
    visited: float  # share of the experts that a token visits
    width: int
    vocabulary: int
    itemsize: int

    @property
    def num_trained(self) -> int:
        return sum(count for count, _axes in self.trained)


def sizes_of(network: Any) -> Sizes:
    if network.get_output_embeddings() is None:
        raise Untraceable(f"the head of {type(network).__name__} cannot be described: its memory cannot be counted")
    own = list(network.parameters())
    blocks = layers_if_any(network)
    head, inputs = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    config = network.config.get_text_config()
    experts = sum(part.numel() for name, part in network.named_parameters() if ".experts." in name)
    num_experts = next((int(count) for name in _NUM_EXPERTS if (count := getattr(config, name, None))), 0)
    visited = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_k", 0) or 1)
    return Sizes(
        parameters=sum(part.numel() for part in own),
        trained=tuple((part.numel(), part.ndim) for part in own if part.requires_grad),
        hidden=sum(part.numel() for part in hidden_matrices(network).values()),
        frozen_bytes=sum(part.numel() * part.element_size() for part in own if not part.requires_grad),
        embedding=0 if inputs is head else inputs.numel(),
        layers=len(blocks) or int(config.num_hidden_layers),
        layer_bytes=tuple(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks),
        tensor_bytes=tuple(part.numel() * part.element_size() for part in (*own, *network.buffers())),
        experts=experts,
        visited=visited / num_experts if num_experts else 1.0,
        width=int(head.shape[1]),
        vocabulary=int(head.shape[0]),
        itemsize=own[0].element_size(),
    )


class Traces:
    """Trace the models of configurations for one device, each shape of a micro-batch once."""

    def __init__(self, device: torch.device, facts: DeviceFacts, bound: int) -> None:
        """`bound`: bytes that a run may take on the device; the head's chunk on a GPU depends on it."""
        self.device, self.facts, self.bound = device, facts, bound
        self.notes: dict[str, None] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._students: dict[str, tuple[Sizes, StudentTrace]] = {}
        self._teachers: dict[str, tuple[Sizes, TeacherTrace]] = {}

    def teacher(self, config: Config, rows: int, length: int, dtype: torch.dtype) -> tuple[Sizes, TeacherTrace]:
        section = config.teacher
        key = f"{section.model} {section.revision} {section.quantisation} {dtype} {rows} {length}"
        if key not in self._teachers:
            with shapes_only(self._fake):
                network, notes = teacher_shape(section, dtype)
            self._say(*notes)
            sizes = sizes_of(network)
            try:
                with shapes_only(self._fake):
                    work, answer = trace_teacher(network, rows, length)
            except Untraceable as error:
                self._say(f"the teacher cannot be run on shapes ({error}): what it works in is estimated")
                work = 2 * (_estimated_activations(network, rows, length, dtype.itemsize) // max(1, sizes.layers))
                answer = rows * length * sizes.width * dtype.itemsize
            stored = quantised_bytes(network, section.quantisation)
            self._teachers[key] = sizes, TeacherTrace(stored, work, answer)
        return self._teachers[key]

    def student(
        self, config: Config, micro: Micro, teacher: tuple[Sizes, torch.dtype] | None
    ) -> tuple[Sizes, StudentTrace]:
        """`teacher`: of a live one, whose logits the head computes too."""
        head = f"{config.objectives.kd.divergence} {config.objectives.kernel} {config.objectives.chunk_tokens}"
        key = f"{config.student.model_dump_json()} {config.teacher.model} {micro} {teacher} {head}"
        if key not in self._students:
            self._students[key] = self._trace_student(config, micro, teacher)
        return self._students[key]

    def _trace_student(
        self, config: Config, micro: Micro, teacher: tuple[Sizes, torch.dtype] | None
    ) -> tuple[Sizes, StudentTrace]:
        precision = POLICIES[micro.mode](self.device, "planned", config.precision)
        with shapes_only(self._fake):
            network, notes = student_shape(
                config.student, config.teacher, recomputes=micro.recomputes, is_open=micro.is_open
            )
            _store(network, config, precision)
        self._say(*notes)
        sizes = sizes_of(network)
        head = self._head(config, micro, sizes, precision, teacher)
        try:
            with shapes_only(self._fake):
                trace = trace_student(
                    network, micro, head=head, autocast=precision.compute_dtype, products=precision.half_products
                )
        except Untraceable as error:
            self._say(f"the student cannot be run on shapes ({error}): its activations are estimated")
            trace = _estimated_student(network, micro, sizes, head)
        return sizes, trace

    def _head(
        self, config: Config, micro: Micro, sizes: Sizes, precision: Precision,
        teacher: tuple[Sizes, torch.dtype] | None,
    ) -> HeadShape:  # fmt: skip
        """Choose the chunk as the pass will choose it; on a GPU by what the state leaves free."""
        is_gpu = self.device.type == "cuda"
        free = max(0, self.bound - 16 * sizes.num_trained) if is_gpu else None
        num_positions = micro.rows * micro.length
        chunk = chunk_size(config.objectives.chunk_tokens, num_positions, sizes.vocabulary, sizes.width, free)
        is_half = is_gpu and (precision.compute_dtype is not None or precision.keeps_half_weights)
        # Blocks [C, V] of four bytes: logits of both models, a half operand, temporaries of the rows' kernel.
        fused = fused_temporaries(config.objectives.kd.divergence) if is_gpu else 0
        temporaries = TEMPORARIES if self._is_plain(config) else fused
        blocks = 1 + (teacher is not None) + 0.5 * is_half + temporaries
        scratch = int(4 * chunk * padded(sizes.vocabulary) * blocks)
        weight = None if teacher is None else (teacher[0].vocabulary, teacher[0].width, teacher[1])
        return HeadShape(scratch, weight, is_gpu, is_half)

    def _is_plain(self, config: Config) -> bool:
        """Whether the rows of the head go through the plain kernel. On a GPU Triton needs what tensor cores need."""
        if self.device.type == "cuda":
            return config.objectives.kernel == "plain" or not self.facts.has_tensor_cores
        return choose_kernel(config.objectives.kernel, torch.device("cpu")).name == "plain"

    def _say(self, *notes: str) -> None:
        self.notes.update(dict.fromkeys(notes))


def _store(network: Any, config: Config, precision: Precision) -> None:
    """Store the student as the precision does, and attach its adapter."""
    adapter = config.student.adapter
    if adapter is not None:
        targets, _left_out = adapted_layers(network, adapter, name=config.student.model)
        network.requires_grad_(False)
        with _modules_stay():
            insert(network, adapter, targets, name=config.student.model, seed=0)
        dtype = precision.frozen_storage(adapter.base_dtype)
        store_base(network, dtype, whole=precision.keeps_half_weights, has_values=False)
    elif precision.keeps_half_weights:
        for parameter in network.parameters():
            parameter.data = parameter.data.to(torch.float16)


@contextmanager
def _modules_stay() -> Iterator[None]:
    """Make `Module.to` a no-op: peft moves its new layers to the device of the old ones, and shapes cannot move."""
    kind: Any = nn.Module
    move = kind.to
    kind.to = lambda module, *_where, **_how: module
    try:
        yield
    finally:
        kind.to = move
