"""Every objective as a run that can be attempted, here or in one of several processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch

from stillroom.config import load_config
from stillroom.losses import divergences
from stillroom.parallel import Parallel
from stillroom.parallel.base import join
from stillroom.precision.device import find_device
from stillroom.telemetry import EventLog
from stillroom.training.build import build_run
from stillroom.training.models import load_models
from stillroom.training.run import Run, RunState
from stillroom.training.step import attempt

KD: dict[str, dict[str, Any]] = {
    **{name: {"divergence": name} for name in divergences.names()},
    "tempered": {"temperature": 3.0},
    "taid halfway": {"divergence": "taid", "interpolation": 0.5},
    "top-k": {"top_k": 8},
    "top-k, reverse": {"top_k": 8, "divergence": "reverse_kl"},
    "label residual": {"top_k": 8, "on_wrong_teacher": "label_residual"},
    "mft": {"on_wrong_teacher": "mft"},
    "entropy weights": {"token_weight": "entropy"},
    "half of the tokens": {"token_fraction": 0.5},
    "half by entropy": {"token_fraction": 0.5, "token_criterion": "entropy"},
    "temperature by difficulty": {"token_temperature": 0.5},
}
INNER = {
    "feature": {"weight": 0.3},
    "feature, cosine": {"weight": 0.3, "kind": "cosine"},
    "attention": {"weight": 0.3},
    "layerwise": {"weight": 0.3},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {f"objectives.kd.{key}": value for key, value in keys.items()} for name, keys in KD.items()},
    **{
        name: {f"objectives.{name.partition(',')[0]}.{key}": value for key, value in keys.items()}
        for name, keys in INNER.items()
    },
}
# It compares the rows of a micro-batch with each other, so its value depends on which they are: two processes see the
# same micro-batches as one, eight micro-batches of one row are others than one of eight.
WITHIN_A_BATCH = {"contrastive": {"objectives.contrastive.weight": 0.3}}
SHARED = {"objectives.kd.weight": 0.7, "objectives.ce.weight": 0.3, "data.packing": "rows"}


@dataclass(frozen=True)
class Seen:
    """What one attempt came to."""

    loss: float
    norm: float
    terms: dict[str, float]
    gradient: torch.Tensor

    @classmethod
    def of(cls, run: Run) -> Seen:
        evidence, _lesson = attempt(run, RunState(), run.loader.window(0))
        whole = torch.cat([gradient.double().flatten() for _name, gradient in run.optimizer.named_gradients()])
        return cls(evidence.loss, evidence.grad_norm, dict(evidence.terms), whole)


def make_run(world: Path, log: EventLog, over: dict[str, Any], parallel: Parallel | None = None) -> Run:
    config = load_config(overrides={**tiny.settings(world), **SHARED, **over})
    device = find_device("cpu")
    models = load_models(config, device)
    run = build_run(config, log.path.parent, log, device=device, models=models, parallel=parallel)
    run.student.train()
    return run


def main(world: Path, out: Path) -> None:
    """Attempt all of them as one process of several; what the first one finds is kept in a file."""
    parallel = join(timeout_minutes=3)
    found = {}
    with EventLog(out.with_suffix(f".{parallel.rank}.jsonl")) as log:
        for name, over in {**CASES, **WITHIN_A_BATCH}.items():
            found[name] = Seen.of(make_run(world, log, over, parallel)).__dict__
    if parallel.is_first:
        torch.save(found, out)
