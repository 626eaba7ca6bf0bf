"""Laws of the probe: what holds for every model, and what tells a temperature."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from refusals import refused

from stillroom.core.errors import ServerUnusable
from stillroom.teachers.served.teacher import (
    check_causal,
    check_steady,
    check_temperature,
    fitted_temperature,
    spread_places,
)
from stillroom.teachers.signals import Given

VOCAB, KEPT = 50, 20


def entry(seen: tuple[int, ...], temperature: float = 1.0) -> dict[int, float]:
    """A distribution that depends on all that was seen."""
    logits = np.random.default_rng(abs(hash(seen)) % 2**32).normal(size=VOCAB) * 2.0 / temperature
    log_probs = logits - math.log(np.exp(logits).sum())
    kept = np.argsort(-log_probs)[:KEPT]
    return {int(token): float(log_probs[token]) for token in kept}


def given(ids: tuple[int, ...], shift: int = 0) -> Given:
    """Entry t saw the tokens before t; shifted, one more or one fewer."""
    return Given("", ids, {place: entry(ids[: max(place + shift, 0)]) for place in range(1, len(ids))})


ONE = tuple(random.Random(1).randrange(VOCAB) for _ in range(20))
OTHER = (*ONE[:10], (ONE[10] + 1) % VOCAB, *ONE[11:])


def test_an_answer_that_saw_the_tokens_before_it_and_no_other_passes() -> None:
    check_causal(given(ONE), given(OTHER), 10, KEPT)


@pytest.mark.parametrize(("shift", "told"), [(1, "the token after"), (-1, "the token before")])
def test_an_answer_that_saw_one_more_or_one_fewer_is_shifted(shift: int, told: str) -> None:
    with refused(ServerUnusable, "the probe", told, "shifted"):
        check_causal(given(ONE, shift), given(OTHER, shift), 10, KEPT)


def test_answers_that_depend_on_nothing_are_refused() -> None:
    same = Given("", ONE, {place: entry((3,)) for place in range(1, len(ONE))})
    with refused(ServerUnusable, "the probe"):
        check_causal(same, same, 10, KEPT)


def slow(ids: tuple[int, ...], changed: int = 10, noise: float = 0.0) -> Given:
    """As `given`, but the answer after `changed` hardly depends on it; with the token that came in every table."""
    entries = dict(given(ids).entries)
    before, after = (entry((*ids[:changed], token)) for token in (ONE[changed], ids[changed]))
    entries[changed + 1] = {token: 0.9 * value + 0.1 * after.get(token, value) for token, value in before.items()}
    for place, one in entries.items():
        shake = random.Random(f"{ids}{place}").uniform(-noise, noise)
        entries[place] = {token: value + shake for token, value in one.items()}
        entries[place].setdefault(ids[place], min(one.values()) - 0.1 - ids[place] / VOCAB)
    return Given("", ids, entries)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_an_answer_that_changes_little_has_changed_and_rounding_has_not(noise: float) -> None:
    """A letter after a changed letter may be nearly as sure as before. A real model of letters is."""
    check_causal(slow(ONE, noise=noise), slow(OTHER, noise=noise), 10, KEPT)


def test_rounding_is_steady_and_another_model_is_not() -> None:
    chance = random.Random(2)
    before = [-chance.expovariate(0.5) for _ in range(40)]
    check_steady(before, [value + chance.uniform(-0.03, 0.03) for value in before], since="before")
    with refused(ServerUnusable, "", "probe"):
        check_steady(before, [-chance.expovariate(0.5) for _ in range(40)], since="before")


def drawn(temperature: float, num_tokens: int = 800) -> Given:
    """A text drawn from the model, answered at a temperature."""
    generator = np.random.default_rng(5)
    ids, entries = [0], {}
    for place in range(1, num_tokens):
        logits = np.random.default_rng(ids[-1] + 1000).normal(size=VOCAB) * 2.0
        probs = np.exp(logits) / np.exp(logits).sum()
        told = logits / temperature - math.log(np.exp(logits / temperature).sum())
        kept = np.argsort(-told)[:KEPT]
        entries[place] = {int(token): float(told[token]) for token in kept}
        ids.append(int(generator.choice(VOCAB, p=probs)))
    return Given("", tuple(ids), entries)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 3.0])
def test_the_temperature_of_answers_is_found_from_the_tokens_that_came(temperature: float) -> None:
    assert fitted_temperature([drawn(temperature)], KEPT)[0] == pytest.approx(temperature, rel=0.2)


def test_a_far_temperature_is_refused_and_a_near_one_is_told() -> None:
    assert "temperature 1" in check_temperature([drawn(1.0)], KEPT)
    assert "temperature 1.2" in check_temperature([drawn(1.2)], KEPT)
    for far in (0.5, 2.0):
        with refused(ServerUnusable, "", f"temperature {far:g}"):
            check_temperature([drawn(far)], KEPT)


def test_a_few_tokens_prove_no_temperature() -> None:
    check_temperature([drawn(2.0, num_tokens=5)], KEPT)


def test_answers_that_are_known_to_be_raw_may_be_sharp_and_not_flat() -> None:
    """A small model on text that it does not know is surer than it has reason to be."""
    assert "raw" in check_temperature([drawn(0.5)], KEPT, is_raw=True)
    with refused(ServerUnusable, "", "temperature 2"):
        check_temperature([drawn(2.0)], KEPT, is_raw=True)


@pytest.mark.parametrize(("length", "most"), [(64, 4), (64, None), (5, 9), (2, 4), (3, 1)])
def test_tokens_of_the_probe_that_are_asked_again_lie_within_it(length: int, most: int | None) -> None:
    places = spread_places(length, most)
    assert places == sorted(set(places)) and set(places) <= set(range(1, length))
    assert len(places) == min(length - 1, most or length)
