"""Measure the gradient of each term: a small term can have a large gradient, and two terms can oppose each other.

Score each term alone on the first micro-batch of a window, by the same `mix.score`, and differentiate it. Gradients are
not added to the parameters' and the random state is restored, so measuring does not change the run in any bit. One
gradient for each term is in memory meanwhile. Of several processes with a replica each the first one's micro-batch is
measured; a sharded student has the gradient of all processes' micro-batches together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from stillroom.core.types import Batch, LossWeights, Signal
from stillroom.precision.storage import local
from stillroom.training.run import Run, RunState


def term_gradients(run: Run, state: RunState, window: Sequence[Batch]) -> dict[str, Any]:
    """Norm of each weighted term's gradient, its share of their sum, and the cosine of each pair."""
    batches = run.parallel.scored(window)
    if not batches:
        return {"terms": {}, "cosines": {}}
    loss_weights = run.loss_weights(state)
    batch = batches[0].to(run.device)
    devices = [run.device] if run.device.type == "cuda" else []
    gradients: dict[str, list[Tensor]] = {}
    with torch.random.fork_rng(devices=devices):
        signal = run.teacher_of(loss_weights, batch).observe(batch, run.mix.needs(loss_weights).teacher)
        for term, weight in loss_weights.weights.items():
            if weight:
                gradients[term] = _gradient(run, batch, signal, _alone(loss_weights, term))
    return _compared(run, gradients)


def _alone(loss_weights: LossWeights, term: str) -> LossWeights:
    return replace(
        loss_weights, weights={name: weight if name == term else 0.0 for name, weight in loss_weights.weights.items()}
    )


def _gradient(run: Run, batch: Batch, signal: Signal | None, loss_weights: LossWeights) -> list[Tensor]:
    """Differentiate the score under these loss weights: one FP32 tensor for each trained parameter, unscaled."""
    devices = [run.device] if run.device.type == "cuda" else []
    trained = [parameter for parameter in run.student.model.parameters() if parameter.requires_grad]
    # Every term sees the dropout of the step itself.
    counts = run.parallel.trial_counts(run.mix.counts([batch]))

    def compute() -> Tensor:
        with run.precision.autocast():
            view = run.student.observe(batch, run.mix.needs(loss_weights).student)
        return run.mix.score(view, signal, batch, loss_weights, counts).loss

    with torch.random.fork_rng(devices=devices):
        loss, scale = run.parallel.trial(compute), run.precision.loss_scale
        with run.precision.half_products():
            gradients = run.parallel.gradients_of(loss * scale, trained)
    return [
        torch.zeros_like(local(parameter.detach()), dtype=torch.float32)
        if gradient is None
        else gradient.float() / scale
        for parameter, gradient in zip(trained, gradients, strict=True)
    ]


def _compared(run: Run, gradients: dict[str, list[Tensor]]) -> dict[str, Any]:
    products = _products(run, gradients)
    norms = {term: math.sqrt(products[term, term]) for term in gradients}
    total = sum(norms.values())
    terms = {
        term: {"norm": norm, "share": norm / total if total > 0 and math.isfinite(total) else 0.0}
        for term, norm in norms.items()
    }
    cosines = {}
    for one, other in combinations(gradients, 2):
        size = norms[one] * norms[other]
        if size > 0:
            cosines[f"{one}.{other}"] = products[one, other] / size
    return {"terms": terms, "cosines": cosines}


def _products(run: Run, gradients: dict[str, list[Tensor]]) -> dict[tuple[str, str], float]:
    """The inner product of each pair of gradients, over all parts of them."""
    pairs = list(combinations_with_replacement(gradients, 2))
    if not pairs:
        return {}
    sums = torch.stack([_product(gradients[one], gradients[other]) for one, other in pairs])
    run.parallel.sum_parts(sums)
    return dict(zip(pairs, sums.tolist(), strict=True))


def _product(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)]).sum()
