"""The student's own network as its teacher: without its adapter, or with an average of its weights.

No second copy of the network is held. While it answers, its adapter is switched off, or its trained weights are
exchanged for their average, and it computes as the student does: in evaluation mode, under the run's autocast.

A teacher that reads the student's text has nothing to say at the first step. It does with a context that the student
does not see (Askell et al. 2021, Snell et al. 2022), or where labels move the student (Tarvainen and Valpola, 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stillroom.config.schema import TeacherConfig
from stillroom.core.errors import CheckpointUnusable
from stillroom.core.types import HeadWeights
from stillroom.models import Student
from stillroom.models.anatomy import in_eval_mode
from stillroom.teachers.base import Placement, RunContext, Teacher, TeacherTraining
from stillroom.teachers.live import LiveTeacher

Autocast = Callable[[], AbstractContextManager[Any]]


class WithoutAdapter(Placement):
    """The frozen base: in the body of `at_work` the adapter of each layer is off."""

    def __init__(self, network: Any, autocast: Autocast) -> None:
        self._network, self._autocast = network, autocast

    @contextmanager
    def at_work(self) -> Iterator[None]:
        layers = adapted_layers(self._network)
        were_off = [layer._disable_adapters for layer in layers]
        for layer in layers:
            layer._disable_adapters = True  # peft's own switch would also change which weights are trained
        try:
            with in_eval_mode(self._network), self._autocast():
                yield
        finally:
            for layer, was_off in zip(layers, were_off, strict=True):
                layer._disable_adapters = was_off


class Averaged(Placement):
    """The average of the trained weights, in FP32: in the body of `at_work` they are the network's."""

    keeps_head = False  # the average changes with each step

    def __init__(self, network: Any, autocast: Autocast, decay: float) -> None:
        self._network, self._autocast, self.decay = network, autocast, decay
        self._is_at_work = False
        self.weights = {name: one.detach().float().clone() for name, one in self._trained()}

    def _trained(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, one) for name, one in self._network.named_parameters() if one.requires_grad)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        if self._is_at_work:
            yield
            return
        own = [(one, one.data) for _, one in self._trained()]
        self._is_at_work = True
        try:
            for name, one in self._trained():
                one.data = self.weights[name].to(one.dtype)
            with in_eval_mode(self._network), self._autocast():
                yield
        finally:
            for one, data in own:
                one.data = data
            self._is_at_work = False

    def lasting(self, head: HeadWeights) -> HeadWeights:
        """The head with the averaged weights: the parameter that it names has the student's again after `at_work`."""
        return replace(head, weight=head.weight.detach(), bias=None if head.bias is None else head.bias.detach())

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average towards the present weights."""
        for name, one in self._trained():
            self.weights[name].lerp_(one.detach().float(), 1.0 - self.decay)


class AveragedTraining(TeacherTraining):
    """The average follows the student after each applied step, and is part of the run's state."""

    def __init__(self, teacher: Teacher, average: Averaged) -> None:
        super().__init__(teacher)
        self._average = average

    def after_update(self) -> None:
        self._average.follow()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._average.weights)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keeps_history: bool = False) -> None:
        own = self._average.weights
        if {name: tuple(one.shape) for name, one in tensors.items()} != {n: tuple(one.shape) for n, one in own.items()}:
            raise CheckpointUnusable(
                "the checkpoint's average of the student is of other weights than are trained here",
                advice=["resume with the student and the libraries that the run began with"],
            )
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


class StudentAsTeacher(LiveTeacher):
    """The student's network under a placement that makes it the teacher's."""

    def as_model(self) -> Student:
        return _Unadapted(self.model, vocab_size=self.vocab_size, is_described=self.is_described)


class _Unadapted(Student):
    @property
    def num_parameters(self) -> int:
        """Without those of an adapter, which is off or would be merged."""
        added = [one.numel() for one in self.model.parameters() if one.requires_grad]
        return super().num_parameters - (sum(added) if adapted_layers(self.model) else 0)


def adapted_layers(network: Any) -> list[Any]:
    return [module for module in network.modules() if hasattr(module, "lora_A")]


def student_as_teacher(
    section: TeacherConfig, run: RunContext, vocab_size: int
) -> tuple[StudentAsTeacher, Averaged | None]:
    """The teacher of `teacher.model = "self"` or "ema", and the average of the latter."""
    network, precision = run.student.model, run.precision
    average = Averaged(network, precision.autocast, section.ema_decay) if section.model == "ema" else None
    teacher = StudentAsTeacher(
        network,
        vocab_size=vocab_size,
        device=precision.device,
        offload=False,
        is_described=run.student.is_described,
        placement=average or WithoutAdapter(network, precision.autocast),
    )
    return teacher, average
