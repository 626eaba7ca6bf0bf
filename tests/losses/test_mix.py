"""Laws of the mix: one place divides, and train and eval are scored alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from head_cases import Case, batch_of, grads_of, make_case
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from stillroom.config.schema import Divergence, KdConfig, ObjectivesConfig, Ramp
from stillroom.core.errors import ConfigError
from stillroom.core.types import Batch, LossWeights, StudentView
from stillroom.losses.head.kernel import KernelName
from stillroom.losses.mix import Mix

MIX = Mix(ObjectivesConfig(chunk_tokens=3))
LESSON = LossWeights("train", {"kd": 0.9, "ce": 0.1}, {"kd.temperature": 2.0, "kd.beta": 0.5})


def part_of(case: Case, part: slice) -> tuple[StudentView, object, Batch]:
    teacher = replace(case.teacher, hidden=case.teacher.hidden[part])
    return StudentView(case.hidden[part], case.head), teacher, batch_of(case.targets[part])


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("top_k", [0, 5])
@given(seed=st.integers(0, 999), cuts=st.sets(st.integers(1, 15), max_size=7))
def test_eight_micro_batches_equal_one(divergence: Divergence, top_k: int, seed: int, cuts: set[int]) -> None:
    mix = Mix(ObjectivesConfig(chunk_tokens=3, kd=KdConfig(divergence=divergence, top_k=top_k)))
    whole, split = make_case(seed, 16).copy(), make_case(seed, 16).copy()
    counts = {"kd": 16, "ce": 16}
    one = mix.score(whole.view, whole.teacher, whole.batch, LESSON, counts)
    one.loss.backward()
    edges = [0, *sorted(cuts), 16]
    losses, totals = [], []
    for start, stop in itertools.pairwise(edges):
        score = mix.score(*part_of(split, slice(start, stop)), LESSON, counts)  # type: ignore[arg-type]
        score.loss.backward()
        losses.append(score.loss.detach())
        totals.append(score.terms["kd"].total)
    torch.testing.assert_close(torch.stack(losses).sum(), one.loss.detach())
    torch.testing.assert_close(torch.stack(totals).sum(), one.terms["kd"].total)
    torch.testing.assert_close(grads_of(split), grads_of(whole))


def test_loss_is_weights_times_means() -> None:
    case = make_case(1, 16)
    score = MIX.score(case.view, case.teacher, case.batch, LESSON, {"kd": 16, "ce": 16})
    torch.testing.assert_close(score.loss, 0.9 * score.terms["kd"].mean + 0.1 * score.terms["ce"].mean)


def test_eval_equals_train_on_the_same_batch() -> None:
    case = make_case(1, 16).copy(torch.float32)
    counts = {"kd": 16, "ce": 16}
    trained = MIX.score(case.view, case.teacher, case.batch, LESSON, counts)
    with torch.no_grad():
        evaluated = MIX.score(case.view, case.teacher, case.batch, LESSON, counts)
    assert torch.equal(trained.loss.detach(), evaluated.loss)
    assert not trained.terms["kd"].total.requires_grad
    assert trained.terms["kd"].total.dtype == torch.float32


def test_without_a_teacher_the_weight_moves_to_cross_entropy() -> None:
    case = make_case(1, 16)
    score = MIX.score(case.view, None, case.batch, LESSON, {"kd": 16, "ce": 16})
    assert set(score.terms) == {"ce"}
    torch.testing.assert_close(score.loss, score.terms["ce"].mean)


def test_counts_are_the_scored_targets_of_the_window() -> None:
    targets = torch.tensor([[1, -100, 3], [-100, -100, 2]])
    batch = Batch(targets, torch.ones_like(targets), targets, torch.ones_like(targets), ("a", "b"))
    assert MIX.counts([batch, batch]) == {"kd": 6, "ce": 6}


def test_an_empty_window_scores_zero() -> None:
    case = make_case(0, 1)
    score = MIX.score(*part_of(case, slice(0, 0)), LESSON, {"kd": 0, "ce": 0})  # type: ignore[arg-type]
    assert score.loss == 0


@pytest.mark.parametrize("kernel", ["plain", "auto"])
def test_nothing_is_read_back_to_the_host(count_reads: Callable[[], list[str]], kernel: KernelName) -> None:
    case = make_case(1, 16).copy(torch.float32)
    mix = Mix(ObjectivesConfig(), kernel=kernel)
    reads = count_reads()
    mix.score(case.view, case.teacher, case.batch, LESSON, {"kd": 16, "ce": 16}).loss.backward()
    assert reads == []


def test_settings_of_the_lesson_rule() -> None:
    case = make_case(1, 16)
    counts = {"kd": 16, "ce": 16}
    jsd = Mix(ObjectivesConfig(kd=KdConfig(divergence="jsd")))
    forward = Mix(ObjectivesConfig(kd=KdConfig(divergence="forward_kl")))
    at_end = LossWeights("train", {"kd": 1.0}, {"kd.temperature": 3.0, "kd.beta": 0.0})
    one = jsd.score(case.view, case.teacher, case.batch, at_end, counts)
    assert torch.equal(one.loss, forward.score(case.view, case.teacher, case.batch, at_end, counts).loss)
    few = LossWeights("train", {"kd": 1.0}, {"kd.temperature": 3.0, "kd.top_k": 2})
    assert forward.score(case.view, case.teacher, case.batch, few, counts).loss < one.loss


def test_a_cache_that_cannot_serve_the_config_is_refused_when_the_run_is_built() -> None:
    with refused(ConfigError, "", "reverse_kl"):
        Mix(ObjectivesConfig(kd=KdConfig(divergence="reverse_kl"))).check_signal("sampled", 1.0)
    with refused(ConfigError, "", "objectives.kd.temperature"):
        Mix(ObjectivesConfig(kd=KdConfig(temperature=Ramp(start=1, end=2)))).check_signal("top-k", 1.0)
    with refused(ConfigError, "", "objectives.kd.temperature"):
        Mix(ObjectivesConfig()).check_signal("top-k", 2.0)
    Mix(ObjectivesConfig()).check_signal("sampled", 1.0)
