from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.training.schedule import Schedule, steps_of_run, warmup_of_run, windows_in


def test_an_epoch_of_74823_batches_has_4677_steps_and_warms_up_for_467() -> None:
    """The arithmetic that the student-aware guide got wrong by a factor of sixteen."""
    steps = steps_of_run(74_823, 16, epochs=1, max_steps=0)
    assert steps == 4_677
    assert warmup_of_run(steps, 0, 0.1) == 467
    assert warmup_of_run(4_676, 0, 0.1) == 467


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_windows_cover_every_batch_once(num_batches: int, accumulation: int) -> None:
    windows = windows_in(num_batches, accumulation)
    assert (windows - 1) * accumulation < num_batches <= windows * accumulation


@given(
    st.integers(1, 5_000),
    st.integers(0, 5_000),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(0, 1),
)
def test_the_rate_is_positive_and_at_most_its_peak(steps: int, warmup: int, shape: str, floor: float) -> None:
    schedule = Schedule(steps, warmup_of_run(steps, warmup, 0.0), shape, floor)  # type: ignore[arg-type]
    for applied in {0, schedule.num_warmup, steps // 2, steps - 1}:
        factor = schedule.factor(applied)
        assert 0.0 <= factor <= 1.0 + 1e-12
        assert factor > 0 or floor == 0


def test_the_first_step_of_a_warmup_learns() -> None:
    assert Schedule(100, 10).factor(0) == pytest.approx(0.1)
    assert Schedule(100, 10).factor(9) == pytest.approx(1.0)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_a_schedule_ends_at_its_floor(shape: str) -> None:
    assert Schedule(100, 10, shape, 0.1).factor(100) == pytest.approx(0.1)  # type: ignore[arg-type]


def test_an_explicit_warmup_never_eats_the_whole_run() -> None:
    assert warmup_of_run(5, 500, 0.1) == 4
