"""What is asked of a server before it is believed, and again while it is used.

The text is fixed, and some of what a right answer must be is known whatever the model:

causal    With another token at place m, the answers up to and including that about token m stay, and that about token
          m + 1 changes. An answer that changes earlier saw the token it answers; one that changes later is about the
          token before. Either is a shift by one, even if the token that came was put into its table.
tokens    What the server says tokens spell is what the tokenizer says.
steady    Asked again, the answer is the same, until the server has another model.

Of real rows of the data, those answers that fit much better when they are sharpened or flattened are log-probabilities
of another temperature: see `fitted_temperature`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stillroom.errors import ServerUnusable
from stillroom.teachers.entries import Entry, Given

TEXT = (
    "In the still room of the old house they kept spirits, waters and oils. The maid who kept the room knew how long a "
    "thing must be heated, how slowly it must drip, and what is left behind when the best of it has gone over. In the "
    "still room of the old house they kept"
)
_MOST_TOKENS = 64
_SHARE = 0.1  # of the largest change: what is less did not change
_LEAST_CHANGE = 1e-5  # in total variation: below it nothing depends on the token that was changed
_MOST_DRIFT = 0.05  # nats a token, mean: batches of half-precision servers differ by less, other models by more
_DEGREES = np.geomspace(0.25, 4.0, 33)
_FAR = 1.6  # a factor of temperature: text that a model does not know well makes a smaller one
_LEAST_GAIN = 0.02  # nats a token
_SIGMAS = 3.0


@dataclass(frozen=True)
class Probe:
    """The prompts of the causal test, in ids: they differ in one token."""

    ids: tuple[int, ...]
    other: tuple[int, ...]
    changed: int

    @staticmethod
    def of(tokenizer: Any) -> Probe:
        ids = tuple(int(one) for one in tokenizer(TEXT, add_special_tokens=False)["input_ids"])[:_MOST_TOKENS]
        changed = len(ids) // 2
        instead = next(token for token in (*ids[changed + 2 :], *ids) if token != ids[changed])
        return Probe(ids, (*ids[:changed], instead, *ids[changed + 1 :]), changed)


def spread_places(length: int, most: int | None) -> list[int]:
    """Tokens of a probe of this length that are asked about, from the second to the last; None: all of them."""
    if most is None or most >= length - 1:
        return list(range(1, length))
    return [1 + (length - 2) * number // max(1, most - 1) for number in range(most)]


def check_causal(one: Given, other: Given, changed: int) -> None:
    """Raise where the change of a token shows in another answer first than in that about the next token."""
    changes = {place: _change(one.entries[place], other.entries[place]) for place in one.entries}
    most = max(changes.values())
    if most < _LEAST_CHANGE:
        raise _wrong("its answers do not depend on the text: another token in the prompt changed nothing")
    first = next(place for place, change in changes.items() if change > _SHARE * most)
    if first == changed + 1:
        return
    told = f"token {changed} of the prompt was changed, and the answers change from that about token {first} on"
    meaning = {
        changed: "each answer is about the token after the one it stands at: shifted by one",
        changed + 2: "each answer is about the token before the one it stands at: shifted by one",
    }.get(first, "an answer about a token must depend on all before it and on no other")
    raise _wrong(f"{told}: {meaning}")


def _change(one: Entry, other: Entry) -> float:
    """A lower bound of the total variation of two tables. What is not in a table has at most its least mass."""
    floors = [math.exp(min(table.values())) for table in (one, other)]
    found = 0.0
    for token in {**one, **other}:
        masses = [math.exp(table[token]) if token in table else None for table in (one, other)]
        match masses:
            case [float() as mine, float() as theirs]:
                found += abs(mine - theirs)
            case [float() as mine, None]:
                found += max(0.0, mine - floors[1])
            case [None, float() as theirs]:
                found += max(0.0, theirs - floors[0])
    return found / 2.0


def own_log_probs(given: Given) -> list[float]:
    """[T - 1] What each token of the prompt but the first was given."""
    return [entry[given.ids[place]] for place, entry in given.entries.items()]


def check_steady(before: Sequence[float], now: Sequence[float], *, since: str) -> None:
    """Raise where the probe is answered otherwise than before."""
    if len(before) != len(now):
        raise _wrong(f"the probe has {len(now)} answers, and had {len(before)} {since}")
    drift = float(np.abs(np.maximum(before, -50.0) - np.maximum(now, -50.0)).mean())
    if drift > _MOST_DRIFT:
        raise ServerUnusable(
            f"the server answers the probe otherwise than {since}: by {drift:.3g} nats a token on average, and "
            f"{_MOST_DRIFT} is the most that rounding explains. It has another model",
            advice=["serve the model that was served before", "for another teacher begin another cache or run"],
        )


# -- temperature -----------------------------------------------------------------------------------------


def fitted_temperature(given: Sequence[Given], num_kept: int) -> tuple[float, float, float]:
    """(temperature, gain, standard error): the temperature that answers seem to have been given at.

    Among the kept tokens, those that came have probability softmax(log_probs) at the given temperature and
    softmax(d * log_probs) at d times a colder one, whatever the tail is. The d under which they were likeliest is that
    temperature; `gain` is by how much, in nats a token. A model that knows its text has d near 1.
    """
    gains = []
    for one in given:
        for place, entry in one.entries.items():
            kept = dict(sorted(entry.items(), key=lambda item: -item[1])[:num_kept])
            if (came := one.ids[place]) in kept and kept[came] > -math.inf:
                gains.append(_scaled(np.array([kept[came], *kept.values()])))
    if not gains:
        return 1.0, 0.0, 0.0
    table = np.stack(gains)  # [positions, degrees], beside the answers as they are
    best = int(table.mean(axis=0).argmax())
    chosen = table[:, best]
    return float(_DEGREES[best]), float(chosen.mean()), float(chosen.std() / math.sqrt(len(chosen)))


def _scaled(values: Any) -> Any:
    """[degrees] Log-probability of the first among the others at each degree, less that at degree 1."""
    own, among = values[0], values[1:]
    degrees = np.concatenate([_DEGREES, [1.0]])
    scores = degrees[:, None] * (np.maximum(among, -500.0) - among.max())[None]
    found = degrees * (max(own, -500.0) - among.max()) - np.log(np.exp(scores).sum(axis=1))
    return found[:-1] - found[-1]


def check_temperature(given: Sequence[Given], num_kept: int, *, is_raw: bool = False) -> str:
    """Raise where answers are certainly those of another temperature. Answers with what was found, for the log.

    A small model on text that it does not know is as sharp as one that was sharpened. Where the server's answers are
    known to be raw (`is_raw`), that is said and not refused; answers that are too flat have no such cause.
    """
    degree, gain, error = fitted_temperature(given, num_kept)
    told = f"the server's answers fit the text best as log-probabilities of temperature {degree:.2g}"
    told += f", by {gain:.3g} nats a token over temperature 1"
    is_far = degree >= _FAR or degree <= 1.0 / _FAR
    if is_far and gain > _LEAST_GAIN and gain > _SIGMAS * error:
        way = "flatter" if degree > 1.0 else "sharper"
        if is_raw and degree < 1.0:
            return f"{told}: the teacher is surer of this text than it has reason to be; its log-probabilities are raw"
        raise ServerUnusable(
            f"{told}: they are {way} than the text allows",
            advice=[
                "have the server give log-probabilities of temperature 1 (vLLM: --logprobs-mode raw_logprobs)",
                "where the teacher is known to be so: --set teacher.requests.check_temperature=false",
            ],
        )
    return told


def _wrong(what: str) -> ServerUnusable:
    return ServerUnusable(f"the server's answers cannot be used: {what}", where="the probe")
