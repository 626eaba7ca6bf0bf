"""Laws of log-probabilities that others gave."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from stillroom.teachers.signals import LOG_STEP, NOTHING, SignalSpec, position_answer

SPEC = SignalSpec("top_k", 2, 0)


def test_the_tail_is_what_the_kept_tokens_leave_over() -> None:
    counters: Counter[str] = Counter()
    entry = {7: math.log(0.5), 3: math.log(0.3), 9: math.log(0.01)}
    answer = position_answer(entry, 9, SPEC, counters)
    assert answer.ids.tolist() == [[7, 3]]
    assert math.exp(-LOG_STEP * int(answer.tail[0])) == pytest.approx(0.2, rel=LOG_STEP)
    assert math.exp(-LOG_STEP * int(answer.label[0])) == pytest.approx(0.01, rel=LOG_STEP)
    assert counters == {"labels": 1, "positions": 1}


def test_a_tail_below_rounding_is_counted_and_not_nothing() -> None:
    counters: Counter[str] = Counter()
    entry = {7: math.log(0.6), 3: math.log(0.4)}
    assert position_answer(entry, 7, SPEC, counters).tail[0] == NOTHING
    small = position_answer(entry, 7, SPEC, counters, least_tail=1e-6)
    assert math.exp(-LOG_STEP * int(small.tail[0])) == pytest.approx(1e-6, rel=LOG_STEP)
    assert counters["unresolved_tails"] == 1


def test_too_few_tokens_are_unusable_and_counted() -> None:
    counters: Counter[str] = Counter()
    assert position_answer({7: -0.1}, 7, SPEC, counters).entropy[0] == NOTHING
    assert counters["short_positions"] == 1
