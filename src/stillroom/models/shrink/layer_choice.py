"""Choose which of a teacher's layers a student keeps, if only their number is given.

- `loss`: remove one layer at a time, each time the one without which the loss on a little text is lowest.
- `influence`: one pass over the text; keep the layers with the highest mean of 1 - cosine between input and output
  (Men et al. 2024).
- `even`: equal steps from the first to the last; needs no text.

Measured on a real model (benchmarks/quality/results/cut.md) the three are orders of magnitude apart in perplexity.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stillroom.config.schema import ShrinkConfig
from stillroom.core.errors import BrokenAtStart, ConfigError
from stillroom.core.types import IGNORED, Batch
from stillroom.models.anatomy import in_eval_mode, layers_of
from stillroom.models.load import not_finite_advice

# -- passages --------------------------------------------------------------------------------------
# Passages of text that rank a model's layers while it is cut: a few hundred tokens, the same every time.


_LONGEST = 128  # positions of a passage: many short passages rank layers better and sooner than few long ones
CHOICE_TOKENS = 768  # of training data that layers are chosen by
_LEAD = 32  # positions before the first scored one, as context


@dataclass(frozen=True)
class Passage:
    """One sequence without padding. `targets[l]` is the token that follows position l, or IGNORED."""

    ids: Tensor  # [1, L]
    targets: Tensor  # [L]

    @property
    def num_scored(self) -> int:
        return int((self.targets != IGNORED).sum())

    def losses(self, logits: Tensor) -> Tensor:
        """Cross-entropy of each scored position, in main memory. logits: [L, V] -> [N]"""
        targets = self.targets.to(logits.device)
        each = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        return each[targets != IGNORED].double().cpu()


def passages(batches: Iterable[Batch], num_tokens: int, device: torch.device) -> list[Passage]:
    """Passages from rows spread over the batches, with `num_tokens` scored tokens in total.

    A row is cut to 128 positions, beginning shortly before its first scored one, so that several rows count. A row
    without a scored token is skipped.
    """
    rows = [row for batch in batches for row in zip(batch.input_ids, batch.attention_mask, batch.targets, strict=True)]
    stride = max(1, len(rows) // -(-num_tokens // _LONGEST))
    texts: list[Passage] = []
    for number in [number for start in range(stride) for number in range(start, len(rows), stride)]:
        ids, mask, targets = rows[number]
        scored = (targets[: int(mask.sum())] != IGNORED).nonzero().squeeze(-1)
        if num_tokens <= 0 or not scored.numel():
            continue
        begin = max(0, int(scored[0]) - _LEAD)
        in_reach = scored[scored < begin + _LONGEST][:num_tokens]
        end = int(in_reach[-1]) + 1
        texts.append(Passage(ids[begin:end].unsqueeze(0).to(device), targets[begin:end].to(device)))
        num_tokens -= int(in_reach.numel())
    return texts


def num_scored(texts: Sequence[Passage]) -> int:
    return sum(text.num_scored for text in texts)


def num_positions(texts: Sequence[Passage]) -> int:
    return sum(text.ids.shape[1] for text in texts)


@torch.no_grad()
def mean_loss(model: Any, texts: Sequence[Passage]) -> float:
    """Mean cross-entropy of a model over the passages; infinity if it is not finite."""
    device = next(model.parameters()).device
    total = 0.0
    with in_eval_mode(model):
        for text in texts:
            logits = model(input_ids=text.ids.to(device), use_cache=False).logits[0].float()
            total += float(text.losses(logits).sum())
    return finite(total / num_scored(texts))


def finite(loss: float) -> float:
    """The loss, or infinity if it is not finite, so that losses can be compared."""
    return loss if math.isfinite(loss) else math.inf


# -- bypass ----------------------------------------------------------------------------------------
# Run a model with some of its layers left out, without building another model.
#
# A layer that is left out returns its input. Masks, positions and whatever else a model prepares for each layer by
# its number are unchanged, so this is what a cut must compute, in any family.


_NUM_TRIED = 4


class Bypass:
    """A model whose layers can be left out."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.blocks = blocks_of(model)
        self._rests = self._extra_outputs()

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def logits(self, ids: Tensor, **options: Any) -> Tensor:
        """The model's logits of one sequence, in FP32. [L, V]"""
        logits: Tensor = self.model(input_ids=ids, **{"use_cache": False, **options}).logits
        return logits[0].float()

    @contextmanager
    def without(self, removed: Collection[int], *, begin: int = 0, entering: Tensor | None = None) -> Iterator[None]:
        """Leave layers out in the body.

        `entering` is the input of layer `begin` in an earlier pass. With it the layers below are not computed again;
        `begin` must be left out too, and returns it.
        """
        skipped = {layer for layer in range(self.num_layers) if layer < begin or layer in removed}
        changed = [self.blocks[layer] for layer in sorted(skipped)]
        for layer in skipped:
            hidden = entering if layer == begin else None
            # An attribute of the instance takes precedence over the method of its class.
            self.blocks[layer].__dict__["forward"] = _Skip(hidden, self._rests[layer])
        try:
            yield
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            reason = f"it cannot run without layers {sorted(skipped)} ({type(error).__name__}: {error})"
            raise cannot_be_cut(self.model, reason) from error
        finally:
            for block in changed:
                del block.__dict__["forward"]

    @contextmanager
    def recording(self, states: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Record each layer's (input, output) in `states`."""

        def record(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                states[layer] = (_hidden_of(args, kwargs), output[0] if isinstance(output, tuple) else output)

            return hook

        with self._hooked(record):
            yield

    @contextmanager
    def _hooked(self, make_hook: Callable[[int], Any]) -> Iterator[None]:
        """Call each layer's hook after its forward in the body."""
        handles = [
            block.register_forward_hook(make_hook(layer), with_kwargs=True) for layer, block in enumerate(self.blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _extra_outputs(self) -> dict[int, tuple[Any, ...] | None]:
        """What each layer returns after the hidden states; None for a layer that returns a bare tensor."""
        rests: dict[int, tuple[Any, ...] | None] = {}
        odd: list[str] = []

        def look(layer: int) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                entering = _hidden_of(args, kwargs)
                first = output[0] if isinstance(output, tuple) else output
                if not isinstance(first, Tensor) or first.shape != entering.shape:
                    odd.append(f"layer {layer} gives something else than it was given")
                rests[layer] = output[1:] if isinstance(output, tuple) else None

            return hook

        with self._hooked(look):
            self.logits(torch.arange(_NUM_TRIED, device=next(self.model.parameters()).device).unsqueeze(0))
        if odd or len(rests) != len(self.blocks):
            reason = odd[0] if odd else "not every layer is called in a forward pass"
            raise cannot_be_cut(self.model, reason)
        return rests


class _Skip:
    """Replaces a layer's forward: returns its input, or `entering`."""

    def __init__(self, entering: Tensor | None, rest: tuple[Any, ...] | None) -> None:
        self._entering = entering
        self._rest = rest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_of(args, kwargs) if self._entering is None else self._entering
        return hidden if self._rest is None else (hidden, *self._rest)


def _hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise LookupError("a layer was given no hidden states")
    return hidden


def blocks_of(model: Any) -> list[nn.Module]:
    try:
        return layers_of(model)
    except LookupError as error:
        raise cannot_be_cut(model, str(error)) from error


def cannot_be_cut(model: Any, reason: str, advice: tuple[str, ...] = ()) -> ConfigError:
    """The error for a family, or a choice of layers, whose cut would not equal the teacher without the other layers."""
    family = model.config.get_text_config().model_type
    return ConfigError(
        f"a student cannot be cut like this from a teacher of the family {family}: {reason}",
        where="student.shrink",
        advice=[*advice, "or name a smaller model of the family as the student: student.model = ..."],
    )


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
    order: tuple[int, ...] = ()  # in which the other layers were taken out; empty where none were
    sizes: dict[str, int] = field(
        default_factory=dict
    )  # widths that were chosen with the layers, for student.shrink.to
    candidates: tuple[dict[str, Any], ...] = ()  # that they were chosen among

    def at_depth(self, number: int, num_layers: int) -> tuple[int, ...]:
        """The layers kept by the same method if `number` are kept, more than these."""
        if self.method == "even":
            return evenly_spaced(number, num_layers)
        removed = self.order[: num_layers - number]
        return tuple(layer for layer in range(num_layers) if layer not in removed)


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
            # Trying each of k layers runs about k / 2 of them: work falls with the square of what is left.
            done, left = (
                sum(k * k for k in ks)
                for ks in (range(len(kept) + 1, bypass.num_layers + 1), range(number + 1, len(kept) + 1))
            )
            seconds = (reported - begun) * left / done
            tell(f"choosing layers: {len(order)} of {bypass.num_layers - number} taken out, about {seconds:.0f} s left")
    why = (
        f"one after another the layer without which the loss on {count:,} tokens was lowest went out "
        f"({', '.join(map(str, order))}): loss {whole:.3f} with all, {loss:.3f} now"
    )
    return Choice(tuple(kept), "loss", (why,), tuple(order))


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
    order: list[int] = []
    while len(kept) > number:
        order.append(_first_that_fits(teacher, kept, influence, fits, number))
        kept.remove(order[-1])
    gone = max((influence[layer] for layer in influence if layer not in kept), default=0.0)
    why = (
        f"those that change the hidden states most over {count:,} positions: the lowest 1 - cosine of those "
        f"kept is {min(influence[layer] for layer in kept):.3f}, the highest of the others {gone:.3f}"
    )
    return Choice(tuple(kept), "influence", (why,), tuple(order))
