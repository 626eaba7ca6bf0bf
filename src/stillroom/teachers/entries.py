"""Log-probabilities that another program gave: what was said about each token, as the answers of a row.

Legend: a sequence has T tokens; `entries[t]` is what was said about token t before it was seen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stillroom.errors import DataError
from stillroom.teachers.signals import ENTROPY_STEP, LOG_STEP, NOTHING, RowAnswer, SignalSpec

TOKEN_ID = "token_id:"  # how vLLM's server writes a token where it is asked not to write texts
_MAX_MISSPELT = 0.01  # share of tokens whose text may differ: writers replace parts of characters

Entry = Mapping[int, float]  # token id -> log-probability


@dataclass(frozen=True)
class Given:
    """What was said about one sequence."""

    where: str
    ids: tuple[int, ...]  # [T]; of `openai` by name the answer alone
    entries: Mapping[int, Entry]  # by the place of the token that is predicted
    texts: Mapping[int, str] = field(default_factory=dict)  # what the writer thinks tokens spell
    name: str = ""  # of the row, where the record names it: `ids` are then its last tokens
    has_own_token: bool = False  # whether an entry always holds the token that came


def position_answer(
    entry: Entry | None, target: int, spec: SignalSpec, counters: Counter[str], *, least_tail: float = 0.0
) -> RowAnswer:
    """The top k of an entry, and what they leave over by subtraction.

    A difference below `least_tail` is rounding: the tail is then taken to be that, and counted.
    """
    kept = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: spec.exact] if entry else []
    if len(kept) < spec.exact:
        counters["short_positions"] += bool(entry)
        return RowAnswer.unusable(1, spec)
    assert entry is not None
    log_probs = np.array([value for _, value in kept])
    left = 1.0 - math.fsum(math.exp(value) for value in log_probs)
    if left < least_tail:
        counters["unresolved_tails"] += 1
        left = least_tail
    tail = math.log(left) if left > 0.0 else -math.inf
    surprise = math.fsum(-value * math.exp(value) for value in log_probs if value > -math.inf)
    surprise += -tail * math.exp(tail) if tail > -math.inf else 0.0
    label = entry.get(target, -math.inf)
    counters["labels"] += target in entry
    counters["positions"] += 1
    return RowAnswer(
        np.array([[token for token, _ in kept]], np.int32),
        _codes(log_probs)[None],
        _codes(np.array([tail])),
        np.array([min(round(max(surprise, 0.0) / ENTROPY_STEP), NOTHING - 1)], np.uint16),
        _codes(np.array([label])),
        np.zeros((1, 0), np.int32),
    )


def _codes(log_probs: Any) -> Any:
    with np.errstate(invalid="ignore"):
        steps = np.clip(np.rint(log_probs / -LOG_STEP), 0, NOTHING - 1)
    return np.where(np.isneginf(log_probs), NOTHING, steps).astype(np.uint16)


class Spelling:
    """What tokens spell, by the tokenizer of the configuration."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = max(tokenizer.get_vocab().values()) + 1
        self._by_text: dict[str, list[int]] | None = None

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def find(self, text: str) -> int:
        """The id of a token that is given as text."""
        if text.startswith(TOKEN_ID):
            return int(text.removeprefix(TOKEN_ID))
        if self._by_text is None:
            self._by_text = defaultdict(list)
            for token in sorted(self._tokenizer.get_vocab().values()):
                self._by_text[self.text(token)].append(token)
        found = self._by_text.get(text, [])
        if len(found) != 1:
            how = "no token spells" if not found else f"{len(found)} tokens spell"
            raise DataError(
                f"{how} {text!r}: its id cannot be told",
                advice=["ask the server for token ids (vLLM: return_tokens_as_token_ids)"],
            )
        return found[0]

    def fault(self, given: Sequence[Given]) -> tuple[str, str] | None:
        """(what, where) of tokens that the tokenizer does not have, or that spell something else; None: all is well."""
        for one in given:
            for token in (*one.ids, *(token for entry in one.entries.values() for token in entry)):
                if not 0 <= token < self._size:
                    return f"token {token:,} lies outside the tokenizer's {self._size:,}", one.where
        texts = {token: text for one in given for token, text in one.texts.items() if "\ufffd" not in text}
        wrong = [(token, text) for token, text in texts.items() if self.text(token).strip() != text.strip()]
        wrong = [(token, text) for token, text in wrong if "\ufffd" not in self.text(token)]
        if len(wrong) <= _MAX_MISSPELT * len(texts):
            return None
        token, text = wrong[0]
        told = f"{len(wrong):,} of {len(texts):,} tokens spell something else here: token {token} is {text!r} "
        return f"{told}there and {self.text(token)!r} in the tokenizer", ""
