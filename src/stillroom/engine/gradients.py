"""Measure the gradient of each term: a small term can have a large gradient, and two terms can oppose each other.

Score each term alone on the first micro-batch of a window, by the same `mix.score`, and differentiate it. Gradients
are not added to the parameters' and the random state is restored, so measuring does not change the run in any bit. One
gradient for each term is in memory meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from stillroom.engine.run import Run
from stillroom.engine.state import RunState
from stillroom.types import Batch, Lesson, Signal


def is_due(run: Run, state: RunState) -> bool:
    """At the first step and every `telemetry.gradient_steps` after it; only at the first attempt of a window."""
    interval = run.config.telemetry.gradient_steps
    return bool(interval) and state.applied % interval == 0 and state.attempt == 0


def term_gradients(run: Run, state: RunState, window: Sequence[Batch]) -> dict[str, Any]:
    """Norm of each weighted term's gradient, its share of their sum, and the cosine of each pair."""
    batch = next((batch for batch in window if batch.num_scored), None)
    if batch is None:
        return {"terms": {}, "cosines": {}}
    lesson = run.lesson(state)
    batch = batch.to(run.device)
    devices = [run.device] if run.device.type == "cuda" else []
    gradients: dict[str, list[Tensor]] = {}
    with torch.random.fork_rng(devices=devices):
        signal = run.teacher_of(lesson, batch).observe(batch, run.mix.needs(lesson).teacher)
        for term, weight in lesson.weights.items():
            if weight:
                gradients[term] = _gradient(run, batch, signal, _alone(lesson, term))
    return _compared(gradients)


def _alone(lesson: Lesson, term: str) -> Lesson:
    return replace(lesson, weights={name: weight if name == term else 0.0 for name, weight in lesson.weights.items()})


def _gradient(run: Run, batch: Batch, signal: Signal | None, lesson: Lesson) -> list[Tensor]:
    """The gradient of one lesson's score, one FP32 tensor for each trained parameter, unscaled."""
    devices = [run.device] if run.device.type == "cuda" else []
    trained = [parameter for parameter in run.student.model.parameters() if parameter.requires_grad]
    # Every term sees the dropout of the step itself.
    with torch.random.fork_rng(devices=devices):
        with run.precision.autocast():
            view = run.student.observe(batch, run.mix.needs(lesson).student)
        score = run.mix.score(view, signal, batch, lesson, run.mix.counts([batch]))
        scale = run.precision.loss_scale
        with run.precision.half_products():
            gradients = torch.autograd.grad(score.loss * scale, trained, allow_unused=True)
    return [
        torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float() / scale
        for parameter, gradient in zip(trained, gradients, strict=True)
    ]


def _compared(gradients: dict[str, list[Tensor]]) -> dict[str, Any]:
    norms = {term: math.sqrt(_product(parts, parts)) for term, parts in gradients.items()}
    total = sum(norms.values())
    terms = {
        term: {"norm": norm, "share": norm / total if total > 0 and math.isfinite(total) else 0.0}
        for term, norm in norms.items()
    }
    cosines = {}
    for one, other in combinations(gradients, 2):
        size = norms[one] * norms[other]
        if size > 0:
            cosines[f"{one}.{other}"] = _product(gradients[one], gradients[other]) / size
    return {"terms": terms, "cosines": cosines}


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return float(torch.stack([(a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)]).sum())
