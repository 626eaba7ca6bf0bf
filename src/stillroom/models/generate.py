"""Generate text from a model, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stillroom.errors import ConfigError


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompt: str | list[int],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The continuation of a prompt, without the prompt. Greedy at temperature 0.

    A prompt of tokens is used as it is; a text gets the tokens that the tokenizer adds before a text by default.
    Sample here, in FP32 and with a separate generator: overflowing FP16 logits would end in a device assertion, and
    the run's random state must not change.
    """
    if max_new_tokens < 1 or not 0.0 <= temperature < float("inf"):
        raise ConfigError(
            f"{max_new_tokens} tokens at temperature {temperature:g} cannot be written",
            advice=["ask for at least one token", "use a temperature of 0 (the likeliest token) or above"],
        )
    ids = _opened(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    generator = torch.Generator().manual_seed(seed)
    limit = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    ends = end_ids(model, tokenizer)
    device = next(model.parameters()).device
    written: list[int] = []
    stopped = ""
    was_training = model.training
    model.eval()
    try:
        while len(written) < max_new_tokens:
            if limit and len(ids) + len(written) >= limit:
                stopped = f" [stopped: the model's {limit:,} positions are full]"
                break
            context = torch.tensor([ids + written], device=device)
            logits = model(input_ids=context, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu()
            if not torch.isfinite(logits).all():
                stopped = " [stopped: logits are not finite]"
                break
            chosen = int(_pick(logits[: len(tokenizer)], temperature, generator))
            if chosen in ends:
                break
            written.append(chosen)
    finally:
        model.train(was_training)
    return continuation(tokenizer, ids, written) + stopped


def continuation(tokenizer: Any, before: Sequence[int], after: Sequence[int]) -> str:
    """The text that `after` adds to `before`.

    Decoded alone, the first token may lose its leading space, and part of a character cannot be decoded. So decode all
    tokens, and cut off the prefix shared with the decoded `before`.
    """
    whole = str(tokenizer.decode([*before, *after], skip_special_tokens=True))
    start = str(tokenizer.decode(list(before), skip_special_tokens=True))
    pairs = zip(whole, start, strict=False)
    return whole[next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(whole), len(start))) :]


def readable(tokenizer: Any, ids: Sequence[int]) -> str:
    """Tokens as text for people: a line break stands for special tokens between two texts."""
    special = special_ids(tokenizer)
    parts: list[list[int]] = [[]]
    for number in ids:
        if number in special:
            parts.append([])
        else:
            parts[-1].append(number)
    texts = [str(tokenizer.decode(part)) for part in parts if part]
    if len(texts) < 2:
        return "".join(texts)
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def special_ids(tokenizer: Any) -> set[int]:
    """Special tokens: those with a role, and those added as special, such as turn marks."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a text: the tokenizer's, and those of the model's generation settings, such as an end of turn.

    Of the latter only special tokens count: a configuration made without a tokenizer may name any id.
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {number for number in (named if isinstance(named, list | tuple) else [named]) if number is not None}
    own = {tokenizer.eos_token_id} - {None}
    return own | (ends & special_ids(tokenizer))


def _opened(tokenizer: Any, prompt: str) -> list[int]:
    """A text with the tokens that the tokenizer adds before it, and without those it adds after."""
    bare = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(prompt)["input_ids"])
    starts = (start for start in range(len(whole)) if whole[start : start + len(bare)] == bare)
    ids = whole[: next(starts, 0)] + bare
    if ids:
        return ids
    marks = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
    return [next(int(mark) for mark in marks if mark is not None)]


def _pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature <= 0:
        return logits.argmax()
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
