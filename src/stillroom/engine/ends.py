"""Errors of the machine, in the words of an end that a user can act on."""

from __future__ import annotations

import re

import torch

from stillroom.errors import CannotSave, OutOfMemory, StillroomError
from stillroom.files import is_disk_full, reason_of

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|alloc_cpu", re.IGNORECASE)


def explained(error: BaseException, where: str) -> StillroomError | None:
    """The end that an error of memory or disk means; nothing for any other, which is a fault of ours."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))
    ):
        return OutOfMemory(
            f"there is not enough memory: {reason_of(error)}",
            where=where,
            advice=[
                "smaller micro-batches, more of them: --set train.batch_size=1 with train.gradient_accumulation_steps",
                "recompute activations: --set student.gradient_checkpointing=true",
                "shorter rows: --set data.max_length=128",
                "keep the teacher off the device: --set teacher.placement=offload",
            ],
        )
    if isinstance(error, OSError) and is_disk_full(error):
        return CannotSave(
            f"cannot write: {reason_of(error)}",
            where=str(error.filename or where),
            advice=["free some space on that disk, then `stillroom resume` the run"],
        )
    return None
