"""Run a quarantined window again and compare with what was recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from stillroom.core.errors import ConfigError, DataError
from stillroom.core.types import Batch
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog
from stillroom.training import run_folder as run_folder
from stillroom.training.build import build_run
from stillroom.training.cut_rounds import last_round
from stillroom.training.distill import newest_checkpoint, precision_of, restore_checkpoint
from stillroom.training.models import load_models
from stillroom.training.recover import Facts, find_windows, load_window, locate
from stillroom.training.run import Run, RunState
from stillroom.training.run_folder import NONE, Trust
from stillroom.training.step import attempt


def replay(
    folder: Path, step: int, *, attempt_number: int | None = None, device: str = "auto", trust: Trust = NONE
) -> dict[str, Any]:
    """Score a quarantined window with the newest checkpoint and compare with the record. Change nothing."""
    config = last_round(run_folder.read_config(folder, trust=trust), folder)
    facts, window = read_window(folder, step, attempt_number)
    where = find_device(device)
    saved = newest_checkpoint(folder, config)
    models = load_models(config, where, folder=folder, begun_in=precision_of(saved))
    # A separate log: replaying must not write into the run's.
    with EventLog(folder / "quarantine" / f"replay-{step:06d}.jsonl") as log:
        run = build_run(config, folder, log, device=where, models=models, begun_in=precision_of(saved))
        state = RunState()
        if saved is not None:
            restore_checkpoint(run, state, saved)
        _check_tokens(run, window)
        run.student.train()
        evidence, loss_weights = attempt(run, state, window)
        is_finite = math.isfinite(evidence.loss) and math.isfinite(evidence.grad_norm)
        result = {
            "step": step,
            "attempt": facts.attempt,
            "checkpoint": saved.step if saved else None,
            "then": {
                "verdict": facts.verdict.action,
                "reason": facts.verdict.reason,
                "located": facts.located,
                "loss": facts.evidence.loss,
                "grad_norm": facts.evidence.grad_norm,
            },
            "now": {
                "loss": evidence.loss,
                "grad_norm": evidence.grad_norm,
                "terms": dict(evidence.terms),
                "located": "" if is_finite else locate(run, window, loss_weights),
            },
            "samples": [name for batch in window for name in batch.sample_ids],
            "text": [text for batch in facts.batches for text in batch.text],
        }
        log.write("replay", **result)
    return result


def read_window(folder: Path, step: int, attempt_number: int | None = None) -> tuple[Facts, list[Batch]]:
    """Facts and batches of a refused attempt. `attempt_number` is needed where a step has several."""
    place = folder / "quarantine"
    kept = find_windows(place)
    if not any(of == step for of, _attempt in kept):
        steps = sorted({of for of, _attempt in kept})
        raise ConfigError(
            f"step {step} has no quarantined batch",
            where=str(place),
            advice=[f"steps with one: {', '.join(map(str, steps))}" if steps else "this run quarantined nothing"],
        )
    attempts = sorted(number for of, number in kept if of == step)
    if attempt_number is None and len(attempts) > 1:
        raise ConfigError(
            f"step {step} has {len(attempts)} quarantined batches: attempts {', '.join(map(str, attempts))}",
            where=str(place),
            advice=[f"say which: stillroom replay {folder} {step} --attempt {attempts[0]}"],
        )
    wanted = attempts[0] if attempt_number is None else attempt_number
    if wanted not in attempts:
        raise ConfigError(
            f"step {step} has no quarantined batch of attempt {wanted}",
            where=str(place),
            advice=[f"attempts at step {step}: {', '.join(map(str, attempts))}"],
        )
    return load_window(kept[step, wanted])


def _check_tokens(run: Run, window: list[Batch]) -> None:
    """Raise if the batches have tokens that the student does not have."""
    size = run.student.vocab_size
    largest = max(int(tokens.max()) for batch in window for tokens in (batch.input_ids, batch.targets))
    if largest >= size:
        raise DataError(
            f"the quarantined batch has the token {largest}, and the vocabulary {size:,}",
            where=str(run.folder / "quarantine"),
            advice=["the files of a quarantined batch belong together", "check that the models are those of the run"],
        )
