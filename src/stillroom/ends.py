"""Ends that nobody foresaw: signals outside of training, the machine's limits, and faults of ours."""

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

from stillroom.errors import CannotSave, Fault, Interrupted, OutOfMemory, StillroomError
from stillroom.files import is_disk_full, reason_of

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|alloc_cpu", re.IGNORECASE)


@contextmanager
def ending_politely() -> Iterator[None]:
    """Outside of training SIGTERM and a hangup end the command at once, with the exit code of an interruption."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(
            f"received {signal.Signals(number).name}",
            advice=["give the same command again", "or, where a run had begun: stillroom resume RUN"],
        )

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers: list[signal.Signals] = [getattr(signal, name) for name in names]
    # Only what nobody else has taken: under nohup a hangup is ignored, an embedding program has handlers of its own.
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
    """The end that an error of memory or disk means; nothing for any other, which is a fault of ours."""
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


def fault_of(error: Exception, folder: Path | None) -> StillroomError:
    """The end that an error nobody expected becomes; of a fault of ours the traceback is kept in a file."""
    known = explained(error, str(folder or ""))
    if known is not None:
        return known
    return Fault(
        f"{type(error).__name__}: {reason_of(error)}",
        where=_keep_traceback(error, folder),
        advice=[
            "report it with that file: it holds the traceback and the versions, no data",
            *([f"a run that had saved a checkpoint can be continued: stillroom resume {folder}"] if folder else []),
        ],
    )


def _keep_traceback(error: Exception, folder: Path | None) -> str:
    """Write the traceback into the run's folder, or where temporary files go; answers with where it is."""
    text = "".join(traceback.format_exception(error))
    words = (
        f"{datetime.now(UTC).isoformat()}\npython {platform.python_version()}, {platform.platform()}\n{sys.argv!r}\n"
    )
    name = f"traceback-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    places = [folder] if folder is not None and folder.is_dir() else []
    for place in (*places, Path(tempfile.gettempdir())):
        try:
            (place / name).write_text(words + text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return str(place / name)
    sys.stderr.write(words + text)
    return "above: no folder takes a file"
