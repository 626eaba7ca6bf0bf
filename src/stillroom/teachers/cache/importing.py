"""Log-probabilities of another program as the answers of a cache, believed only as far as they can be checked.

Ids must spell what the file says they spell, values must be log-probabilities, and an answer must belong to the token
it stands at: a file that is shifted by one trains without a complaint and teaches nonsense.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.errors import ConfigError, DataError
from stillroom.teachers.cache.import_formats import READERS, Entry, Given
from stillroom.teachers.cache.plan import NeededRow
from stillroom.teachers.signals import ENTROPY_STEP, LOG_STEP, NOTHING, RowAnswer, SignalSpec
from stillroom.types import IGNORED

_BEGINNING = 4  # tokens by which the rows that a sequence may belong to are found
_MAX_MISSPELT = 0.01  # share of tokens whose text may differ: writers replace parts of characters
_MOST_MASS = 1.005
_LEAST_LEAD = 0.05  # by which a shifted alignment must be better to be believed
_SPECIAL = "token_id:"


@dataclass
class Imported:
    """What a file came to."""

    answers: dict[str, RowAnswer] = field(default_factory=dict)
    rows: list[NeededRow] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)


def read_answers(path: Path, kind: str, tokenizer: Any) -> list[Given]:
    """The sequences of a file, after their tokens, their values and their alignment were checked."""
    if kind not in READERS:
        raise ConfigError(f"{kind!r} is no format", where="--format", advice=[f"one of {', '.join(READERS)}"])
    spelt = _Spelling(tokenizer)
    try:
        given = list(READERS[kind](path, spelt.find))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not of the format {kind}: {error!r}", advice=["docs/cache.md shows what it looks like"]
        ) from error
    if not given:
        raise DataError(f"{path} is empty", advice=["give a file with a record a line"])
    spelt.check(given)
    _check_values(given)
    _check_alignment(given)
    return given


def match_rows(given: Iterable[Given], needed: Sequence[NeededRow], spec: SignalSpec) -> Imported:
    """Each row with the answer to its very tokens. A row that begins in the middle of a sequence has none."""
    found = Imported()
    by_beginning: dict[tuple[int, ...], list[NeededRow]] = defaultdict(list)
    by_name = {row.name: row for row in needed}
    for row in needed:
        by_beginning[tuple(row.rows.row(row.index)[:_BEGINNING].tolist())].append(row)
    for one in given:
        named = [by_name[one.name]] if one.name in by_name else []
        candidates = named if one.name else by_beginning.get(one.ids[:_BEGINNING], [])
        found.counters["records"] += 1
        is_matched = False
        for row in candidates:
            answer = _answer(one, row, spec, found.counters)
            if answer is None:
                continue
            is_matched = True
            if row.key not in found.answers:
                found.rows.append(row)
            found.answers[row.key] = answer
        found.counters["unmatched_records"] += not is_matched
    return found


def _answer(given: Given, row: NeededRow, spec: SignalSpec, counters: Counter[str]) -> RowAnswer | None:
    """The row's answer, or None where the tokens are not those of the row.

    Only the last token of a row, an end mark, may lack an answer: it is then unusable, and counted.
    """
    ids = tuple(row.rows.row(row.index).tolist())
    targets = row.rows.batch([row.index]).targets[0].numpy()
    places = np.flatnonzero(targets != IGNORED) + 1
    start = int(places[0]) if given.name else 0
    overlap = ids[start : start + len(given.ids)]
    if given.ids[: len(overlap)] != overlap or start + len(given.ids) < len(ids) - 1:
        return None
    entries = [given.entries.get(int(place) - start) for place in places]
    if any(entry is None for entry in entries[:-1]):
        return None
    counters["unanswered_positions"] += sum(entry is None for entry in entries)
    parts = [_position(entry, ids[place], spec, counters) for entry, place in zip(entries, places, strict=True)]
    return RowAnswer.join(parts)


def _position(entry: Entry | None, target: int, spec: SignalSpec, counters: Counter[str]) -> RowAnswer:
    """The k likeliest of an entry, and what they leave over by subtraction."""
    kept = sorted(entry.items(), key=lambda item: (-item[1], item[0]))[: spec.exact] if entry else []
    if len(kept) < spec.exact:
        counters["short_positions"] += bool(entry)
        return RowAnswer.unusable(1, spec)
    assert entry is not None
    log_probs = np.array([value for _, value in kept])
    mass = math.fsum(math.exp(value) for value in log_probs)
    tail = -math.inf if mass >= 1.0 else math.log1p(-mass)
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


# -- checks ----------------------------------------------------------------------------------------------


class _Spelling:
    """What tokens spell, by the tokenizer of the configuration."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = max(tokenizer.get_vocab().values()) + 1
        self._by_text: dict[str, list[int]] | None = None

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def find(self, text: str) -> int:
        """The id of a token that is given as text."""
        if text.startswith(_SPECIAL):
            return int(text.removeprefix(_SPECIAL))
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

    def check(self, given: Sequence[Given]) -> None:
        for one in given:
            for token in (*one.ids, *(token for entry in one.entries.values() for token in entry)):
                if not 0 <= token < self._size:
                    raise DataError(
                        f"token {token:,} lies outside the tokenizer's {self._size:,}", where=one.where, advice=[_OTHER]
                    )
        texts = {token: text for one in given for token, text in one.texts.items() if "\ufffd" not in text}
        wrong = [(token, text) for token, text in texts.items() if self.text(token).strip() != text.strip()]
        wrong = [(token, text) for token, text in wrong if "\ufffd" not in self.text(token)]
        if len(wrong) > _MAX_MISSPELT * len(texts):
            token, text = wrong[0]
            raise DataError(
                f"{len(wrong):,} of {len(texts):,} tokens spell something else here: token {token} is {text!r} in the "
                f"file and {self.text(token)!r} in the tokenizer",
                advice=[_OTHER],
            )


_OTHER = "the file was made with another tokenizer: name a teacher and a student that have it"


def _check_values(given: Sequence[Given]) -> None:
    """Log-probabilities are at most 0, and what they hold at most everything."""
    for one in given:
        for place, entry in one.entries.items():
            values = list(entry.values())
            is_odd = any(math.isnan(value) or value > 1e-3 for value in values)
            if is_odd or math.fsum(math.exp(min(value, 0.0)) for value in values) > _MOST_MASS:
                raise DataError(
                    f"the values at token {place} are no log-probabilities: they hold more than everything, or are NaN",
                    where=one.where,
                    advice=["store log-probabilities at temperature 1, natural logarithms, and not logits"],
                )


def _check_alignment(given: Sequence[Given]) -> None:
    """Where an answer stands, the token that came must be likelier than its neighbours are."""
    hits, total = Counter({-1: 0, 0: 0, 1: 0}), 0
    for one in given:
        for place, entry in one.entries.items():
            if one.has_own_token and one.ids[place] not in entry:
                raise DataError(
                    f"the answer to token {place} does not hold that token, as this format always does: it is shifted",
                    where=one.where,
                    advice=["check how the file was written: entry t must answer token t"],
                )
            if 0 < place < len(one.ids) - 1:
                hits.update({shift: one.ids[place + shift] in entry for shift in (-1, 0, 1)})
                total += 1
    best = max(hits, key=lambda shift: hits[shift])
    if best and hits[best] - hits[0] > _LEAST_LEAD * total:
        raise DataError(
            f"the answers fit the token {'after' if best > 0 else 'before'} better than their own: it is among the "
            f"likeliest in {hits[best] / total:.0%} of positions, their own in {hits[0] / total:.0%}",
            advice=["the file is shifted by one: check how it was written"],
        )


def num_kept(given: Sequence[Given]) -> int:
    """How many of the likeliest tokens every entry of a file has.

    Where the token that came stands beside them, an entry has one more unless it is among them. So the smallest entry
    tells; where all are alike and that token is always the least likely, it stands outside of them all.
    """
    entries = [(one, place, entry) for one in given for place, entry in one.entries.items()]
    least = min((len(entry) for _, _, entry in entries), default=1)
    is_outside = all(
        one.has_own_token and len(entry) == least and min(entry, key=entry.__getitem__) == one.ids[place]
        for one, place, entry in entries
    )
    return max(1, least - is_outside)
