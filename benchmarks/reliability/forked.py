"""Runs in forked processes: a thousand starts are affordable when torch is loaded once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

TEXT = Path(tempfile.gettempdir()) / "stillroom-bench-lines.jsonl"


def write_text() -> None:
    """A small file instead of the standard library: opening the text would be most of a start."""
    lines = [f"line {n}: the square of {n} is {n * n}, its cube {n**3}, its half {n / 2}" for n in range(400)]
    TEXT.write_text("\n".join(json.dumps({"text": line}) for line in lines))


def run_here(folder: Path, preset: str, setting: dict[str, Any], inject: str) -> None:
    import torch

    torch.set_num_threads(1)
    from stillroom.config import load_config
    from stillroom.training.distill import distill

    config = load_config(preset=preset, overrides=setting)
    distill(config, folder, device="cpu", inject=inject)


def run_forked(
    folder: Path, preset: str, setting: dict[str, Any], inject: str = "", kill_after: float | None = None
) -> int:
    """The exit code of a run in a child: 0, that of a StillroomError, 70 for any other, or minus the signal.

    With `kill_after` the child is killed after so many seconds, wherever it is.
    """
    child = os.fork()
    if child == 0:
        code = 70
        try:
            from stillroom.core.errors import StillroomError

            try:
                run_here(folder, preset, setting, inject)
                code = 0
            except StillroomError as error:
                code = error.exit_code
        finally:
            os._exit(code)  # the child must never return into the parent's code
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "student" / "model.safetensors").read_bytes()).hexdigest()
