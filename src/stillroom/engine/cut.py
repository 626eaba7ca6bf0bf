"""A student cut from the teacher when a run is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stillroom.config import Config
from stillroom.config.schema import StudentConfig
from stillroom.data import fixed_batches, open_data
from stillroom.models.load import ready_student
from stillroom.models.shrink import Cut, cut
from stillroom.types import Batch


def cut_student(config: Config, teacher: Any, tokenizer: Any, device: torch.device) -> Cut:
    """The student that the configuration asks to be cut, ready to be trained.

    Where a width is cut, the teacher reads a few batches of the training data first: a rerun reads the same ones.
    """
    wanted = config.student.shrink
    batches: Iterable[Batch] = ()
    if wanted.cuts_width:
        rows = open_data(config.data, tokenizer).train
        batches = fixed_batches(rows, config.train.batch_size, wanted.calibration_batches)
        teacher.to(device)
    found = cut(teacher, wanted, batches)
    teacher.to("cpu")
    ready_student(found.model, config.student)
    return found


def student_name(config: Config) -> str:
    """What the student is called in log and report: one that is cut has no name of its own."""
    return f"{config.teacher.model} (cut)" if config.student.init == "shrink" else config.student.model


def unused_name(student: StudentConfig) -> list[str]:
    default = StudentConfig.model_fields["model"].default
    return [] if student.model == default else [f"student.model = {student.model} is not read: the student is cut"]
