"""Write rows of tokens: what a model answers to prompts, with its log-probs and why each answer ended.

`models/generate.py` writes text for people. Here tokens are written that are trained on or measured, so:
- The ids are those that were drawn, with the end token. They are never decoded and encoded again.
- Each row draws from its own seed. What a row gets does not depend on its neighbours or on the number of rows written
  at once, up to the rounding of the model's logits.
- No repetition penalty: the log-probs are the model's own, at temperature 1 and before `top_p`.
- Tokens are chosen on the device in FP32, for all rows at once.

A model whose cache or left padding changes its logits is computed without it (`generate.ability_of`).

# B rows, V vocabulary, T tokens written, P longest phrase, M kept ids
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.models.generate import Note, Sampling, checked_ability, greedy_settings, padded_generate
from stillroom.models.student import num_positions

Ended = Literal["end", "length", "loop", "nonfinite", "positions"]
ENDED: tuple[Ended, ...] = ("end", "length", "loop", "nonfinite", "positions")

# A loop is a phrase that stands four times in a row, over at least 16 tokens: a run of spaces or of one digit is none.
LOOP_REPEATS, LOOP_TOKENS, LONGEST_PHRASE = 4, 16, 64


@dataclass(frozen=True)
class Written:
    """What was written after one prompt."""

    ids: list[int]  # [T], the end token included where one was drawn
    log_probs: list[float]  # [T], of the model itself, at temperature 1
    top_ids: npt.NDArray[np.int32]  # [T, M], the model's most probable tokens at each place
    ended: Ended


def row_seed(*parts: int | str) -> int:
    """Return a seed that follows from its parts alone, such as run seed, round, prompt and number of the sample."""
    named = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=8).digest(), "big") >> 1


def write_rows(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    ends: Collection[int],
    num_tokens: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    num_top: int = 0,
    cuts_loops: bool = True,
    note: Note = lambda _text: None,
) -> list[Written]:
    """Answer each prompt with tokens drawn by its own seed, all at once. Temperature 0: the most probable token.

    `ends` are the tokens that end an answer (`generate.end_ids`, `chat.turn_end_ids`). `num_tokens` is the real
    vocabulary: ids above are padding of the head and are neither drawn nor given probability. `note` gets lines for
    the log.
    """
    sampling = Sampling(temperature, top_p)
    ability = checked_ability(model, len(prompts), max_new_tokens, note)
    rows = [_Row(list(prompt), seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    if not all(row.prompt for row in rows):
        raise ConfigError("a prompt has no tokens", advice=["begin it with at least one token"])
    for group in [rows] if ability.pads else [[row] for row in rows]:
        writer = _Group(model, sampling, frozenset(ends), num_tokens, num_top, cuts_loops)
        writer.write(group, max_new_tokens, uses_cache=ability.caches)
    return [Written(row.ids, row.log_probs, row.tops(num_top), row.ended or "length") for row in rows]


class _Row:
    """A prompt and what was written after it so far."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt = prompt
        self.generator = torch.Generator().manual_seed(seed)
        self.ids: list[int] = []
        self.log_probs: list[float] = []
        self.top_ids: list[npt.NDArray[np.int32]] = []
        self.ended: Ended | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    def tops(self, num_top: int) -> npt.NDArray[np.int32]:
        return np.stack(self.top_ids) if self.top_ids else np.zeros((0, num_top), np.int32)


@dataclass
class _Group:
    """Rows that are written together. Tokens stay on the device until the last of them is written."""

    model: Any
    sampling: Sampling
    ends: frozenset[int]
    num_tokens: int
    num_top: int
    cuts_loops: bool

    def write(self, rows: list[_Row], max_new_tokens: int, *, uses_cache: bool) -> None:
        """Write until every row has ended.

        Rows advance together, and one beyond the model's last position would fail. So when a row has filled the
        positions, `generate` is called again for the others.
        """
        limit = num_positions(self.model)
        while rows:
            for row in rows:
                if limit and row.length >= limit:
                    row.ended = "positions"
            rows = [row for row in rows if row.ended is None]
            if not rows:
                return
            num_left = max_new_tokens - len(rows[0].ids)  # the same for all that have not ended
            if num_left <= 0:
                return
            if limit:
                num_left = min(num_left, limit - max(row.length for row in rows))
            steps = self._begun(rows, num_left)
            padded_generate(
                self.model,
                [row.prompt + row.ids for row in rows],
                greedy_settings(num_left, use_cache=uses_cache),
                logits_processor=[steps.choose],
                stopping_criteria=[steps.are_over],
            )
            steps.hand_out(rows)

    def _begun(self, rows: list[_Row], num_left: int) -> _Steps:
        device = next(self.model.parameters()).device
        # One number of a row's own generator decides one token.
        chances = torch.stack([torch.rand(num_left, generator=row.generator) for row in rows]).to(device)
        before = torch.full((len(rows), LONGEST_PHRASE), -1, dtype=torch.long)
        runs = torch.zeros(len(rows), LONGEST_PHRASE, dtype=torch.long)
        for place, row in enumerate(rows):  # rows that are continued after another has filled the positions
            for token in row.ids:
                runs[place] = torch.where(before[place] == token, runs[place] + 1, 0)
                before[place] = torch.cat([torch.tensor([token]), before[place, :-1]])
        ends = torch.tensor(sorted(self.ends), dtype=torch.long, device=device)
        return _Steps(self, chances, before.to(device), runs.to(device), ends)


class _Steps:
    """The tokens of one call of `generate`, chosen and kept on the device."""

    def __init__(self, group: _Group, chances: Tensor, before: Tensor, runs: Tensor, ends: Tensor) -> None:
        self.group, self.chances, self.before, self.runs, self.ends = group, chances, before, runs, ends
        size, device = len(chances), chances.device
        periods = torch.arange(1, LONGEST_PHRASE + 1, device=device)
        # Tokens that equal the one a period before, so that the phrase stands often enough.
        self.needed = torch.maximum(periods * (LOOP_REPEATS - 1), LOOP_TOKENS - periods)  # [P]
        self.is_over = torch.zeros(size, dtype=torch.bool, device=device)
        self.why = torch.zeros(size, dtype=torch.long, device=device)  # place in ENDED, where it is over
        self.num_written = torch.zeros(size, dtype=torch.long, device=device)
        self.columns: list[tuple[Tensor, Tensor, Tensor]] = []

    def choose(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave the chosen token of each row as the only one. Rows whose logits are not finite end without a token."""
        wide = scores.float()[:, : self.group.num_tokens]
        is_broken = ~torch.isfinite(wide).all(dim=-1)
        wide = torch.where(is_broken.unsqueeze(1), 0.0, wide)
        log_probs = torch.log_softmax(wide, dim=-1)
        tokens = choose_tokens(log_probs, self.group.sampling, self.chances[:, len(self.columns)])
        was_over = self.is_over.clone()
        self._end(is_broken, "nonfinite")
        self.num_written += ~self.is_over
        chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        tops = log_probs.topk(self.group.num_top, dim=-1).indices if self.group.num_top else tokens.unsqueeze(1)[:, :0]
        self.columns.append((tokens, chosen, tops))
        self._end(torch.isin(tokens, self.ends), "end")
        self.runs = torch.where(self.before == tokens.unsqueeze(1), self.runs + 1, 0)
        self.before = torch.cat([tokens.unsqueeze(1), self.before[:, :-1]], dim=1)
        if self.group.cuts_loops:
            self._end((self.runs >= self.needed).any(dim=1), "loop")
        only = torch.full_like(scores, -torch.inf)
        # What follows the end of a row is written into the cache and read by nobody; token 0 is always embedded.
        return only.scatter_(1, torch.where(was_over, 0, tokens).unsqueeze(1), 0.0)

    def _end(self, rows: Tensor, reason: Ended) -> None:
        self.why = torch.where(rows & ~self.is_over, ENDED.index(reason), self.why)
        self.is_over = self.is_over | rows

    def are_over(self, _input_ids: Tensor, _scores: Any, **_options: Any) -> Tensor:
        return self.is_over

    def hand_out(self, rows: Sequence[_Row]) -> None:
        """Read everything from the device at once and give each row its tokens."""
        tokens, chosen, tops = (torch.stack(column, dim=1).cpu() for column in zip(*self.columns, strict=True))
        outcome = torch.stack([self.num_written, self.is_over.long(), self.why]).cpu()
        for place, row in enumerate(rows):
            count, is_over, why = outcome[:, place].tolist()
            row.ids += tokens[place, :count].tolist()
            row.log_probs += chosen[place, :count].tolist()
            row.top_ids += list(tops[place, :count].to(torch.int32).numpy())
            row.ended = ENDED[why] if is_over else None


def choose_tokens(log_probs: Tensor, sampling: Sampling, chances: Tensor) -> Tensor:
    """Choose a token for each row by one uniform number in [0, 1): the inverse of the distribution function. [B]

    log_probs [B, V], chances [B]. Temperature 0 takes the most probable token. `top_p` keeps the fewest most probable
    tokens that have at least this share.
    """
    if sampling.temperature <= 0:
        return log_probs.argmax(dim=-1)
    # The largest becomes 0: a tiny temperature would divide to infinity otherwise, and infinities differ by NaN.
    scaled = (log_probs - log_probs.amax(dim=-1, keepdim=True)) / sampling.temperature
    probs = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1.0:
        probs = most_probable(probs, sampling.top_p)
    sums = probs.cumsum(dim=-1)
    whole = sums[:, -1:]
    # Below the whole sum in any rounding, so that the token found has a probability above 0.
    wanted = torch.minimum(chances.unsqueeze(1) * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(sums, wanted, right=True).squeeze(1)


def most_probable(probs: Tensor, share: float) -> Tensor:
    """Set to 0 all but the fewest most probable tokens that have this share; of equal ones the first are kept. [B, V]

    On a CPU, sorting a vocabulary for each token costs more than a small model, and most rows need few tokens.
    """
    size = probs.shape[1]
    look = 256 if probs.device.type == "cpu" else size
    if size <= look:
        return _of_the_first(size, probs, share)[0]
    found, is_whole = _of_the_first(look, probs, share)
    if not is_whole.all():
        found[~is_whole] = _of_the_first(size, probs[~is_whole], share)[0]
    return found


def _of_the_first(count: int, probs: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The same among so many of the most probable tokens, and the rows in which they are enough."""
    values = probs.topk(count, dim=-1).values
    is_kept = values.cumsum(dim=-1) - values < share
    num_kept = is_kept.sum(dim=-1, keepdim=True)
    least = values.gather(1, num_kept - 1)
    kept, is_least = probs >= least, probs == least
    spare = num_kept - (kept.sum(dim=-1, keepdim=True) - is_least.sum(dim=-1, keepdim=True))
    if (is_least.sum(dim=-1, keepdim=True) > spare).any():
        kept &= ~is_least | (is_least.cumsum(dim=-1) <= spare)
    return torch.where(kept, probs, 0.0), ~is_kept[:, -1]
