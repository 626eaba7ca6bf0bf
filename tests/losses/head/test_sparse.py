"""Laws of teachers that answer with a few tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from divergence_cases import MEMBERS, every_member, every_smooth_member
from head_cases import Case, buckets, grads_of, logits_of, make_case, relative_error
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.core.numerics import log1mexp, tail_log_mass
from stillroom.core.types import SampledSignal, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head.loss import SampledTeacher, TopKTeacher, fused_head_loss, score_head
from stillroom.losses.head.rows import check_pair, keep_top_k

FORWARD_KL = divergences.make("forward_kl")
NUM_TOKENS = 13


def top_k(case: Case, k: int, temperature: float) -> TopKSignal:
    log_probs = torch.log_softmax(logits_of(case.teacher.hidden, case.teacher.head) / temperature, -1)
    ids = log_probs.topk(k).indices
    rest = log_probs.scatter(-1, ids, -math.inf)
    return TopKSignal(ids, log_probs.gather(-1, ids), torch.logsumexp(rest, -1), temperature)


@every_member
@given(seed=st.integers(0, 999), k=st.integers(1, NUM_TOKENS - 1), temperature=st.sampled_from([1.0, 2.0]))
def test_top_k_is_the_divergence_of_k_plus_one_outcomes(
    member: Divergence, seed: int, k: int, temperature: float
) -> None:
    case = make_case(seed, spread=0.7)
    signal, ours, exact = top_k(case, k, temperature), case.copy(), case.copy()
    scored = score_head(
        ours.view,
        signal,
        case.targets,
        kd_weight=1.0,
        ce_weight=0.0,
        divergence=member,
        temperature=temperature,
        chunk_tokens=3,
    )
    student = torch.log_softmax(logits_of(exact.hidden, exact.head) / temperature, -1)
    teacher = torch.log_softmax(logits_of(case.teacher.hidden, case.teacher.head) / temperature, -1)
    p, q = buckets(teacher.exp(), signal.ids), buckets(student.exp(), signal.ids)
    expected = divergences.on_logits(member, q.log(), p.log()).sum() * temperature**2
    torch.testing.assert_close(scored.loss, expected, rtol=1e-7, atol=1e-10)
    scored.loss.backward()
    expected.backward()
    torch.testing.assert_close(grads_of(ours), grads_of(exact), rtol=1e-6, atol=1e-9)


def test_stored_answers_that_lost_mass_to_rounding_still_have_the_gradient_of_their_loss() -> None:
    case = make_case(5, 4).copy()
    exact = top_k(case, 4, 2.0)
    signal = replace(exact, log_probs=exact.log_probs - 0.05)  # what a coarse store may do: the sum is below 1

    def loss(hidden: Tensor) -> Tensor:
        view = replace(case, hidden=hidden).view
        scored = score_head(
            view, signal, case.targets, kd_weight=1.0, ce_weight=0.0, divergence=FORWARD_KL, temperature=2.0
        )
        return scored.loss

    assert torch.autograd.gradcheck(loss, (case.hidden,))


@every_smooth_member
def test_gradcheck_of_top_k_with_cross_entropy(member: Divergence) -> None:
    case = make_case(3, 4, has_bias=True, softcap=3.0, padding=(2, 1)).copy()
    signal = top_k(case, 4, 2.0)
    assert case.head.bias is not None

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        view = replace(case, hidden=hidden, head=replace(case.head, weight=weight, bias=bias)).view
        return score_head(
            view, signal, case.targets, kd_weight=0.6, ce_weight=0.4, divergence=member, temperature=2.0, chunk_tokens=3
        ).loss

    assert torch.autograd.gradcheck(loss, (case.hidden, case.head.weight, case.head.bias))


@pytest.mark.parametrize("member", MEMBERS[:3], ids=repr)
def test_keeping_every_token_is_the_dense_divergence(member: Divergence) -> None:
    case = make_case(1)
    sparse, dense = case.copy(), case.copy()
    options = {"kd_weight": 1.0, "ce_weight": 0.5, "divergence": member, "temperature": 1.0}
    one = score_head(sparse.view, top_k(case, NUM_TOKENS, 1.0), case.targets, **options)
    other = score_head(dense.view, case.teacher, case.targets, **options)
    torch.testing.assert_close(one.loss, other.loss)
    one.loss.backward()
    other.loss.backward()
    torch.testing.assert_close(grads_of(sparse), grads_of(dense))


@given(seed=st.integers(0, 999), k=st.integers(1, NUM_TOKENS))
def test_top_k_bounds_the_full_divergence_from_below(seed: int, k: int) -> None:
    case = make_case(seed)
    options = {"kd_weight": 1.0, "ce_weight": 0.0, "divergence": FORWARD_KL, "temperature": 2.0}
    full = score_head(case.view, case.teacher, case.targets, **options).loss
    assert score_head(case.view, top_k(case, k, 2.0), case.targets, **options).loss <= full + 1e-9


@pytest.mark.parametrize("member", MEMBERS[:3], ids=repr)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_live_conversion_equals_the_stored_signal(member: Divergence, temperature: float) -> None:
    case = make_case(8)
    live, stored = case.copy(), case.copy()
    options = {"kd_weight": 1.0, "ce_weight": 0.5, "divergence": member, "temperature": temperature, "chunk_tokens": 3}
    one = score_head(live.view, case.teacher, case.targets, top_k=4, **options)
    other = score_head(stored.view, top_k(case, 4, temperature), case.targets, **options)
    torch.testing.assert_close(one.loss, other.loss)
    one.loss.backward()
    other.loss.backward()
    torch.testing.assert_close(grads_of(live), grads_of(stored))


def test_a_tail_far_below_rounding_is_exact_in_fp32() -> None:
    logits = torch.tensor([[0.0, -30.0, -31.0, -60.0]])
    signal = keep_top_k(logits, 1, torch.ones(1))
    expected = torch.logsumexp(logits.double()[:, 1:], -1) - torch.logsumexp(logits.double(), -1)
    torch.testing.assert_close(signal.tail_log_mass.double(), expected, rtol=1e-6, atol=0)


def test_log1mexp_is_accurate_at_both_ends() -> None:
    masses = torch.tensor([-1e-12, -1e-3, -0.5, -1.0, -20.0, -80.0], dtype=torch.float64)
    by_hand = [math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x)) for x in masses.tolist()]
    expected = torch.tensor(by_hand, dtype=torch.float64)
    torch.testing.assert_close(log1mexp(masses), expected, rtol=1e-12, atol=0)
    assert tail_log_mass(torch.tensor([[0.0]])) == -math.inf


@given(seed=st.integers(0, 999), temperature=st.sampled_from([1.0, 2.0]))
def test_the_whole_distribution_as_a_sample_is_forward_kl(seed: int, temperature: float) -> None:
    case = make_case(seed)
    log_probs = torch.log_softmax(logits_of(case.teacher.hidden, case.teacher.head) / temperature, -1)
    ids = torch.arange(NUM_TOKENS).expand(7, NUM_TOKENS)
    signal = SampledSignal(ids, log_probs.exp(), -(log_probs.exp() * log_probs).sum(-1), temperature)
    options = {
        "kd_weight": 1.0,
        "ce_weight": 0.5,
        "divergence": FORWARD_KL,
        "temperature": temperature,
        "chunk_tokens": 3,
    }
    sampled, dense = case.copy(), case.copy()
    one = score_head(sampled.view, signal, case.targets, **options)
    other = score_head(dense.view, case.teacher, case.targets, **options)
    torch.testing.assert_close(one.loss, other.loss)
    one.loss.backward()
    other.loss.backward()
    torch.testing.assert_close(grads_of(sampled), grads_of(dense))


def test_repeated_ids_of_a_sample_add_up() -> None:
    case = make_case(1, 2)
    entropy = torch.ones(2, dtype=torch.float64)
    twice = SampledTeacher(
        torch.tensor([[3, 3, 0], [1, 2, 2]]), torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.3, 0.2]]), entropy
    )
    once = SampledTeacher(torch.tensor([[3, 5], [1, 2]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]]), entropy)
    grads = []
    for teacher in (twice, once):
        hidden = case.hidden.clone().requires_grad_()
        out = fused_head_loss(hidden, case.head.weight, teacher, case.targets)
        out.loss.backward()
        grads.append((out.loss, hidden.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_the_mean_over_samples_is_the_full_gradient() -> None:
    case = make_case(4, 1, spread=0.5)
    log_probs = torch.log_softmax(logits_of(case.teacher.hidden, case.teacher.head), -1)
    draws = torch.multinomial(log_probs.exp()[0], 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    sampled, dense = case.copy(), case.copy()
    teacher = SampledSignal(draws[None], torch.full((1, 40_000), 1 / 40_000), entropy)
    options = {"kd_weight": 1.0, "ce_weight": 0.0, "divergence": FORWARD_KL}
    one = score_head(sampled.view, teacher, case.targets, **options)
    other = score_head(dense.view, case.teacher, case.targets, **options)
    one.loss.backward()
    other.loss.backward()
    assert abs(float((one.loss - other.loss).detach())) < 0.02
    assert relative_error(sampled.hidden.grad, dense.hidden.grad) < 0.05


@pytest.mark.parametrize("kind", ["top-k", "sampled"])
def test_a_bad_row_of_a_cache_falls_back_to_cross_entropy(kind: str) -> None:
    case = make_case(6, 4)
    if kind == "top-k":
        stored = top_k(case, 3, 1.0)
        stored.log_probs[2, 1] = math.nan
        signal: TopKSignal | SampledSignal = stored
    else:
        weights = torch.full((4, 2), 0.5, dtype=torch.float64)
        weights[2, 0] = math.inf
        signal = SampledSignal(torch.tensor([[0, 1]] * 4), weights, torch.ones(4, dtype=torch.float64))
    ours = case.copy()
    scored = score_head(ours.view, signal, case.targets, kd_weight=1.0, ce_weight=0.0, divergence=FORWARD_KL)
    scored.loss.backward()
    assert scored.loss.isfinite()
    assert scored.counters["bad_teacher_rows"] == 1
    assert scored.terms["kd"].count == 3
    labels_only = case.copy()
    score_head(labels_only.view, None, case.targets, kd_weight=0.0, ce_weight=1.0, divergence=None).loss.backward()
    assert ours.hidden.grad is not None
    assert labels_only.hidden.grad is not None
    torch.testing.assert_close(ours.hidden.grad[2], labels_only.hidden.grad[2])


def test_a_public_top_k_teacher_is_at_the_temperature_of_the_call() -> None:
    case = make_case(9)
    stored = top_k(case, 3, 2.0)
    teacher = TopKTeacher(stored.ids, stored.log_probs, stored.tail_log_mass)
    out = fused_head_loss(case.hidden, case.head.weight, teacher, case.targets, kd_weight=1.0, ce_weight=0.0)
    expected = score_head(
        case.view, stored, case.targets, kd_weight=1 / 7, ce_weight=0.0, divergence=FORWARD_KL, temperature=2.0
    )
    torch.testing.assert_close(out.loss, expected.loss)


def test_impossible_pairs_are_refused_with_advice() -> None:
    with refused(ConfigError, "", "reverse_kl") as error:
        check_pair("sampled", "reverse_kl", 1.0, 1.0)
    assert len(error.value.advice) >= 2
    with refused(ConfigError, "", "objectives.kd.temperature"):
        check_pair("top-k", "forward_kl", 2.0, 1.0)
    check_pair("top-k", "jsd", 1.0, 1.0)
    case = make_case()
    with refused(ConfigError, "", "objectives.kd.temperature"):
        score_head(
            case.view,
            top_k(case, 2, 1.0),
            case.targets,
            kd_weight=1.0,
            ce_weight=0.0,
            divergence=FORWARD_KL,
            temperature=2.0,
        )
