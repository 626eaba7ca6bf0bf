"""The parts of a run, built once and handed to whoever needs them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stillroom.checkpoint import CheckpointStore
from stillroom.config import Config
from stillroom.curriculum import Curriculum
from stillroom.data import Corpus, Loader, fixed_batches
from stillroom.engine.hooks import Hooks
from stillroom.engine.run_folder.lock import FolderLock
from stillroom.engine.state import RunState
from stillroom.errors import CannotSave
from stillroom.guard import Guard
from stillroom.models import Student
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
    size = config.eval.batch_size or config.train.batch_size
    return list(fixed_batches(corpus.evaluation, size, config.eval.max_batches))


@dataclass(frozen=True)
class Run:
    """The parts of a run. What changes lives in RunState and inside the parts: weights, optimizer, guard, policy."""

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
    hooks: Hooks = field(default_factory=Hooks)
    parallel: Parallel = field(default_factory=Parallel)
    vocabularies: dict[str, str] = field(default_factory=dict)  # hash of each model's table of tokens
    lock: FolderLock | None = None  # of the process that writes

    def check_folder(self) -> None:
        """Before anything is saved: a folder that was deleted is not made again half-empty."""
        if self.lock is not None and not self.lock.holds():
            raise CannotSave(
                "the folder of the run was deleted or replaced while it was training",
                where=str(self.folder),
                advice=["begin again in another folder with --out", "leave a run's folder alone until it has ended"],
            )

    def last_lesson(self, state: RunState) -> Lesson:
        """The lesson of the step that was applied last."""
        return self.lesson(replace(state, applied=max(state.applied - 1, 0)))

    def lesson(self, state: RunState) -> Lesson:
        """What the curriculum says now, or labels alone while the teacher is suspended."""
        curriculum = self.curriculum
        if state.applied < state.fallback_until:
            curriculum = curriculum.without_teacher()
        return curriculum.at(state.applied / max(self.schedule.num_steps, 1))

    def rate_factor(self, state: RunState) -> float:
        """The schedule's share of the peak learning rate, held back for a while after a divergence."""
        factor = self.schedule.factor(state.applied)
        since = state.applied - state.backoff_at
        if state.backoff_at >= 0 and since < _RECOVERY_STEPS:
            backoff = self.config.guard.learning_rate_backoff
            factor *= backoff + (1.0 - backoff) * since / _RECOVERY_STEPS
        return factor

    def teacher_of(self, lesson: Lesson) -> Teacher:
        """Who answers in a lesson: nobody where no term asks."""
        return self.teacher if lesson.asks_teacher else NO_TEACHER

    def eval_batches(self) -> list[Batch]:
        return held_out_batches(self.config, self.corpus)

    def canary(self) -> Batch:
        """A fixed batch that tells whether the student is sound.

        From the training rows: on held-out text a student that overfits gets worse without being broken. A few rows
        are enough, because they are only ever compared with themselves.
        """
        return next(iter(fixed_batches(self.corpus.train, min(self.config.train.batch_size, _CANARY_ROWS), 1)))
