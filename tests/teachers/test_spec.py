"""Which signal a configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.teachers.signals import SignalSpec, cache_spec, check_use, live_spec, stored_spec

HYBRID = SignalSpec("hybrid", 8, 12)


def of(over: dict[str, Any]) -> Any:
    return load_config(overrides=over)


@pytest.mark.parametrize(
    ("over", "spec"),
    [
        ({}, HYBRID),
        ({"objectives.kd.top_k": 256}, SignalSpec("top_k", 256, 0)),
        ({"objectives.kd.divergence": "reverse_kl"}, SignalSpec("top_k", 64, 0)),
        ({"objectives.kd.on_wrong_teacher": "label_residual"}, SignalSpec("top_k", 64, 0)),
        ({"objectives.kd.temperature": 2.0}, SignalSpec("hybrid", 8, 12, 2.0)),
        ({"teacher.signal": {"kind": "sampled"}}, SignalSpec("sampled", 0, 50)),
        ({"teacher.signal": {"kind": "renormalised", "k": 9}}, SignalSpec("renormalised", 9, 0)),
    ],
)
def test_a_new_cache_holds_what_the_objective_can_use(over: dict[str, Any], spec: SignalSpec) -> None:
    assert cache_spec(of(over)) == spec
    assert SignalSpec.of_dict(spec.to_dict()) == spec


def test_a_live_teacher_is_asked_for_the_kind_that_is_named() -> None:
    assert live_spec(of({"teacher.signal.kind": "hybrid"})) == HYBRID


def test_where_it_is_left_open_the_cache_decides() -> None:
    there = SignalSpec("top_k", 5, 0)
    assert stored_spec(of({}), there) == there
    assert stored_spec(of({"teacher.signal.kind": "hybrid"}), there) == HYBRID
    assert stored_spec(of({"objectives.kd.top_k": 7}), there) == SignalSpec("top_k", 7, 0)
    assert stored_spec(of({"objectives.kd.temperature": 3.0}), there).temperature == 3.0


@pytest.mark.parametrize(
    ("over", "word"),
    [
        ({"objectives.kd.temperature": {"start": 1.0, "end": 2.0}}, "temperature moves"),
        ({"objectives.kd.top_k": {"start": 8, "end": 16}}, "top_k moves"),
        ({"objectives.kd.top_k": 8, "teacher.signal.kind": "hybrid"}, "for draws"),
        ({"objectives.kd.top_k": 8, "teacher.signal": {"kind": "top_k", "k": 9}}, "teacher.signal.k is 9"),
    ],
)
def test_what_one_signal_cannot_be_is_refused(over: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        cache_spec(of(over))


@pytest.mark.parametrize(
    "over", [{"objectives.kd.token_fraction": 0.5}, {"objectives.kd.on_wrong_teacher": "mft"}], ids=["distance", "mft"]
)
def test_what_drawn_tokens_cannot_tell_is_refused(over: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        check_use(of(over), HYBRID)
    assert check_use(of({}), HYBRID) == []
