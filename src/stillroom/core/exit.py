"""Unexpected ends: signals outside of training, too little memory or disk, and bugs."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from stillroom.core.errors import CannotSave, Fault, Interrupted, OutOfMemory, StillroomError, masked
from stillroom.core.files import is_disk_full, reason_of

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|alloc_cpu", re.IGNORECASE)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Raise `Interrupted` on SIGTERM and SIGHUP. Training replaces these handlers by its own."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(
            f"received {signal.Signals(number).name}",
            advice=["give the same command again", "or, where a run had begun: stillroom resume RUN"],
        )

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers: list[signal.Signals] = [getattr(signal, name) for name in names]
    # Only signals with the default handler: nohup ignores SIGHUP, and an embedding program may have handlers.
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in numbers:
            signal.signal(number, end)
    except ValueError:  # not in the main thread
        numbers = []
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


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


def fault_of(error: BaseException, folder: Path | None) -> StillroomError:
    """Our error for an unexpected one. For a bug, write the traceback to a file."""
    shortage = explained(error, str(folder or ""))
    if shortage is not None:
        return shortage
    return Fault(
        f"{type(error).__name__}: {reason_of(error)}",
        where=_keep_traceback(error, folder),
        advice=[
            "report it with that file: it holds the traceback and the versions, no data",
            *([f"a run that had saved a checkpoint can be continued: stillroom resume {folder}"] if folder else []),
        ],
    )


def _keep_traceback(error: BaseException, folder: Path | None) -> str:
    """Write the traceback into the run's folder, or the folder of temporary files. Return its path."""
    text = masked("".join(traceback.format_exception(error)))
    header = masked(
        f"{datetime.now(UTC).isoformat()}\npython {platform.python_version()}, {platform.platform()}\n{sys.argv!r}\n"
    )
    begin = f"traceback-{datetime.now():%Y%m%d-%H%M%S}-"
    places = [folder] if folder is not None and folder.is_dir() else []
    for place in (*places, Path(tempfile.gettempdir())):
        try:
            handle, name = tempfile.mkstemp(".txt", begin, place)  # a name nobody can guess, for the user alone
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(header + text)
        except OSError:
            continue
        return name
    sys.stderr.write(header + text)
    return "above: no folder takes a file"
