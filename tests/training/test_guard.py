"""The guard is pure: every law here is checked with plain numbers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.schema import GuardConfig
from stillroom.core.types import Evidence, Examination
from stillroom.training.guard import Guard

SOUND = Examination(True, True, 2.0, 2.0)


def evidence(loss: float = 2.0, norm: float = 1.0, **over: object) -> Evidence:
    fields: dict[str, object] = {"step": 1, "loss": loss, "grad_norm": norm, "num_targets": 1000}
    return Evidence(**{**fields, **over})  # type: ignore[arg-type]


def settled(steps: int = 60, **config: object) -> Guard:
    """A guard that has accepted a while of ordinary training."""
    guard = Guard(GuardConfig(**config))  # type: ignore[arg-type]
    for index in range(steps):
        seen = evidence(2.0 + 0.05 * math.sin(index), 1.0 + 0.1 * math.cos(index))
        assert guard.judge(seen).action == "keep"
        guard.accept(seen)
    return guard


@given(st.floats(allow_nan=True), st.floats(allow_nan=True), st.integers(0, 5))
def test_nothing_that_is_not_finite_is_ever_kept(loss: float, norm: float, targets: int) -> None:
    verdict = Guard(GuardConfig()).judge(evidence(loss, norm, num_targets=targets))
    if verdict.action == "keep":
        assert math.isfinite(loss) and math.isfinite(norm) and targets > 0


@given(st.lists(st.floats(min_value=-1e30, max_value=1e30), min_size=1, max_size=80))
def test_refused_evidence_never_enters_the_statistics(losses: list[float]) -> None:
    guard = settled(20)
    before = guard.statistics()
    for loss in losses:
        if guard.judge(evidence(loss)).action != "keep":
            assert guard.statistics() == before


def test_an_empty_batch_is_skipped() -> None:
    assert Guard(GuardConfig()).judge(evidence(num_targets=0)).action == "skip"


def test_overflow_is_retried_with_a_smaller_scale_then_examined() -> None:
    guard = settled(max_retries=3)
    overflow = {"norm": math.inf, "is_scaled": True, "loss_scale": 1024.0}
    assert [guard.judge(evidence(**overflow, attempt=n)).action for n in range(4)] == ["retry"] * 3 + ["examine"]


def test_one_overflow_at_the_floor_is_the_batch_s_and_several_in_a_row_end_with_23() -> None:
    guard = Guard(GuardConfig(max_retries=2))
    overflow = evidence(norm=math.inf, is_scaled=True, is_scale_at_floor=True)
    verdicts = [guard.judge(overflow) for _ in range(3)]
    assert [verdict.action for verdict in verdicts] == ["examine", "examine", "halt"]
    assert verdicts[-1].exit_code == 23


def test_an_unscaled_overflow_is_not_retried() -> None:
    assert settled().judge(evidence(norm=math.inf)).action == "examine"


def test_strict_halts_at_the_first_nan_and_names_the_term() -> None:
    guard = Guard(GuardConfig(on_nonfinite="halt"))
    verdict = guard.judge(evidence(math.nan, terms={"ce": 2.0, "kd": math.nan}))
    assert verdict.action == "halt" and "kd" in verdict.reason


def test_a_loss_is_judged_by_windows_of_the_same_sources() -> None:
    """A step of a small source with a higher loss, one in sixteen, was a spike of the others and was refused."""

    def of(source: str, loss: float) -> Evidence:
        return evidence(loss, terms={"kd": loss}, sources={source: {"targets": 1000.0, "kd": loss}})

    guard = Guard(GuardConfig())
    for index in range(320):
        noise = 0.03 * math.sin(index)
        seen = of("chats", 1.9 + noise) if index % 16 == 15 else of("documents", 1.1 + noise)
        assert guard.judge(seen).action == "keep", index
        guard.accept(seen)
    assert guard.judge(of("documents", 1.9)).action == "examine", "high for a document"
    assert guard.judge(of("chats", 3.0)).action == "examine", "high for a chat"
    again = Guard(GuardConfig())
    again.load_state_dict(guard.state_dict())
    assert again.judge(of("chats", 1.9)).action == "keep" and again.judge(of("documents", 1.9)).action == "examine"


def test_a_spike_with_a_sound_canary_is_the_batch_s_fault() -> None:
    guard = settled()
    verdict = guard.judge(evidence(9.0))
    assert verdict.action == "examine"
    assert guard.diagnose(evidence(9.0), verdict.reason, SOUND).action == "skip"


def test_a_spike_with_a_bad_canary_is_the_state_s_fault() -> None:
    verdict = settled().diagnose(evidence(9.0), "loss", Examination(True, True, 8.0, 2.0))
    assert verdict.action == "rollback" and verdict.backs_off


def test_weights_that_are_not_finite_roll_back_at_full_learning_rate() -> None:
    verdict = settled().diagnose(evidence(math.nan), "loss", Examination(False, True, math.nan, 2.0))
    assert verdict.action == "rollback" and not verdict.backs_off


def test_a_nan_canary_is_not_within_bounds() -> None:
    assert settled().diagnose(evidence(9.0), "x", Examination(True, True, math.nan, 2.0)).action == "rollback"


def test_spent_rollbacks_end_with_22() -> None:
    guard = settled(max_rollbacks=2)
    bad = Examination(False, True, math.nan, 2.0)
    actions = [guard.diagnose(evidence(math.nan), "x", bad) for _ in range(3)]
    assert [v.action for v in actions] == ["rollback", "rollback", "halt"]
    assert actions[-1].exit_code == 22


def test_a_reset_comes_once_when_asked_for() -> None:
    guard = settled(max_rollbacks=0, on_exhausted="reset")
    bad = Examination(False, True, math.nan, 2.0)
    assert [guard.diagnose(evidence(math.nan), "x", bad).action for _ in range(2)] == ["reset", "halt"]


def test_too_many_refusals_in_a_row_end_with_21() -> None:
    guard = settled(max_consecutive=3)
    verdicts = [guard.diagnose(evidence(math.nan), "x", SOUND) for _ in range(3)]
    assert [v.action for v in verdicts] == ["skip", "skip", "halt"]
    assert verdicts[-1].exit_code == 21


def test_a_new_normal_is_learned_instead_of_refused_for_ever() -> None:
    """A level shift that lasts is the run, not the data: the statistics must follow it."""
    guard = settled()
    verdicts = []
    for _ in range(12):
        seen = evidence(4.0, 2.0)
        verdict = guard.judge(seen)
        if verdict.action == "examine":
            verdict = guard.diagnose(seen, verdict.reason, SOUND)
        if verdict.action == "keep":
            guard.accept(seen)
        verdicts.append(verdict)
    assert [one.action for one in verdicts] == ["skip"] * 8 + ["keep"] * 4
    blames_rate = ["train.learning_rate" in one.reason for one in verdicts]
    assert blames_rate == [False] * 2 + [True] * 7 + [False] * 3, "so many batches in a row are not at fault"


def test_a_fixed_bound_on_the_norm_refuses_only_where_it_is_set() -> None:
    assert settled().judge(evidence(norm=2.5)).action == "keep"
    bounded = settled(skip_grad_norm=2.0)
    assert bounded.judge(evidence(norm=2.0)).action == "keep"
    verdict = bounded.judge(evidence(norm=2.5))
    assert verdict.action == "skip" and "2.5 stands above guard.skip_grad_norm = 2" in verdict.reason


def test_a_norm_that_only_grows_is_clipped_not_refused() -> None:
    assert settled().judge(evidence(2.0, 5.0)).action == "keep"
    assert settled().judge(evidence(2.0, 50.0)).action == "examine"


def test_a_teacher_at_fault_again_and_again_is_suspended() -> None:
    guard = settled(max_consecutive=100)
    broken = evidence(math.nan, terms={"kd": math.nan})
    assert [guard.diagnose(broken, "x", SOUND).action for _ in range(20)] == ["skip"] * 19 + ["fallback"]


def test_another_phase_starts_new_statistics() -> None:
    guard = settled()
    assert guard.judge(evidence(20.0, phase="next")).action == "keep"


def test_state_survives_a_round_trip() -> None:
    guard = settled()
    guard.diagnose(evidence(9.0), "x", SOUND)
    twin = Guard(guard.config)
    twin.load_state_dict(guard.state_dict())
    assert twin.state_dict() == guard.state_dict()
    assert twin.judge(evidence(9.0)) == guard.judge(evidence(9.0))


def test_before_there_are_statistics_a_threefold_loss_is_examined() -> None:
    guard = Guard(GuardConfig())
    assert guard.judge(evidence(6.0)).action == "keep", "nothing is known yet"
    guard.accept(evidence(6.0))
    assert guard.judge(evidence(11.0)).action == "keep"
    assert guard.judge(evidence(40.0)).action == "examine"


def test_a_loss_that_rises_while_the_rate_warms_up_is_kept() -> None:
    guard = Guard(GuardConfig())
    for index in range(30):
        seen = evidence(2.0 + min(index, 9) * 0.15 - max(index - 9, 0) * 0.03, 3.0 ** (index % 3))
        assert guard.judge(seen).action == "keep", index
        guard.accept(seen)


def test_a_canary_that_was_never_good_is_not_learned_as_normal() -> None:
    """The reference may have been taken from a student that was lost already: its best bounds what is normal."""
    guard = settled()
    lost = Examination(True, True, 9.0, 9.0, canary_best=3.0)
    verdicts = [guard.diagnose(evidence(9.0), "loss", lost) for _ in range(3)]
    assert [verdict.action for verdict in verdicts] == ["rollback"] * 3
    near = Examination(True, True, 3.2, 3.0, canary_best=3.0)
    assert guard.diagnose(evidence(9.0), "loss", near).action == "skip"


def test_a_weight_that_no_update_can_have_made_is_the_state_s_fault() -> None:
    verdict = settled().diagnose(evidence(9.0), "loss", Examination(True, True, 2.0, 2.0, weights_reached=False))
    assert verdict.action == "rollback" and not verdict.backs_off


def test_empty_batches_do_not_make_the_next_spike_normal() -> None:
    guard = settled()
    for _ in range(12):
        assert guard.judge(evidence(num_targets=0)).action == "skip"
    assert guard.diagnose(evidence(9.0), "loss", SOUND).action == "skip"


def test_a_rollback_forgets_the_spikes_that_it_undoes() -> None:
    guard = settled()
    for _ in range(7):
        assert guard.diagnose(evidence(9.0), "loss", SOUND).action == "skip"
    assert guard.diagnose(evidence(9.0), "loss", Examination(True, True, 8.0, 2.0)).action == "rollback"
    assert [guard.diagnose(evidence(9.0), "loss", SOUND).action for _ in range(8)] == ["skip"] * 8


def answers(rng: random.Random, level: float) -> tuple[float, int]:
    """The loss of a batch of prompt and answer rows: few targets, most of them easy, some hard."""
    num_targets = rng.choice([4, 8, 16, 48, 128, 400])
    losses = [rng.expovariate(1.0 / 3.0) if rng.random() < level else rng.expovariate(20.0) for _ in range(num_targets)]
    return sum(losses) / num_targets, num_targets


@pytest.mark.parametrize("level", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_noise_of_few_targets_is_not_refused(seed: int, level: float) -> None:
    rng, guard = random.Random(seed), Guard(GuardConfig())
    for index in range(2000):
        loss, num_targets = answers(rng, level)
        seen = evidence(loss, math.exp(rng.gauss(0.0, 0.4)), num_targets=num_targets, terms={"kd": loss / 2})
        assert guard.judge(seen).action == "keep", f"step {index}: {loss:.3f} over {num_targets} targets"
        guard.accept(seen)


@pytest.mark.parametrize(("num_targets", "loss"), [(124, 4.0), (1024, 2.8), (16_384, 2.6)])
def test_a_true_spike_is_examined_whatever_the_batch(num_targets: int, loss: float) -> None:
    guard = Guard(GuardConfig())
    for index in range(60):
        guard.accept(evidence(2.0 + 0.05 * math.sin(index), num_targets=num_targets))
    assert guard.judge(evidence(loss, num_targets=num_targets)).action == "examine"


def taught(guard: Guard, rng: random.Random, steps: int = 200) -> None:
    """Ordinary steps of a run that learns from the teacher alone; a tenth are of a harder kind of text."""
    for _ in range(steps):
        seen = evidence(3.8 + rng.gauss(0, 0.1), label_loss=4.0 + rng.gauss(0, 0.1) + 2.0 * (rng.random() < 0.1))
        assert guard.judge(seen).action == "keep"
        guard.accept(seen)


def test_random_tokens_are_examined_though_the_distance_to_the_teacher_falls_on_them() -> None:
    guard = Guard(GuardConfig(), vocab_size=2048)
    taught(guard, random.Random(0))
    noise = evidence(3.1, label_loss=8.7)
    assert guard.judge(noise).action == "examine" and guard.diagnose(noise, "x", SOUND).action == "skip"
    assert guard.judge(evidence(3.1, label_loss=7.5)).action == "keep", "no worse than a guess"
    assert guard.judge(evidence(3.1, label_loss=math.inf)).action == "keep", "a label that the student holds impossible"


def test_a_large_gradient_of_a_sound_student_with_ordinary_losses_is_clipped_not_refused() -> None:
    guard, lost = settled(), Examination(True, True, 8.0, 2.0)
    steep, spike = evidence(2.0, 40.0), evidence(9.0, 40.0)
    assert guard.judge(steep).action == guard.judge(spike).action == "examine"
    assert [guard.diagnose(seen, "x", SOUND).action for seen in (steep, spike)] == ["keep", "skip"]
    assert guard.diagnose(steep, "x", lost).action == "rollback"


@pytest.mark.parametrize("wobble", [0.0, 1e-6])
def test_a_very_steady_run_tolerates_a_small_wobble(wobble: float) -> None:
    guard = Guard(GuardConfig())
    for index in range(60):
        guard.accept(evidence(2.0 + wobble * (index % 2)))
    assert guard.judge(evidence(2.1, 1.5)).action == "keep"


def test_a_term_that_is_not_finite_never_enters_the_statistics() -> None:
    guard = settled(20)
    guard.accept(evidence(2.0, math.nan, terms={"ce": math.nan}))
    statistics = guard.statistics()
    assert all(math.isfinite(value) for values in statistics["losses"].values() for value in values)
    assert all(math.isfinite(value) for value in statistics["norms"])
    assert guard.judge(evidence(1e6)).action == "examine", "a spike is still seen"
