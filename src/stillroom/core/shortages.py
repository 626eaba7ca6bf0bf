"""Tell a lack of memory or disk space from other errors, and say what to try."""

from __future__ import annotations

import re

from stillroom.core.errors import CannotSave, OutOfMemory, StillroomError
from stillroom.core.files import is_disk_full, reason_of

# cuBLAS and cuDNN allocate their workspaces themselves, and report a full GPU by a status of their own.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|alloc_cpu"
    r"|CU(BLAS|DNN|SPARSE|SOLVER|FFT)_(STATUS_)?(INTERNAL_ERROR_DEVICE_ALLOCATION|ALLOC)_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether main memory or a device's ran out. Torch's own error and that of its CPU allocator are RuntimeErrors."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def explained(error: BaseException, where: str) -> StillroomError | None:
    """Our error for a lack of memory or disk space; None for any other error."""
    if is_out_of_memory(error):
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
            advice=["free some space on that disk, then give the command again"],
        )
    return None
