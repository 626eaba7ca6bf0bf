"""The parts of a run, built once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, Loader, fixed_batches
from stillroom.engine.background_save import Saves
from stillroom.engine.hooks import Hooks
from stillroom.engine.state import RunState
from stillroom.errors import CannotSave
from stillroom.guard import Guard
from stillroom.locks import Lock
from stillroom.models import Student
from stillroom.models.adapter.attach import Adapter
from stillroom.objectives.mix import Mix
from stillroom.parallel import Parallel
from stillroom.precision import AdamW, Precision
from stillroom.schedule import Schedule
from stillroom.snapshots import Snapshots
from stillroom.teachers import NO_TEACHER, Teacher
from stillroom.telemetry import EventLog
from stillroom.types import Batch, Lesson

_RECOVERY_STEPS = 50
_CANARY_ROWS = 4


def held_out_batches(config: Config, corpus: Corpus) -> list[Batch]:
    size = config.eval.batch_size or config.train.rows_per_batch
    return list(fixed_batches(corpus.evaluation, size, config.eval.max_batches))


@dataclass(frozen=True)
class Run:
    """The parts of a run. What changes is in RunState and inside the parts: weights, optimizer, guard, precision."""

    config: Config
    folder: Path
    device: torch.device
    tokenizer: Any
    student: Student
    teacher: Teacher
    corpus: Corpus
    loader: Loader
    mix: Mix
    curriculum: Curriculum
    schedule: Schedule
    precision: Precision
    optimizer: AdamW
    guard: Guard
    log: EventLog
    checkpoints: CheckpointStore
    ring: Snapshots
    saves: Saves = field(default_factory=Saves)
    hooks: Hooks = field(default_factory=Hooks)
    parallel: Parallel = field(default_factory=Parallel)
    num_shares: int = 1  # processes that the run began with: a window has `accumulation` micro-batches for each
    vocabularies: dict[str, str] = field(default_factory=dict)  # hash of each model's table of tokens
    lock: Lock | None = None  # of the process that writes
    adapter: Adapter | None = None  # in the student, where that is what is trained
    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # hashes of data and models, for the checkpoints

    @property
    def num_trained(self) -> int:
        """Parameters of the student that are trained."""
        return sum(cell.parameter.numel() for cell in self.optimizer.cells["student"])

    @property
    def num_student_parameters(self) -> int:
        """Of the student that is written: an adapter is merged into it."""
        held: int = sum(parameter.numel() for parameter in self.student.model.parameters())
        return held - (self.adapter.num_trained if self.adapter else 0)

    def check_folder(self) -> None:
        """Raise if the folder was deleted or replaced, before anything is saved into it."""
        if self.lock is not None and not self.lock.holds():
            raise CannotSave(
                "the folder of the run was deleted or replaced while it was training",
                where=str(self.folder),
                advice=["begin again in another folder with --out", "leave a run's folder alone until it has ended"],
            )

    def last_lesson(self, state: RunState) -> Lesson:
        """The lesson of the last applied step."""
        return self.lesson(replace(state, applied=max(state.applied - 1, 0)))

    def lesson(self, state: RunState) -> Lesson:
        """The curriculum's lesson, or labels alone while the teacher is suspended."""
        curriculum = self.curriculum
        if state.applied < state.fallback_until:
            curriculum = curriculum.without_teacher()
        return curriculum.at(state.applied / max(self.schedule.num_steps, 1))

    def rate_factor(self, state: RunState) -> float:
        """The schedule's share of the peak learning rate, lowered for a while after a divergence."""
        factor = self.schedule.factor(state.applied)
        since = state.applied - state.backoff_at
        if state.backoff_at >= 0 and since < _RECOVERY_STEPS:
            backoff = self.config.guard.learning_rate_backoff
            factor *= backoff + (1.0 - backoff) * since / _RECOVERY_STEPS
        return factor

    def teacher_of(self, lesson: Lesson, batch: Batch) -> Teacher:
        """The teacher of a lesson; `NO_TEACHER` where no term needs one, or all rows are learned from the labels."""
        is_labels_only = bool(batch.sources) and self.config.data.label_sources.issuperset(batch.sources)
        return self.teacher if lesson.asks_teacher and not is_labels_only else NO_TEACHER

    def eval_batches(self) -> list[Batch]:
        return held_out_batches(self.config, self.corpus)

    def canary(self) -> Batch:
        """A fixed batch whose loss tells whether the student is sound.

        Training rows: on held-out text an overfitting student gets worse without a fault. A few rows are enough,
        because they are only compared with themselves.
        """
        return next(iter(fixed_batches(self.corpus.train, min(self.config.train.rows_per_batch, _CANARY_ROWS), 1)))
