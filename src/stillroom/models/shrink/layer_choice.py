"""Choose which of a teacher's layers a student keeps, if only their number is given.

- `loss`: remove one layer at a time, each time the one without which the loss on a little text is lowest.
- `influence`: one pass over the text; keep the layers with the highest mean of 1 - cosine between input and output
  (Men et al. 2024).
- `even`: equal steps from the first to the last; needs no text.

Measured on a real model (benchmarks/quality/results/cut.md) the three are orders of magnitude apart in perplexity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from stillroom.config.schema import ShrinkConfig
from stillroom.errors import BrokenAtStart, ConfigError
from stillroom.models.load.loaded import not_finite_advice
from stillroom.models.shrink.bypass import Bypass, blocks_of, cannot_be_cut
from stillroom.models.shrink.passages import Passage, finite, num_positions, num_scored

Method = Literal["loss", "influence", "even", "given", "all"]

# Floating-point operations that `auto` spends on a choice by loss: about ten minutes on two CPU cores, an estimated few
# minutes on a data-centre GPU. Operations, not seconds: the choice must not depend on how busy a machine is.
BUDGET_CPU = 1e14
BUDGET_GPU = 1e16

_SECONDS_BETWEEN_REPORTS = 20.0
_SIGMAS = 4.0


@dataclass(frozen=True)
class Choice:
    """The layers kept, the method of the choice, and notes for the log."""

    layers: tuple[int, ...]
    method: Method
    why: tuple[str, ...] = ()


Fits = Callable[[tuple[int, ...]], bool]
Tell = Callable[[str], None]


def evenly_spaced(number: int, num_layers: int) -> tuple[int, ...]:
    """`number` layers at equal steps from the first to the last."""
    if number == 1:
        return (0,)
    return tuple((2 * i * (num_layers - 1) + number - 1) // (2 * (number - 1)) for i in range(number))


def settled_layers(wanted: int | Sequence[int], num_layers: int) -> tuple[int, ...] | None:
    """The layers kept if the setting alone determines them, counted from 0; None if they must be chosen."""
    where = "student.shrink.layers"
    if isinstance(wanted, int):
        if not 0 <= wanted <= num_layers:
            raise ConfigError(
                f"{wanted} layers cannot be kept of a teacher that has {num_layers}",
                where=where,
                advice=[f"choose from 1 to {num_layers}"],
            )
        return tuple(range(num_layers)) if wanted in (0, num_layers) else None
    chosen = tuple(wanted)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= num_layers:
        raise ConfigError(
            f"layers {list(chosen)} are not ascending numbers of the teacher's {num_layers} layers",
            where=where,
            advice=[
                f"list each layer once, in order, from 0 to {num_layers - 1}",
                f"for example [0, {num_layers - 1}]",
            ],
        )
    return chosen


def choose_layers(
    teacher: Any, wanted: ShrinkConfig, texts: Sequence[Passage], fits: Fits, tell: Tell = lambda _text: None
) -> Choice:
    """Choose the layers to keep. `fits` says whether the family can be cut to a set of layers."""
    num_layers = len(blocks_of(teacher))
    settled = settled_layers(wanted.layers, num_layers)
    if settled is not None:
        unused = f"student.shrink.method = {wanted.method} is not read: there is nothing to choose among the layers"
        method: Method = "all" if len(settled) == num_layers else "given"
        return Choice(settled, method, () if wanted.method == "auto" else (unused,))
    assert isinstance(wanted.layers, int)
    taken, why = take_method(teacher, wanted, wanted.layers, texts)
    if taken != "even":
        tell(f"choosing {wanted.layers} of {num_layers} layers by {taken} on {num_scored(texts):,} tokens")
    if taken == "even":
        layers = evenly_spaced(wanted.layers, num_layers)
        choice = Choice(layers, "even", ("at equal steps from the first to the last",))
    elif taken == "influence":
        choice = by_influence(teacher, wanted.layers, texts, fits)
    else:
        choice = by_loss(teacher, wanted.layers, texts, fits, tell)
    return replace(choice, why=(*choice.why, *([why] if why else [])))


def take_method(
    teacher: Any, wanted: ShrinkConfig, number: int, texts: Sequence[Passage]
) -> tuple[Literal["loss", "influence", "even"], str]:
    """The method, and the reason if it was `auto`."""
    if wanted.method == "even":
        return "even", ""
    if not texts:
        if wanted.method == "auto":
            return "even", "student.shrink.method = auto took even: there is no text to measure layers on"
        raise ConfigError(
            f"layers are chosen by {wanted.method} on real text, and there is none",
            where="student.shrink.method",
            advice=["give data.train", "or set student.shrink.method = 'even'"],
        )
    if wanted.method != "auto":
        return wanted.method, ""
    cost = cost_of_loss(teacher, number, num_positions(texts))
    device = next(teacher.parameters()).device.type
    budget = BUDGET_CPU if device == "cpu" else BUDGET_GPU
    priced = f"by loss it takes about {cost:.1e} floating-point operations, and the limit on {device} is {budget:.0e}"
    if cost <= budget:
        return "loss", f"student.shrink.method = auto took loss: {priced}"
    return "influence", f"student.shrink.method = auto took influence: {priced}; set it to 'loss' to spend them"


def cost_of_loss(teacher: Any, number: int, num_read: int) -> float:
    """An upper bound of the floating-point operations of a choice by loss on `num_read` positions, scored or not.

    Counts all experts of a mixture, and candidates that are dropped early.
    """
    blocks = blocks_of(teacher)
    layer = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / len(blocks)
    head = int(teacher.get_output_embeddings().weight.numel())
    total = 0.0
    for kept in range(len(blocks), number, -1):
        # One pass through all layers; then for each candidate the layers above it, on average half of them.
        total += kept * layer + head + kept * ((kept - 1) / 2 * layer + head)
    return 2.0 * num_read * total


# -- by loss ---------------------------------------------------------------------------------------------


@torch.no_grad()
def by_loss(teacher: Any, number: int, texts: Sequence[Passage], fits: Fits, tell: Tell) -> Choice:
    """Remove one layer at a time, each time the one without which the loss on the texts is lowest."""
    bypass = Bypass(teacher)
    kept = list(range(bypass.num_layers))
    count = num_scored(texts)
    begun = reported = time.monotonic()
    whole = loss = finite(sum(float(text.losses(bypass.logits(text.ids)).sum()) for text in texts) / count)
    if loss == float("inf"):
        raise BrokenAtStart(
            "the teacher's loss is not finite on the text that its layers are chosen by",
            where="student.shrink",
            advice=not_finite_advice(next(teacher.parameters()).dtype),
        )
    order: list[int] = []
    while len(kept) > number:
        gone, loss = _least_needed(bypass, kept, texts, fits, number)
        kept.remove(gone)
        order.append(gone)
        if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            tell(f"choosing layers: {len(order)} of {bypass.num_layers - number} taken out in {reported - begun:.0f} s")
    why = (
        f"one after another the layer without which the loss on {count:,} tokens was lowest went out "
        f"({', '.join(map(str, order))}): loss {whole:.3f} with all, {loss:.3f} now"
    )
    return Choice(tuple(kept), "loss", (why,))


def _least_needed(
    bypass: Bypass, kept: Sequence[int], texts: Sequence[Passage], fits: Fits, number: int
) -> tuple[int, float]:
    """Of the layers that can be removed, the one without which the loss is lowest, and that loss."""
    candidates = list(kept)
    while candidates:
        losses = losses_without_one(bypass, kept, candidates, texts)
        for layer in sorted(losses, key=lambda layer: (losses[layer], layer)):
            if fits(tuple(other for other in kept if other != layer)):
                return layer, losses[layer]
        candidates = [layer for layer in candidates if layer not in losses]
    raise _none_removable(bypass.model, kept, fits, number)


def losses_without_one(
    bypass: Bypass, kept: Sequence[int], candidates: Sequence[int], texts: Sequence[Passage]
) -> dict[int, float]:
    """The mean loss without each candidate, one at a time, leaving out those that cannot be the lowest.

    A layer's input does not depend on the layer, so only the layers above are recomputed. After each text, drop the
    candidates whose loss exceeds the lowest by four standard errors of the difference (a race, Maron and Moore 1994).
    """
    removed = set(range(bypass.num_layers)) - set(kept)
    losses: dict[int, Tensor] = {layer: torch.zeros(0, dtype=torch.float64) for layer in candidates}
    for text in texts:
        states: dict[int, Any] = {}
        with bypass.without(removed), bypass.recording(states):
            bypass.logits(text.ids)
        for layer, before in losses.items():
            entering, _leaving = states.pop(layer)
            with bypass.without(removed | {layer}, begin=layer, entering=entering):
                losses[layer] = torch.cat([before, text.losses(bypass.logits(text.ids))])
        losses = _still_possible(losses)
    return {layer: finite(float(each.mean())) for layer, each in losses.items()}


def _still_possible(losses: dict[int, Tensor]) -> dict[int, Tensor]:
    """Drop the layers whose mean loss is significantly above the lowest."""
    leader = losses[min(losses, key=lambda layer: (finite(float(losses[layer].mean())), layer))]
    bound = _SIGMAS / max(1, leader.numel()) ** 0.5
    # `not >` keeps a candidate whose difference is NaN.
    return {
        layer: each
        for layer, each in losses.items()
        if not float((each - leader).mean()) > bound * float((each - leader).std())
    }


def _first_that_fits(teacher: Any, kept: Sequence[int], scores: dict[int, float], fits: Fits, number: int) -> int:
    """The removable layer with the lowest score; of equals the lower number."""
    for layer in sorted(kept, key=lambda layer: (scores[layer], layer)):
        if fits(tuple(other for other in kept if other != layer)):
            return layer
    raise _none_removable(teacher, kept, fits, number)


def _none_removable(teacher: Any, kept: Sequence[int], fits: Fits, number: int) -> ConfigError:
    first = tuple(range(number))
    return cannot_be_cut(
        teacher,
        f"its layers are of several kinds, and no further one of {list(kept)} can be taken out so that its "
        "configuration still says which is which",
        advice=(f"keep the first ones: student.shrink.layers = {list(first)}",) if fits(first) else (),
    )


# -- by influence ----------------------------------------------------------------------------------------


@torch.no_grad()
def by_influence(teacher: Any, number: int, texts: Sequence[Passage], fits: Fits) -> Choice:
    """Keep the layers that change the direction of the hidden states most, measured in the whole teacher."""
    bypass = Bypass(teacher)
    sums = dict.fromkeys(range(bypass.num_layers), 0.0)
    for text in texts:
        states: dict[int, Any] = {}
        with bypass.recording(states):
            bypass.logits(text.ids)
        for layer, (entering, leaving) in states.items():
            sums[layer] += float((1.0 - F.cosine_similarity(entering.float(), leaving.float(), dim=-1)).sum())
    count = num_positions(texts)
    influence = {layer: finite(total / count) for layer, total in sums.items()}
    kept = list(influence)
    while len(kept) > number:
        kept.remove(_first_that_fits(teacher, kept, influence, fits, number))
    gone = max((influence[layer] for layer in influence if layer not in kept), default=0.0)
    why = (
        f"those that change the hidden states most over {count:,} positions: the lowest 1 - cosine of those "
        f"kept is {min(influence[layer] for layer in kept):.3f}, the highest of the others {gone:.3f}"
    )
    return Choice(tuple(kept), "influence", (why,))
