"""Laws of what a teacher's distribution is reduced to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stillroom.core.types import DenseSignal, HeadWeights, SampledSignal, StudentView, TopKSignal
from stillroom.losses.divergences import make
from stillroom.losses.head.loss import score_head
from stillroom.teachers.signals import NOTHING, RowAnswer, SignalSpec, reduce_row, signal_of

V, D, N = 150, 12, 40
KINDS = {
    "top_k": SignalSpec("top_k", 10, 0),
    "sampled": SignalSpec("sampled", 0, 20),
    "hybrid": SignalSpec("hybrid", 6, 10),
    "renormalised": SignalSpec("renormalised", 10, 0),
}


def world(seed: int = 0) -> tuple[torch.Tensor, HeadWeights, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator)
    head = HeadWeights(torch.randn(V, D, generator=generator) * 0.8)
    return hidden, head, torch.randint(0, V, (N,), generator=generator)


def probs_of(hidden: torch.Tensor, head: HeadWeights, temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(hidden.double() @ head.weight.double().T / temperature, dim=-1)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_every_signal_sums_to_one(kind: str, temperature: float) -> None:
    spec = SignalSpec(KINDS[kind].kind, KINDS[kind].exact, KINDS[kind].draws, temperature)
    signal = signal_of(reduce_row(*world(), spec, "row"), spec)
    if isinstance(signal, SampledSignal):
        total = signal.weights.double().sum(-1)
    else:
        total = signal.log_probs.double().exp().sum(-1) + signal.tail_log_mass.double().exp()
    assert signal.temperature == temperature
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_likeliest_tokens_entropy_tail_and_label_are_those_of_the_distribution(temperature: float) -> None:
    hidden, head, targets = world()
    spec = SignalSpec("hybrid", 6, 10, temperature)
    answer = reduce_row(hidden, head, targets, spec, "row")
    p = probs_of(hidden, head, temperature)
    top = p.topk(6, dim=-1)
    assert np.array_equal(answer.ids, top.indices.numpy())
    assert np.allclose(answer.log_probs / 256.0, -top.values.log().numpy(), atol=1 / 512 + 1e-5)
    assert np.allclose(answer.tail / 256.0, -(1 - top.values.sum(-1)).log().numpy(), atol=1 / 512 + 1e-5)
    assert np.allclose(answer.entropy / 2048.0, -(p * p.log()).sum(-1).numpy(), atol=1 / 4096 + 1e-5)
    label = probs_of(hidden, head).gather(-1, targets[:, None]).squeeze(-1).log()
    assert np.allclose(answer.label_log_probs, label.numpy(), atol=1 / 512 + 1e-5)


@pytest.mark.parametrize("kind", ["sampled", "hybrid"])
def test_draws_are_unbiased_and_never_among_the_exact_ones(kind: str) -> None:
    """The mean over many keys is the teacher: what makes forward KL from samples right on average."""
    hidden, head, targets = world(3)
    spec, total, num_keys = KINDS[kind], torch.zeros(N, V, dtype=torch.float64), 400
    for number in range(num_keys):
        answer = reduce_row(hidden, head, targets, spec, f"row {number}")
        assert not any(set(drawn) & set(exact) for drawn, exact in zip(answer.drawn, answer.ids, strict=True))
        signal = signal_of(answer, spec)
        assert isinstance(signal, SampledSignal)
        total.scatter_add_(-1, signal.ids, signal.weights.double())
    p = probs_of(hidden, head)
    deviation = (total / num_keys - p).abs()
    bound = 5 * (p * (1 - p) / (num_keys * spec.draws)).sqrt() + 0.004 * p + 1e-4
    assert (deviation < bound).all()


def test_a_hybrid_varies_less_than_draws_alone_at_equal_size() -> None:
    hidden, head, targets = world(5)
    p = probs_of(hidden, head)
    spread = {}
    for spec in (SignalSpec("sampled", 0, 16), SignalSpec("hybrid", 6, 10)):
        squares = 0.0
        for number in range(60):
            signal = signal_of(reduce_row(hidden, head, targets, spec, f"{number}"), spec)
            assert isinstance(signal, SampledSignal)
            estimate = torch.zeros(N, V, dtype=torch.float64).scatter_add_(-1, signal.ids, signal.weights.double())
            squares += float((estimate - p).square().sum())
        spread[spec.kind] = squares
    assert spread["hybrid"] < 0.5 * spread["sampled"]


def test_draws_follow_the_content_of_the_row_and_the_seed_and_nothing_else() -> None:
    hidden, head, targets = world()
    spec = KINDS["hybrid"]
    first = reduce_row(hidden, head, targets, spec, "a")
    assert np.array_equal(first.drawn, reduce_row(hidden, head, targets, spec, "a").drawn)
    assert not np.array_equal(first.drawn, reduce_row(hidden, head, targets, spec, "b").drawn)
    other = SignalSpec("hybrid", spec.exact, spec.draws, 1.0, seed=1)
    assert not np.array_equal(first.drawn, reduce_row(hidden, head, targets, other, "a").drawn)


@pytest.mark.parametrize("kind", ["sampled", "hybrid", "top_k"])
def test_the_logged_value_is_a_true_kl_estimate(kind: str) -> None:
    """Averaged over keys, kd from a sparse signal is the KL of the whole distributions; from top-k a bound below it."""
    hidden, head, targets = world(1)
    generator = torch.Generator().manual_seed(9)
    view = StudentView(hidden + 0.3 * torch.randn(N, D, generator=generator), head)

    def kd(signal: DenseSignal | TopKSignal | SampledSignal) -> float:
        found = score_head(view, signal, targets, kd_weight=1.0, ce_weight=0.0, divergence=make("forward_kl", {}))
        return float(found.terms["kd"].mean)

    spec = KINDS[kind]
    values = [kd(signal_of(reduce_row(hidden, head, targets, spec, f"{key}"), spec)) for key in range(60)]
    whole = kd(DenseSignal(hidden, head))
    if kind == "top_k":
        assert 0 < values[0] < whole and len(set(values)) == 1
    else:
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - whole) < 4 * error + 0.005


@pytest.mark.parametrize("kind", ["sampled", "hybrid"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_gradient_from_draws_is_that_of_the_whole_distribution_on_average(kind: str, temperature: float) -> None:
    hidden, head, targets = world(4)
    generator = torch.Generator().manual_seed(3)
    student = hidden + 0.3 * torch.randn(N, D, generator=generator)
    spec = SignalSpec(KINDS[kind].kind, KINDS[kind].exact, KINDS[kind].draws, temperature)

    def gradient(signal: DenseSignal | TopKSignal | SampledSignal) -> torch.Tensor:
        states = student.clone().requires_grad_()
        score_head(
            StudentView(states, head), signal, targets, kd_weight=1.0, ce_weight=0.0,
            divergence=make("forward_kl", {}), temperature=temperature,
        ).loss.backward()  # fmt: skip
        assert states.grad is not None
        return states.grad

    def angle(one: torch.Tensor, other: torch.Tensor) -> float:
        return math.degrees(math.acos(torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).clamp(-1, 1)))

    whole = gradient(DenseSignal(hidden, head))
    each = [gradient(signal_of(reduce_row(hidden, head, targets, spec, f"{key}"), spec)) for key in range(100)]
    mean = torch.stack(each).mean(0)
    assert angle(mean, whole) < 0.3 * angle(each[0], whole) and angle(mean, whole) < 12
    assert float(mean.norm() / whole.norm()) == pytest.approx(1.0, abs=0.05)


def test_a_row_that_is_no_distribution_stays_none() -> None:
    hidden, head, targets = world()
    hidden[3] = float("nan")
    for spec in KINDS.values():
        answer = reduce_row(hidden, head, targets, spec, "row")
        assert (answer.entropy == NOTHING).nonzero()[0].tolist() == [3]
        view = StudentView(world()[0], head)
        found = score_head(
            view, signal_of(answer, spec), targets, kd_weight=1.0, ce_weight=0.0, divergence=make("forward_kl", {})
        )
        assert int(found.counters["bad_teacher_rows"]) == 1 and math.isfinite(float(found.loss))


def test_more_tokens_than_there_are_leave_no_tail_and_draws_without_weight() -> None:
    hidden, _head, _targets = world()
    head, targets = HeadWeights(torch.randn(5, D)), torch.zeros(N, dtype=torch.long)
    spec = SignalSpec("hybrid", 9, 4)
    signal = signal_of(reduce_row(hidden, head, targets, spec, "row"), spec.within(5))
    assert isinstance(signal, SampledSignal) and signal.ids.shape == (N, 9)
    assert (signal.weights[:, 5:] == 0).all() and torch.allclose(signal.weights.sum(-1), torch.ones(N))


def test_impossible_tokens_are_never_drawn_and_have_a_code_of_their_own() -> None:
    hidden, head, targets = world()
    bias = torch.zeros(V)
    bias[5:] = -math.inf
    answer = reduce_row(hidden, HeadWeights(head.weight, bias), targets % 5, SignalSpec("hybrid", 3, 20), "row")
    assert answer.drawn.max() < 5
    full = reduce_row(hidden, HeadWeights(head.weight, bias), targets % 5, SignalSpec("top_k", 8, 0), "row")
    assert (full.log_probs[:, 5:] == NOTHING).all() and (full.tail == NOTHING).all()


def test_rows_join_in_order() -> None:
    hidden, head, targets = world()
    spec = KINDS["hybrid"]
    parts = [reduce_row(hidden[part], head, targets[part], spec, "x") for part in (slice(0, 7), slice(7, N))]
    whole = signal_of(RowAnswer.join(parts), spec)
    each = [signal_of(part, spec) for part in parts]
    assert torch.equal(whole.ids, torch.cat([one.ids for one in each]))
