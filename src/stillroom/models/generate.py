"""Generate text from a model, for people to read: whole, or in pieces while it is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from stillroom.errors import ConfigError
from stillroom.models.decoding import Decoder, ability_of
from stillroom.models.length import num_positions
from stillroom.models.sampling import Sampling, choose
from stillroom.models.text_stream import TextStream, decoded, num_shared

Prompt = str | Sequence[int]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """Some text of one prompt's continuation. The last piece of a prompt says why it ended."""

    row: int
    text: str
    ended: str = ""  # "end of text", "length", or a sentence

    @property
    def stopped(self) -> str:
        """A remark for people, where the text ended neither by itself nor at the length that was asked for."""
        return f" [stopped: {self.ended}]" if self.ended not in ("", *_EXPECTED) else ""


_EXPECTED = END, LENGTH = "end of text", "length"


def generate(model: Any, tokenizer: Any, prompt: Prompt, **options: Any) -> str:
    """The continuation of a prompt, without the prompt. Options as of `stream`."""
    return generate_all(model, tokenizer, [prompt], **options)[0]


def generate_all(model: Any, tokenizer: Any, prompts: Sequence[Prompt], **options: Any) -> list[str]:
    """The continuation of each prompt, with a remark where one was stopped. Options as of `stream`."""
    texts = [""] * len(prompts)
    for piece in stream(model, tokenizer, prompts, **options):
        texts[piece.row] += piece.text + piece.stopped
    return texts


def stream(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stops: Collection[int] = (),
    note: Note = lambda _text: None,
) -> Iterator[Piece]:
    """The continuations of prompts in pieces, as they are written. Greedy at temperature 0.

    A prompt of tokens is used as it is; a text gets the tokens that the tokenizer adds before a text by default.
    `stops` are tokens that end a text beside those of tokenizer and model. `note` is called with lines for the log.
    """
    sampling = Sampling(temperature, top_p, seed)
    if max_new_tokens < 1:
        raise ConfigError(f"{max_new_tokens} tokens cannot be written", advice=["ask for at least one token"])
    ends = frozenset({*end_ids(model, tokenizer), *stops})
    ids = [_opened(tokenizer, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    rows = [_Row(number, prompt, TextStream(tokenizer, prompt)) for number, prompt in enumerate(ids)]
    penalty = _penalty(model, note)
    with _evaluating(model):
        ability = ability_of(model)
        if ability.note and (len(rows) > 1 or not ability.caches):
            note(ability.note)
        for group in [rows] if ability.pads else [[row] for row in rows]:
            decoder, limit = ability.decoder(model), num_positions(model)
            yield from _Writing(decoder, sampling, len(tokenizer), ends, max_new_tokens, limit, penalty).write(group)


@dataclass
class _Row:
    """One prompt and what was written after it."""

    number: int
    prompt: list[int]
    text: TextStream
    written: list[int] = field(default_factory=list)
    ended: str = ""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.written)


@dataclass(frozen=True)
class _Writing:
    """What a group of rows is written with."""

    decoder: Decoder
    sampling: Sampling
    num_tokens: int  # ids above are padding of the head
    ends: frozenset[int]
    max_new_tokens: int
    limit: int | None
    penalty: float

    @torch.no_grad()
    def write(self, rows: Sequence[_Row]) -> Iterator[Piece]:
        """Write until every row has ended. A row that ended is fed its last token, and nothing is read from it."""
        yield from self._end_full(rows)
        rows = [row for row in rows if not row.ended]
        generators = self.sampling.generators(len(rows))
        logits = self.decoder.start([row.prompt for row in rows]) if rows else None
        while logits is not None:
            logits = logits[:, : self.num_tokens]
            is_finite = torch.isfinite(logits).all(dim=-1).tolist()
            if not all(is_finite):
                logits = torch.nan_to_num(logits)  # the rows at fault end below
            chosen = choose(self._penalised(rows, logits), self.sampling, generators)
            for row, token, is_sound in zip(rows, chosen, is_finite, strict=True):
                if not row.ended:
                    yield self._add(row, token, is_sound)
            yield from self._end_full(rows)
            is_done = all(row.ended for row in rows)
            logits = None if is_done else self.decoder.step(chosen)

    def _add(self, row: _Row, token: int, is_sound: bool) -> Piece:
        if not is_sound or token in self.ends:
            row.ended = END if is_sound else "logits are not finite"
            return Piece(row.number, row.text.rest(), row.ended)
        row.written.append(token)
        text = row.text.add(token)
        if len(row.written) >= self.max_new_tokens:
            row.ended = LENGTH
            text += row.text.rest()
        return Piece(row.number, text, row.ended)

    def _end_full(self, rows: Sequence[_Row]) -> Iterator[Piece]:
        for row in rows:
            if self.limit and row.length >= self.limit and not row.ended:
                row.ended = f"the model's {self.limit:,} positions are full"
                yield Piece(row.number, row.text.rest(), row.ended)

    def _penalised(self, rows: Sequence[_Row], logits: Tensor) -> Tensor:
        if self.penalty == 1.0:
            return logits
        process = RepetitionPenaltyLogitsProcessor(self.penalty)
        held = [torch.tensor([row.prompt + row.written], device=logits.device) for row in rows]
        return torch.cat([process(ids, logits[place : place + 1]) for place, ids in enumerate(held)])


# Settings of a model's generation configuration that change which token is the likeliest.
_UNUSED = (
    "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "min_length", "min_new_tokens", "encoder_repetition_penalty", "sequence_bias",
)  # fmt: skip


def _penalty(model: Any, note: Note) -> float:
    """The repetition penalty that the model is published with. Other such settings are named in the log."""
    settings = getattr(model, "generation_config", None)
    unused = [name for name in _UNUSED if getattr(settings, name, None)]
    if unused:
        note(f"generation settings of the model that are not used: {', '.join(unused)}")
    return float(getattr(settings, "repetition_penalty", None) or 1.0)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def continuation(tokenizer: Any, before: Sequence[int], after: Sequence[int]) -> str:
    """The text that `after` adds to `before`.

    Decoded alone, the first token may lose its leading space, and part of a character cannot be decoded. So decode all
    tokens, and cut off the prefix shared with the decoded `before`.
    """
    whole, start = decoded(tokenizer, [*before, *after]), decoded(tokenizer, before)
    return whole[num_shared(whole, start) :]


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
