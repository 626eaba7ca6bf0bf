"""A quarantined batch, run again: does it still go wrong, and where?"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from stillroom.engine import folder as run_folder
from stillroom.engine.build import build_run, find_device, load_models
from stillroom.engine.distill import newest_checkpoint
from stillroom.engine.locate import locate
from stillroom.engine.state import RunState, restore
from stillroom.engine.step import attempt
from stillroom.errors import ConfigError, DataError
from stillroom.telemetry import EventLog
from stillroom.types import Batch


def replay(folder: Path, step: int, *, device: str = "auto") -> dict[str, Any]:
    """Score a quarantined window with the newest checkpoint and compare with what was seen then. Nothing is changed."""
    config = run_folder.read_config(folder)
    facts, window = read_window(folder, step)
    where = find_device(device)
    models = load_models(config, where, folder=folder)
    # A log of its own: replaying must not write into the run's record.
    with EventLog(folder / "quarantine" / f"replay-{step:06d}.jsonl") as log:
        run = build_run(config, folder, log, device=where, models=models)
        state = RunState()
        saved = newest_checkpoint(folder, config)
        if saved is not None:
            restore(run, state, saved)
        run.student.train()
        evidence, lesson = attempt(run, state, window)
        is_finite = math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
        result = {
            "step": step,
            "checkpoint": saved.step if saved else None,
            "then": {
                "verdict": facts["verdict"]["action"],
                "reason": facts["verdict"]["reason"],
                "located": facts["located"],
                "loss": facts["evidence"]["loss"],
                "grad_norm": facts["evidence"]["grad_norm"],
            },
            "now": {
                "loss": evidence.loss,
                "grad_norm": evidence.grad_norm,
                "terms": dict(evidence.terms),
                "located": "" if is_finite else locate(run, window, lesson),
            },
            "samples": [name for batch in window for name in batch.sample_ids],
            "text": [text for batch in facts["batches"] for text in batch["text"]],
        }
        log.write("replay", **result)
    return result


def read_window(folder: Path, step: int) -> tuple[dict[str, Any], list[Batch]]:
    path = folder / "quarantine" / f"step-{step:06d}.json"
    if not path.exists():
        kept = sorted(int(m[1]) for p in path.parent.glob("*.json") if (m := re.match(r"step-(\d+)\.json$", p.name)))
        raise ConfigError(
            f"step {step} has no quarantined batch",
            where=str(path.parent),
            advice=[f"steps with one: {', '.join(map(str, kept))}" if kept else "this run quarantined nothing"],
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        tensors = load(path.with_suffix(".safetensors").read_bytes())
        window = [
            Batch(
                tensors[f"{number}.input_ids"],
                tensors[f"{number}.attention_mask"],
                tensors[f"{number}.targets"],
                tensors[f"{number}.target_bytes"],
                tuple(batch["sample_ids"]),
                int(batch["index"]),
            )
            for number, batch in enumerate(facts["batches"])
        ]
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", advice=["the files of a quarantined batch belong together"]
        ) from error
    return facts, window
