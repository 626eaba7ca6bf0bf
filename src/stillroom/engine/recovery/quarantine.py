"""Store the windows of refused steps for inspection and for `stillroom replay`, and read them back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from stillroom.engine.recovery.batch_file import batch_of, facts_of, tensors_of
from stillroom.engine.run import Run
from stillroom.engine.state import RunState
from stillroom.errors import DataError
from stillroom.files import Count, Stored, reason_of, write_atomically
from stillroom.telemetry.strict import strict
from stillroom.types import Batch, Evidence, Verdict

MAX_FILES = 50
_NAME = re.compile(r"^step-(\d+)-attempt-(\d+)\.json$")
_TEXT_CHARACTERS = 2000


class _Verdict(Stored):
    action: str
    reason: str = ""


class _Evidence(Stored):
    loss: float | None
    grad_norm: float | None


class _Batch(Stored):
    text: list[str]


class Facts(Stored):
    """The JSON file of a window, as far as it is read again. The other fields of its batches are read by batch_file."""

    step: Count
    verdict: _Verdict
    located: str
    evidence: _Evidence
    batches: list[_Batch]
    attempt: Count | None = None


def load_window(path: Path) -> tuple[Facts, list[Batch]]:
    """Read a stored window. Raise DataError where its two files are damaged or do not belong together."""
    try:
        values = json.loads(path.read_bytes())
        facts = Facts.of(values)
        tensors = load(path.with_suffix(".safetensors").read_bytes())
        window = [batch_of(tensors, batch, prefix=f"{number}.") for number, batch in enumerate(values["batches"])]
        if not window:
            raise ValueError("it has no batch")
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)
        raise DataError(
            f"{path} cannot be read: {reason}", advice=["the files of a quarantined batch belong together"]
        ) from error
    return facts, window


def find_windows(folder: Path) -> dict[tuple[int, int], Path]:
    """The stored windows, by optimizer step and number of the attempt."""
    windows = {
        (int(match[1]), int(match[2])): path for path in folder.glob("*.json") if (match := _NAME.match(path.name))
    }
    return dict(sorted(windows.items()))


def keep_window(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> Path | None:
    """Write a window's tensors, evidence and verdict, unless the folder holds MAX_FILES already.

    The file name includes the number of the attempt, because a refused attempt does not advance the step. A resumed
    run that refuses the same attempt writes the same file.
    """
    if not run.parallel.is_first:
        return None
    run.check_folder()
    folder = run.folder / "quarantine"
    path = folder / f"step-{evidence.step:06d}-attempt-{state.attempted:06d}"
    kept = find_windows(folder)
    if len(kept) >= MAX_FILES and (evidence.step, state.attempted) not in kept:
        run.log.write("note", text=f"quarantine holds {MAX_FILES} batches already: this one is not kept")
        return None
    try:
        folder.mkdir(exist_ok=True)
        _write(path, window, _facts(run, state, window, evidence, verdict, located))
    except OSError as error:
        run.log.write("note", text=f"the batch cannot be kept in quarantine: {reason_of(error)}; the run goes on")
        return None
    return path


def _write(path: Path, window: Sequence[Batch], facts: dict[str, Any]) -> None:
    tensors = {
        f"{number}.{name}": tensor for number, batch in enumerate(window) for name, tensor in tensors_of(batch).items()
    }
    write_atomically(path.with_suffix(".safetensors"), save(tensors))
    write_atomically(path.with_suffix(".json"), json.dumps(strict(facts), indent=1, allow_nan=False).encode("utf-8"))


def _facts(
    run: Run, state: RunState, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str
) -> dict[str, Any]:
    return {
        "step": evidence.step,
        "attempt": state.attempted,
        "verdict": asdict(verdict),
        "located": located,
        "evidence": {**asdict(evidence), "terms": dict(evidence.terms), "group_norms": dict(evidence.group_norms)},
        "batches": [
            {**facts_of(batch), "text": [_text(run, row.tolist()) for row in batch.input_ids]} for batch in window
        ],
    }


def _text(run: Run, ids: list[int]) -> str:
    """The row as text, with unprintable characters escaped."""
    text = run.tokenizer.decode(ids)[:_TEXT_CHARACTERS]
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
