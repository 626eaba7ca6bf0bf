from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.training.schedule import Budget, Schedule, Work, plan_budget, steps_of_run, warmup_of_run, windows_in


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
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
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


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_a_schedule_ends_at_its_floor(shape: str) -> None:
    assert Schedule(100, 10, shape, 0.1).factor(100) == pytest.approx(0.1)  # type: ignore[arg-type]


def test_wsd_is_stable_until_its_last_fifth_and_falls_by_a_square_root() -> None:
    schedule = Schedule(100, 10, "wsd", 0.1)
    assert [schedule.factor(applied) for applied in (9, 10, 50, 79, 80)] == [1.0] * 5
    assert schedule.factor(85) == pytest.approx(1.0 - 0.9 * 0.5), "a quarter of the decay"
    assert schedule.factor(99) == pytest.approx(1.0 - 0.9 * math.sqrt(19 / 20))


def test_a_longer_wsd_has_the_same_rates_until_the_shorter_one_decays() -> None:
    short, long = Schedule(100, 10, "wsd"), Schedule(1000, 10, "wsd")
    assert [short.factor(step) for step in range(80)] == [long.factor(step) for step in range(80)]


def test_a_decay_longer_than_what_is_left_begins_after_the_warmup() -> None:
    schedule = Schedule(100, 60, "wsd", decay_ratio=0.9)
    assert schedule.factor(59) == schedule.factor(60) == 1.0
    assert schedule.factor(70) == pytest.approx(0.5) and schedule.factor(100) == 0.0


def test_an_explicit_warmup_never_eats_the_whole_run() -> None:
    assert warmup_of_run(5, 500, 0.1) == 4


# -- the budget ------------------------------------------------------------------------------------------

SMOLLM = {"student": 81_000_000, "teacher": 135_000_000, "teacher_head": 28_000_000}
ASKED = {"max_batches": None, "eval_steps": 0, "num_samples": 3, "sample_tokens": 48}


def spent(work: Work, budget: Budget) -> float:
    """The planned operations of evaluations and samples."""
    batches = budget.num_batches or work.num_batches
    evaluations = -(-work.num_steps // budget.eval_steps)
    written = budget.num_samples * budget.sample_tokens * 14 * 2 * (work.student + work.teacher)
    return batches * (work.first_batch + evaluations * work.later_batch) + written


@given(
    num_steps=st.integers(1, 100_000),
    step_tokens=st.integers(64, 100_000),
    batch_tokens=st.integers(64, 10_000),
    num_batches=st.integers(1, 5_000),
    student=st.integers(10_000, 10**10),
    teacher=st.sampled_from([0, 10**6, 10**8, 10**11]),
)
def test_evaluations_and_samples_stay_within_the_budget(num_batches: int, **counts: int) -> None:
    work = Work(**counts, num_batches=num_batches, teacher_head=counts["teacher"] // 5)
    budget = plan_budget(work, **ASKED)
    assert 1 <= budget.eval_steps <= work.num_steps
    assert 0 <= budget.num_batches < num_batches or num_batches == 1, "0 stands for all of them"
    one_batch = work.first_batch + work.later_batch  # the least that tells how good a student is
    shortest = 8 * 14 * 2 * (work.student + work.teacher)  # one sample of eight tokens
    assert spent(work, budget) <= max(0.6 * work.allowed, 1e11) + one_batch + shortest
    assert work.allowed <= work.steps
    assert work.allowed == pytest.approx(0.1 * work.steps) or work.steps < 5e13, "a tenth of a long run"
    assert plan_budget(work, **ASKED) == budget, "the same counts give the same plan"


def test_a_run_of_half_an_hour_at_a_real_size_spends_at_most_a_tenth_next_to_its_steps() -> None:
    work = Work(num_steps=300, step_tokens=1024, batch_tokens=1024, num_batches=336, **SMOLLM)
    assert spent(work, plan_budget(work, **ASKED)) <= 0.1 * work.steps


def test_the_first_evaluation_at_a_real_size_reads_a_few_batches_and_a_longer_run_more() -> None:
    batches = [
        plan_budget(Work(num_steps, 1024, 1024, 336, **SMOLLM), **ASKED).num_batches for num_steps in (6, 100, 5000)
    ]
    assert batches == [2, 2, 87]


def test_what_was_asked_for_is_kept_and_what_is_shortened_is_said() -> None:
    work = Work(num_steps=6, step_tokens=1024, batch_tokens=1024, num_batches=336, **SMOLLM)
    asked = plan_budget(work, max_batches=50, eval_steps=2, num_samples=0, sample_tokens=48)
    assert (asked.num_batches, asked.eval_steps, asked.note) == (50, 2, "")
    assert plan_budget(work, **{**ASKED, "max_batches": 0}).num_batches == 0, "all of it"
    shortened = plan_budget(work, **ASKED)
    every = f"every {shortened.eval_steps} steps"
    assert all(said in shortened.note for said in ("2 of 336 held-out batches", every, "samples of", "eval RUN"))


def test_a_small_run_is_not_shortened() -> None:
    small = Work(num_steps=20, step_tokens=512, batch_tokens=512, num_batches=4, student=50_000, teacher=200_000)
    budget = plan_budget(small, **ASKED)
    assert (budget.num_batches, budget.num_samples, budget.sample_tokens, budget.note) == (0, 3, 48, "")
