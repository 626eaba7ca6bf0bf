"""Run a model token by token: with the cache it keeps itself, or by computing the whole prefix again.

Which of both is right for a model is not concluded from its name: `ability_of` tries the cache on a few tokens, for
rows of one length and for rows padded on the left, against forward passes without a cache.

# B rows, L positions, V vocabulary
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stillroom.models.attention import NAME
from stillroom.models.length import num_positions

_SEED = 20_242
_PROMPTS, _WRITTEN = (9, 4), 3  # lengths of the trial
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # in standard deviations of the logits
_HALF_TOLERANCE = 0.05
# What families call the state that they return and take again.
_STATES = ("past_key_values", "cache_params", "state")


class Decoder(Protocol):
    """A model that is given prompts once, then one token a row at a time. Both answer with logits [B, V]."""

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor: ...

    def step(self, tokens: Sequence[int]) -> Tensor: ...


class Recomputed:
    """The whole prefix again for each token. One row."""

    def __init__(self, model: Any) -> None:
        self._model, self._ids = model, list[int]()

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        (prompt,) = prompts
        self._ids = list(prompt)
        return self._logits()

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._ids += tokens
        return self._logits()

    def _logits(self) -> Tensor:
        ids = torch.tensor([self._ids], device=_device(self._model))
        return _last(self._model(input_ids=ids, use_cache=False, logits_to_keep=1))


class Cached:
    """One position a row and step, with the state that the model returns. Shorter prompts are padded on the left."""

    def __init__(self, model: Any) -> None:
        self._model, self.state = model, dict[str, Any]()
        self._last_position = (num_positions(model) or sys.maxsize) - 1
        self._is_real: Tensor | None = None  # [B, L] False at padding; None without padding

    def start(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        longest = max(len(prompt) for prompt in prompts)
        # The token of the padding is masked, so any will do.
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        if min(len(prompt) for prompt in prompts) < longest:
            is_real = [[column >= longest - len(prompt) for column in range(longest)] for prompt in prompts]
            self._is_real = torch.tensor(is_real, device=_device(self._model))
        return self._run(ids)

    def step(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([[token] for token in tokens])
        if self._is_real is not None:
            self._is_real = torch.cat([self._is_real, self._is_real.new_ones(len(tokens), 1)], dim=1)
        return self._run(ids)

    def _run(self, ids: Tensor) -> Tensor:
        inputs = {**self.state, **self._padding_inputs(ids.shape[1])}
        answer = self._model(input_ids=ids.to(_device(self._model)), use_cache=True, logits_to_keep=1, **inputs)
        self.state = state_of(answer)
        return _last(answer)

    def _padding_inputs(self, num_new: int) -> dict[str, Tensor]:
        """Positions that count from the first real token, and a mask that hides the padding."""
        if self._is_real is None:
            return {}
        # Above the limit are only rows that have ended: they are fed on, and nothing is read from them.
        positions = (self._is_real.long().cumsum(dim=1) - 1).clamp(0, self._last_position)[:, -num_new:]
        inputs = {"position_ids": positions} if "position_ids" in _arguments(self._model) else {}
        if self._model.config.get_text_config()._attn_implementation == NAME:
            return {**inputs, "attention_mask": _mask(self._is_real, num_new)}
        return {**inputs, "attention_mask": self._is_real.long()}


def _mask(is_real: Tensor, num_new: int) -> Tensor:
    """[B, 1, new, L] Which position may attend to which, for attention without a mask of its own.

    A padding position attends to itself: with nothing to attend to, its softmax would be NaN.
    """
    num_keys = is_real.shape[1]
    places = torch.arange(num_keys, device=is_real.device)
    queries = places[-num_new:, None]
    allowed: Tensor = (places <= queries) & is_real[:, None, :] | (places == queries)
    return allowed.unsqueeze(1)


def state_of(answer: Any) -> dict[str, Any]:
    """The state that a model returned, under the name by which it takes it again. Empty if it returned none."""
    held = {name: getattr(answer, name, None) for name in _STATES}
    return {name: state for name, state in held.items() if state is not None}


def _last(answer: Any) -> Tensor:
    logits: Tensor = answer.logits[:, -1].float()
    return logits


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


def _arguments(model: Any) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


# -- the trial -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ability:
    """What a model's cache gave in a trial."""

    caches: bool
    pads: bool
    note: str = ""  # a line for the log, if one of both is not so

    def decoder(self, model: Any) -> Decoder:
        return Cached(model) if self.caches else Recomputed(model)


_KNOWN: WeakKeyDictionary[Any, dict[str, Ability]] = WeakKeyDictionary()


def ability_of(model: Any) -> Ability:
    """Try the model's cache once; later calls remember. The model must be in evaluation mode."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        return Ability(False, False)
    kind = f"{model.config.get_text_config()._attn_implementation} {next(model.parameters()).dtype}"
    known = _KNOWN.setdefault(model, {})
    if kind not in known:
        known[kind] = _tried(model)
    return known[kind]


@torch.no_grad()
def _tried(model: Any) -> Ability:
    generator = torch.Generator().manual_seed(_SEED)
    count = int(model.get_input_embeddings().weight.shape[0])
    texts = [torch.randint(count, (size + _WRITTEN,), generator=generator).tolist() for size in _PROMPTS]
    own = [model(input_ids=torch.tensor([text], device=_device(model)), use_cache=False).logits[0] for text in texts]
    expected = [logits[size - 1 :].float() for logits, size in zip(own, _PROMPTS, strict=True)]
    name = type(model).__name__
    alone = _difference(model, texts[:1], expected[:1])
    if alone:
        return Ability(False, False, f"{name} computes the whole text again for each token: {alone}")
    together = _difference(model, texts, expected)
    if together:
        return Ability(True, False, f"{name} continues several prompts one after the other: padded, {together}")
    return Ability(True, True)


def _difference(model: Any, texts: Sequence[Sequence[int]], expected: Sequence[Tensor]) -> str:
    """Why the cache cannot be used for these texts; empty if it gives the same logits."""
    decoder = Cached(model)
    prompts = [text[:size] for text, size in zip(texts, _PROMPTS, strict=False)]
    tolerance = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
    try:
        steps = [decoder.start(prompts)]
        for place in range(_WRITTEN):
            if not decoder.state:
                return "it returns no cache"
            steps.append(decoder.step([text[len(prompt) + place] for text, prompt in zip(texts, prompts, strict=True)]))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError) as error:
        return f"its cache fails with {type(error).__name__}"
    given = torch.stack(steps, dim=1)
    changes = [
        float((one - other).abs().max() / other.std().clamp_min(1e-6))
        for one, other in zip(given, expected, strict=True)
    ]
    return "" if max(changes) <= tolerance else f"its cache changes the logits by {max(changes):.2g} of their spread"
