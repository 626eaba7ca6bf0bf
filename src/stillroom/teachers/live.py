"""A teacher that answers while the student trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import TeacherConfig
from stillroom.core.types import Batch, DenseSignal, Needs
from stillroom.models import LoadedModel, Student, open_teacher
from stillroom.models.anatomy import layers_if_any
from stillroom.models.compile import CompiledBody
from stillroom.models.student import last_hidden, tapped
from stillroom.teachers.base import Placement, SignalKind, Teacher
from stillroom.teachers.placement import Offloaded, StreamedModel, open_streamed


class LiveTeacher(Teacher):
    """A frozen model, on the device for good or only while it answers."""

    kind: SignalKind = "dense"

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        device: torch.device,
        offload: bool,
        is_described: bool,
        compiled: CompiledBody | None = None,
        facts: Mapping[str, Any] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """With a `placement`, the network's layers come to the device by themselves."""
        self.model = model
        self._facts = dict(facts or {})  # entries for the run's summary
        self._compiled = compiled
        self.vocab_size = vocab_size
        self.device = device
        self.is_described = is_described
        self._blocks = layers_if_any(model)
        self._placement = placement or (Offloaded(model, device) if offload else Placement())
        self.writes_text = self._placement.writes_text
        if not self.writes_text:
            self.notes = ("the teacher writes no samples: each token would read all its layers",)
        self.answers_together = self._placement.is_shared
        self.answers_last = self._placement.keeps_head
        if placement is None and not offload:
            model.to(device)

    def listen(self, tell: Callable[[str], object]) -> None:
        """Tell a run's log what goes otherwise than planned when weights are brought."""
        self._placement.tell = tell

    @torch.no_grad()
    def observe(self, batch: Batch, needs: Needs) -> DenseSignal:
        return self.answer(batch, needs)

    def answer(self, batch: Batch, needs: Needs) -> DenseSignal:
        """`observe` for callers that may want a gradient: those stay `at_work` until after their backward."""
        with self.at_work(), tapped(self._blocks, needs) as taps:
            compiled = None if torch.is_grad_enabled() or needs != Needs() else self._compiled
            hidden, head = last_hidden(self.model, batch, self.vocab_size, self.is_described, compiled)
            head = self._placement.lasting(head)
        chosen = hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.positions)
        return DenseSignal(chosen, head, taps)

    def begin_window(self, window: Sequence[Batch], cursor: int) -> None:
        self._placement.begin_window()

    def end_window(self) -> None:
        self._placement.end_window()

    def as_model(self) -> Student:
        return Student(self.model, vocab_size=self.vocab_size, is_described=self.is_described)

    def at_work(self) -> AbstractContextManager[None]:
        return self._placement.at_work()

    def summary(self) -> dict[str, Any]:
        return {**self._facts, **self._placement.facts()}


def open_live(section: TeacherConfig, dtype: torch.dtype, tokenizer: Any = None) -> LoadedModel:
    """Load a teacher as its placement wants it, and test it."""
    if section.placement == "stream":
        return open_streamed(section, dtype, tokenizer)
    return open_teacher(section, dtype, tokenizer)


def live_teacher(
    config: Config,
    loaded: LoadedModel,
    vocab_size: int,
    device: torch.device,
    compiled: Any = None,
    placement: Placement | None = None,
    tell: Callable[[str], object] | None = None,
) -> LiveTeacher:
    """The teacher of a loaded model. `placement` is where its weights were put already."""
    if placement is None and isinstance(loaded, StreamedModel) and loaded.stream is not None:
        loaded.stream.settle(device)
        placement = loaded.stream
    teacher = LiveTeacher(
        loaded.network,
        vocab_size=vocab_size,
        device=device,
        offload=config.teacher.placement == "offload",
        is_described=loaded.is_described,
        compiled=compiled,
        facts=loaded.facts,
        placement=placement,
    )
    if tell is not None:
        teacher.listen(tell)
    return teacher
