from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config import load_config
from stillroom.config.schema import Ramp
from stillroom.training.schedule import Curriculum, value_at

ramps = st.builds(
    lambda start, end, a, b, shape: Ramp(start=start, end=end, begin=min(a, b), until=max(a, b), shape=shape),
    st.floats(-10, 10),
    st.floats(-10, 10),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["linear", "cosine", "step"]),
)


@given(ramps, st.floats(0, 1))
def test_a_ramp_stays_between_its_ends(ramp: Ramp, progress: float) -> None:
    low, high = sorted((ramp.start, ramp.end))
    assert low - 1e-9 <= value_at(ramp, progress) <= high + 1e-9


@given(ramps)
def test_a_ramp_reaches_its_end(ramp: Ramp) -> None:
    assert value_at(ramp, 1.0) == pytest.approx(ramp.end)


@given(st.floats(0, 10), st.floats(0, 1))
def test_a_constant_does_not_move(value: float, progress: float) -> None:
    assert value_at(value, progress) == value


def test_phases_are_named_by_progress() -> None:
    config = load_config(
        overrides={"curriculum.phases": [{"name": "one", "until": 0.3}, {"name": "two", "until": 1.0}]}
    )
    curriculum = Curriculum.of(config)
    assert [curriculum.at(p).phase for p in (0.0, 0.29, 0.3, 1.0)] == ["one", "one", "two", "two"]


def test_a_lesson_follows_its_ramps() -> None:
    config = load_config(overrides={"objectives.kd.weight": {"start": 0.0, "end": 1.0}})
    curriculum = Curriculum.of(config)
    assert curriculum.at(0.25).weights["kd"] == pytest.approx(0.25)
    assert curriculum.uses_teacher
