"""One real step of the configuration in its precision, beside the same step in FP32."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stillroom.checks.doctor.finding import Finding, check
from stillroom.checks.doctor.setup import Setup
from stillroom.config import Config
from stillroom.engine.building.assemble import build_run
from stillroom.engine.building.loss_scale import find_loss_scale
from stillroom.engine.building.models import load_models
from stillroom.engine.building.preflight import first_forward
from stillroom.engine.state import RunState
from stillroom.engine.step import attempt
from stillroom.teachers.spec import teacher_dtype
from stillroom.telemetry import EventLog

SUBJECT = "real step"
# What the loss and the gradient of a step may differ from FP32's: FP16 and BF16 products carry 11 and 8 bits.
_LOSS = {"bf16-mixed": 3e-2}
_HALF_LOSS = 1e-2
_GRADIENT = 0.2


@dataclass(frozen=True)
class Taken:
    """What a step came to."""

    mode: str
    loss: float
    norm: float
    gradient: Tensor
    bad_teacher_rows: int
    loss_scale: float
    notes: tuple[str, ...]


@check(SUBJECT, is_slow=True)
def real_step(setup: Setup) -> Iterator[Finding]:
    setup.part("models")
    setup.part("corpus")
    own = take(setup.config, setup.device)
    if not (math.isfinite(own.loss) and math.isfinite(own.norm)):
        yield Finding(
            "red",
            SUBJECT,
            f"in {own.mode} the loss of the first step is {own.loss:g} and its gradient norm {own.norm:g}",
            _wider(own.mode, setup),
        )
    if own.bad_teacher_rows:
        yield Finding(
            "red",
            SUBJECT,
            f"the teacher's answer is no distribution at {own.bad_teacher_rows:,} positions of the first batch",
            _wider("fp32", setup),
        )
    if own.norm == 0.0:
        yield Finding(
            "red",
            SUBJECT,
            "the gradient of the first step is zero: nothing will be learned",
            "--set guard.loss_clamp=0 --set guard.logit_clamp=0, and check the weights of the objectives",
        )
    if own.mode == "fp32":
        yield Finding("green", SUBJECT, f"fp32: loss {own.loss:.6g}, gradient norm {own.norm:.4g}")
    else:
        yield _compared(own, take(_in_fp32(setup.config), setup.device))
    if own.norm > 1e4:
        yield Finding(
            "amber",
            SUBJECT,
            f"the gradient norm of the first step is {own.norm:.3g}, and steps are clipped to "
            f"{setup.config.train.max_grad_norm:g}",
            "check that student and data belong together, or lower the weights of the objectives",
        )


def _wider(mode: str, setup: Setup) -> str:
    """Which of both models can be computed in more digits."""
    tries = [] if mode == "fp32" else ["--set precision.mode=fp32"]
    is_whole = teacher_dtype(setup.config, setup.device) == torch.float32
    tries += [] if is_whole or not setup.uses_teacher else ["--set teacher.dtype=float32"]
    return ", and ".join(tries) or "check the models' folders: both are computed in FP32"


def _compared(own: Taken, exact: Taken) -> Finding:
    gap = abs(own.loss - exact.loss) / max(abs(exact.loss), 1e-12)
    apart = float((own.gradient - exact.gradient).norm() / exact.gradient.norm().clamp_min(1e-300))
    what = (
        f"{own.mode} against fp32: loss {own.loss:.6g} and {exact.loss:.6g}, apart by {gap:.1e} of it; gradients apart "
        f"by {apart:.1e} of their norm"
    )
    if gap <= _LOSS.get(own.mode, _HALF_LOSS) and apart <= _GRADIENT:
        return Finding("green", SUBJECT, what)
    is_far = not math.isfinite(gap + apart) or gap > 0.1 or apart > 0.5
    return Finding("red" if is_far else "amber", SUBJECT, what, "--set precision.mode=fp32, or fp16-mixed")


def _in_fp32(config: Config) -> Config:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"mode": "fp32"})})


def take(config: Config, device: torch.device) -> Taken:
    """Build the run anew and attempt its first step; nothing is applied, and nothing is left on the disk."""
    short = config.model_copy(update={"train": config.train.model_copy(update={"compile": "off"})})
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stillroom-doctor-") as name, EventLog(Path(name) / "events.jsonl") as log:
        log.listen(lambda event: notes.append(str(event.get("text", ""))) if event["event"] == "note" else None)
        run = build_run(short, Path(name), log, device=device, models=load_models(short, device))
        state = RunState()
        first_forward(run, state)
        find_loss_scale(run, state)
        run.student.train()
        evidence, _lesson = attempt(run, state, run.loader.window(0))
        parts = [gradient.double().flatten().cpu() for _name, gradient in run.optimizer.named_gradients()]
        gradient = torch.cat(parts) / run.precision.loss_scale if parts else torch.zeros(1, dtype=torch.float64)
        return Taken(
            run.precision.mode, evidence.loss, evidence.grad_norm, gradient, evidence.bad_teacher_rows,
            run.precision.loss_scale, tuple(notes),
        )  # fmt: skip
