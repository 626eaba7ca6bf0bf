"""Both models of a configuration as shapes, stored as a precision says, and one micro-batch of each followed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.models.adapter.attach import adapted_layers, insert
from stillroom.models.adapter.frozen_base import store_base
from stillroom.models.anatomy import layers_if_any
from stillroom.models.load.shape_only import student_shape, teacher_shape
from stillroom.objectives.head.chunks import chunk_size
from stillroom.objectives.head.kernel import choose_kernel
from stillroom.planning.head import HeadShape, scratch_bytes
from stillroom.planning.target import Target
from stillroom.planning.trace import (
    ACTIVATIONS,
    StudentTrace,
    TeacherTrace,
    Untraceable,
    estimate_student,
    shapes_only,
    trace_student,
    trace_teacher,
)
from stillroom.precision.policy import POLICIES, Precision


@dataclass(frozen=True)
class Sizes:
    """Facts of a network without weights."""

    parameters: int
    trained: tuple[tuple[int, int], ...]  # (numbers, axes) of each trained parameter
    frozen_bytes: int
    embedding: int  # numbers that are looked up and not multiplied, unless they are the head too
    layers: int
    layer_bytes: tuple[int, ...]
    linear: int  # numbers of the linear layers inside of the blocks
    experts: int  # numbers of experts' weights
    visited: float  # share of the experts that a token visits
    width: int
    vocabulary: int
    itemsize: int

    @property
    def num_trained(self) -> int:
        return sum(count for count, _axes in self.trained)


def sizes_of(network: Any) -> Sizes:
    own = list(network.parameters())
    blocks = layers_if_any(network)
    head, inputs = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    config = network.config.get_text_config()
    inside = {id(part): part for block in blocks for part in block.parameters()}
    experts = sum(part.numel() for name, part in network.named_parameters() if ".experts." in name)
    num_experts = next((int(found) for name in _EXPERTS if (found := getattr(config, name, None))), 0)
    visited = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_k", 0) or 1)
    return Sizes(
        parameters=sum(part.numel() for part in own),
        trained=tuple((part.numel(), part.ndim) for part in own if part.requires_grad),
        frozen_bytes=sum(part.numel() * part.element_size() for part in own if not part.requires_grad),
        embedding=0 if inputs is head else inputs.numel(),
        layers=len(blocks) or int(config.num_hidden_layers),
        layer_bytes=tuple(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks),
        linear=sum(part.numel() for part in inside.values() if part.ndim >= 2),
        experts=experts,
        visited=visited / num_experts if num_experts else 1.0,
        width=int(head.shape[1]),
        vocabulary=int(head.shape[0]),
        itemsize=own[0].element_size(),
    )


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Micro:
    """The shape of a micro-batch, and how it is computed."""

    mode: str
    rows: int
    length: int
    accumulates: bool
    recomputes: bool
    is_open: bool = False  # attention keeps its probabilities


class Shapes:
    """The models of one target. What was traced once is remembered."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.notes: dict[str, None] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._students: dict[str, tuple[Sizes, StudentTrace]] = {}
        self._teachers: dict[str, tuple[Sizes, TeacherTrace]] = {}

    def uses_teacher(self, config: Config) -> bool:
        return Curriculum.of(config).uses_teacher

    def precision(self, config: Config, mode: str) -> Precision:
        return POLICIES[mode](self.target.device, "planned", config.precision)

    def teacher(self, config: Config, rows: int, length: int, dtype: torch.dtype) -> tuple[Sizes, TeacherTrace]:
        key = f"{config.teacher.model} {config.teacher.revision} {dtype} {rows} {length}"
        if key not in self._teachers:
            with shapes_only(self._fake):
                network, notes = teacher_shape(config.teacher, dtype)
            self._say(*notes)
            sizes = sizes_of(network)
            try:
                with shapes_only(self._fake):
                    traced = trace_teacher(network, rows, length)
            except Untraceable as error:
                self._say(f"the teacher cannot be run on shapes ({error}): what it works in is estimated")
                work = estimate_student(network, rows, length, dtype.itemsize) // max(1, sizes.layers)
                traced = TeacherTrace(2 * work, rows * length * sizes.width * dtype.itemsize)
            self._teachers[key] = sizes, traced
        return self._teachers[key]

    def student(self, config: Config, micro: Micro, teacher: tuple[Sizes, torch.dtype] | None) -> tuple[
        Sizes, StudentTrace
    ]:  # fmt: skip
        key = f"{config.student.model_dump_json()} {config.teacher.model} {micro} {teacher}"
        if key not in self._students:
            self._students[key] = self._trace(config, micro, teacher)
        return self._students[key]

    def _trace(
        self, config: Config, micro: Micro, teacher: tuple[Sizes, torch.dtype] | None
    ) -> tuple[Sizes, StudentTrace]:
        precision = self.precision(config, micro.mode)
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
                traced = trace_student(
                    network, micro.rows, micro.length, head=head, autocast=precision.compute_dtype,
                    products=precision.half_products, accumulates=micro.accumulates,
                )  # fmt: skip
        except Untraceable as error:
            self._say(f"the student cannot be run on shapes ({error}): its activations are estimated")
            traced = _estimated(network, micro, sizes, head)
        return sizes, traced

    def _head(
        self, config: Config, micro: Micro, sizes: Sizes, precision: Precision,
        teacher: tuple[Sizes, torch.dtype] | None,
    ) -> HeadShape:  # fmt: skip
        """The chunk is chosen as the pass will choose it; on a card by what the state leaves free."""
        num_positions = micro.rows * micro.length
        is_card = self.target.is_card
        free = max(0, self.target.bound - 16 * sizes.num_trained) if is_card else None
        asked = config.objectives.chunk_tokens
        chunk = chunk_size(asked, num_positions, sizes.vocabulary, sizes.width, free)
        is_half = precision.compute_dtype is not None or precision.keeps_half_weights
        scratch = scratch_bytes(
            chunk,
            sizes.vocabulary,
            has_teacher_logits=teacher is not None,
            is_plain=self._is_plain(config),
            half_products=is_card and is_half,
        )
        weight = None if teacher is None else (teacher[0].vocabulary, teacher[0].width, teacher[1])
        return HeadShape(scratch, weight, is_card, is_card and is_half)

    def _is_plain(self, config: Config) -> bool:
        """Whether the rows of the head go through the plain kernel. On a card Triton needs what tensor cores need."""
        if self.target.is_card:
            return config.objectives.kernel == "plain" or not self.target.facts.has_tensor_cores
        return choose_kernel(config.objectives.kernel, torch.device("cpu")).name == "plain"

    def _say(self, *notes: str) -> None:
        self.notes.update(dict.fromkeys(notes))


def _store(network: Any, config: Config, precision: Precision) -> None:
    """Store the student as the precision does, and attach its adapter."""
    adapter = config.student.adapter
    if adapter is not None:
        targets, _left_out = adapted_layers(network, adapter, name=config.student.model)
        network.requires_grad_(False)
        with _staying():
            insert(network, adapter, targets, name=config.student.model, seed=0)
        dtype = precision.frozen_storage(adapter.base_dtype)
        store_base(network, dtype, whole=precision.keeps_half_weights, has_values=False)
    elif precision.keeps_half_weights:
        for parameter in network.parameters():
            parameter.data = parameter.data.to(torch.float16)


@contextmanager
def _staying() -> Iterator[None]:
    """Modules stay where they are: peft moves its new layers to the device of the old ones, and shapes cannot move."""
    kind: Any = nn.Module
    move = kind.to
    kind.to = lambda module, *_where, **_how: module
    try:
        yield
    finally:
        kind.to = move


def _estimated(network: Any, micro: Micro, sizes: Sizes, head: HeadShape) -> StudentTrace:
    kept = estimate_student(network, micro.rows, micro.length, 2 if micro.mode != "fp32" else 4)
    if micro.recomputes:
        kept = kept // sizes.layers + micro.rows * micro.length * sizes.width * 4 * sizes.layers
    weight = network.get_output_embeddings().weight
    during = 0 if head.kept_between_passes(weight) else head.scratch + head.operands(weight)
    parts = {ACTIVATIONS: kept, "head": during + 4 * sizes.width * sizes.vocabulary, "gradients": 4 * sizes.num_trained}
    return StudentTrace(parts, kept, 0, head.kept_between_passes(weight))
