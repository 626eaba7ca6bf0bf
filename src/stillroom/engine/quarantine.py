"""Offending batches, kept for a person to look at and for `stillroom replay`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save

from stillroom.checkpoint import write_atomically
from stillroom.engine.run import Run
from stillroom.telemetry.events import strict
from stillroom.types import Batch, Evidence, Verdict

MAX_FILES = 50
_TEXT_CHARACTERS = 2000


def keep_window(run: Run, window: Sequence[Batch], evidence: Evidence, verdict: Verdict, located: str) -> Path | None:
    """Write a window's tensors and what is known about it; nothing once the folder holds MAX_FILES."""
    if not run.agree.is_first:
        return None
    folder = run.folder / "quarantine"
    folder.mkdir(parents=True, exist_ok=True)
    if len(list(folder.glob("*.json"))) >= MAX_FILES:
        run.log.write("note", text=f"quarantine holds {MAX_FILES} batches already: this one is not kept")
        return None
    path = folder / f"step-{evidence.step:06d}"
    tensors = {}
    for number, batch in enumerate(window):
        tensors[f"{number}.input_ids"] = batch.input_ids
        tensors[f"{number}.attention_mask"] = batch.attention_mask
        tensors[f"{number}.targets"] = batch.targets
        tensors[f"{number}.target_bytes"] = batch.target_bytes
    facts = {
        "step": evidence.step,
        "verdict": asdict(verdict),
        "located": located,
        "evidence": {**asdict(evidence), "terms": dict(evidence.terms), "group_norms": dict(evidence.group_norms)},
        "batches": [
            {
                "index": batch.index,
                "sample_ids": list(batch.sample_ids),
                "text": [_text(run, row.tolist()) for row in batch.input_ids],
            }
            for batch in window
        ],
    }
    write_atomically(path.with_suffix(".safetensors"), save(tensors))
    write_atomically(path.with_suffix(".json"), json.dumps(strict(facts), indent=1, allow_nan=False).encode("utf-8"))
    return path


def _text(run: Run, ids: list[int]) -> str:
    """The row as text with everything unprintable escaped."""
    text = run.tokenizer.decode(ids)[:_TEXT_CHARACTERS]
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
