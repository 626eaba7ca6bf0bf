"""Laws of what is learned on the student's own text: only what the teacher says, and a divergence in every form."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from divergence_cases import every_member

from stillroom.config import load_config
from stillroom.core.errors import ConfigError
from stillroom.core.types import ROLLOUTS, Batch, DenseSignal, HeadWeights, LossWeights, StudentView, TopKSignal
from stillroom.losses import divergences
from stillroom.losses.head.loss import score_head
from stillroom.losses.mix import Mix
from stillroom.teachers.rounds import union_answers

V, D = 40, 8


def view_of(num_rows: int, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> StudentView:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    return StudentView(hidden, HeadWeights(weight))


def teacher_of(view: StudentView, noise: float = 1.0) -> DenseSignal:
    generator = torch.Generator().manual_seed(9)
    hidden = view.hidden.detach()
    hidden = hidden + noise * torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
    return DenseSignal(hidden, HeadWeights(view.head.weight.detach()))


def batch_of(num_rows: int, *, is_own: bool) -> Batch:
    """A row of `num_rows` scored positions."""
    generator = torch.Generator().manual_seed(4)
    targets = torch.randint(V, (1, num_rows), generator=generator)
    ones = torch.ones_like(targets)
    return Batch(targets, ones, targets, ones, ("row",), sources=(ROLLOUTS,) if is_own else ("data",))


def student_tops(view: StudentView, count: int = 6) -> torch.Tensor:
    return (view.hidden @ view.head.weight.T).detach().topk(count).indices


# -- divergences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["dense", "top-k", "union"])
@every_member
def test_equal_models_have_no_loss_and_no_gradient(member: Any, form: str) -> None:
    view = view_of(5)
    signal: Any = teacher_of(view, noise=0.0)
    if form == "union":
        signal = union_answers(signal, student_tops(view), 4, 1.0)
    loss = score_head(
        view, signal, torch.zeros(5, dtype=torch.long), kd_weight=1.0, ce_weight=0.0, divergence=member,
        top_k=7 if form == "top-k" else 0, falls_back=False,
    ).loss  # fmt: skip
    gradients = torch.autograd.grad(loss, [view.hidden, view.head.weight])
    assert abs(float(loss.detach())) < 1e-5
    if member.name == "total_variation" and form != "dense":
        return  # a kink at 0: rounding decides its slope
    assert max(float(one.abs().max()) for one in gradients) < 1e-5


@every_member
def test_a_union_bounds_the_full_divergence_from_below(member: Any) -> None:
    """Data processing: exact tail, so never negative and never more than the whole. All tokens kept are the whole."""
    if isinstance(member, divergences.TokenWise | divergences.HeadAndTail | divergences.Interpolated):
        pytest.skip("weighs what it sees by what it sees: bounds nothing")
    if member.name == "alpha_beta":
        pytest.skip("no f-divergence: merging tokens may raise it")
    view = view_of(12)
    signal, labels = teacher_of(view), torch.zeros(12, dtype=torch.long)

    def value(of: Any) -> float:
        options = {"kd_weight": 1.0, "ce_weight": 0.0, "divergence": member}
        return float(score_head(view, of, labels, **options).terms["kd"].total)

    whole, own = value(signal), student_tops(view)
    some = [value(union_answers(signal, own[:, :size], 3, 1.0)) for size in (0, 3, 6)]
    assert some[0] > 0.0 and some == sorted(some) and some[-1] <= whole * (1 + 1e-5)
    assert value(union_answers(signal, own, V, 1.0)) == pytest.approx(whole, rel=1e-4)


def test_a_union_holds_both_models_tokens_once_and_the_exact_tail() -> None:
    view = view_of(6)
    signal, own = teacher_of(view), student_tops(view)
    kept = union_answers(signal, own, 5, 2.0)
    probs = torch.softmax((signal.hidden @ signal.head.weight.T).double() / 2.0, -1)
    for row in range(6):
        ids = kept.ids[row].tolist()
        assert len(set(ids)) == 11 and ids[:6] == own[row].tolist()
        assert set(probs[row].topk(5).indices.tolist()) <= set(ids), "the teacher's own top tokens are among them"
        assert kept.log_probs[row].exp().tolist() == pytest.approx(probs[row, ids].tolist(), rel=1e-4)
        assert float(kept.tail_log_mass[row].exp()) == pytest.approx(1 - float(probs[row, ids].sum()), rel=1e-4)


def test_the_students_tokens_bring_reverse_kl_closer_to_the_whole_gradient() -> None:
    view = view_of(64)
    signal, labels = teacher_of(view, noise=1.5), torch.zeros(64, dtype=torch.long)

    def gradient(of: Any) -> torch.Tensor:
        scored = score_head(view, of, labels, kd_weight=1.0, ce_weight=0.0, divergence=divergences.make("reverse_kl"))
        (found,) = torch.autograd.grad(scored.loss, [view.hidden])
        return found.flatten()

    whole, own = gradient(signal), student_tops(view, 4)
    cosines = [
        float(torch.cosine_similarity(gradient(union_answers(signal, own[:, :size], 8 - size, 1.0)), whole, dim=0))
        for size in (0, 4)
    ]
    assert cosines[1] > cosines[0]


# -- the sequence ----------------------------------------------------------------------------------------


def test_token_reverse_kl_on_own_text_is_the_sequence_reverse_kl() -> None:
    """Chain rule, by enumeration of V = 4, T = 3 in float64: the value, and the gradient with fixed prefixes.

    sum_y q(y) log q(y)/p(y) = E_{y ~ q} sum_t KL(q(.|y<t), p(.|y<t)). The gradient of the token terms alone is the
    part in which the distribution of prefixes is held fixed.
    """
    size, length = 4, 3
    generator = torch.Generator().manual_seed(0)
    prefixes = [prefix for steps in range(length) for prefix in itertools.product(range(size), repeat=steps)]
    place = {prefix: number for number, prefix in enumerate(prefixes)}
    student = torch.randn(len(prefixes), size, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(len(prefixes), size, generator=generator, dtype=torch.float64)
    own, other = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)

    def log_prob(of: torch.Tensor, answer: tuple[int, ...]) -> torch.Tensor:
        return sum((of[place[answer[:step]], token] for step, token in enumerate(answer)), torch.zeros(()))

    answers = list(itertools.product(range(size), repeat=length))
    sequence = sum(
        (log_prob(own, one).exp() * (log_prob(own, one) - log_prob(other, one)) for one in answers), torch.zeros(())
    )
    # How often each prefix is visited by answers that the student draws.
    visits = torch.stack([log_prob(own, prefix).exp() for prefix in prefixes]).detach()
    head = HeadWeights(torch.zeros(0, dtype=torch.float64), vocab_size=size)
    scored = score_head(
        StudentView(student, head), DenseSignal(teacher, head), torch.zeros(len(prefixes), dtype=torch.long),
        kd_weight=1.0, ce_weight=0.0, divergence=divergences.make("reverse_kl"), kd_token_weights=visits,
        falls_back=False,
    )  # fmt: skip
    assert scored.loss.dtype == torch.float64
    assert float(scored.loss.detach()) == pytest.approx(float(sequence.detach()), abs=1e-12)
    (found,) = torch.autograd.grad(scored.loss, [student])
    by_hand = (visits[:, None] * own.exp() * (own - other)).sum()
    (wanted,) = torch.autograd.grad(by_hand, [student])
    assert torch.allclose(found, wanted, atol=1e-12)


# -- only what the teacher says --------------------------------------------------------------------------


def scored(signal: Any, *, is_own: bool, ce: float = 0.3, **over: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    view, batch = view_of(5), batch_of(5, is_own=is_own)
    config = load_config(overrides={"objectives.kd.weight": 0.7, "objectives.ce.weight": ce, **over}).objectives
    weights = LossWeights("constant", {"kd": 0.7, "ce": ce})
    score = Mix(config).score(view, signal, batch, weights, {"kd": 5, "ce": 5})
    gradient = torch.autograd.grad(score.loss, [view.hidden, view.head.weight])
    return score.loss, torch.cat([one.flatten() for one in gradient]), score


def test_the_ce_weight_has_no_effect_on_rollouts() -> None:
    signal = teacher_of(view_of(5))
    found = [scored(signal, is_own=True, ce=ce)[:2] for ce in (0.0, 0.3, 3.0)]
    assert all(torch.equal(found[0][0], loss) and torch.equal(found[0][1], slope) for loss, slope in found[1:])
    plain = [scored(signal, is_own=False, ce=ce)[0] for ce in (0.0, 0.3)]
    assert plain[0] != plain[1], "on the data it has one"
    score = scored(signal, is_own=True)[2]
    assert set(score.terms) == {"kd"} and "label_loss" not in score.counters


@pytest.mark.parametrize("kernel", ["plain", "auto"])
@pytest.mark.parametrize("form", ["dense", "top-k", "union"])
def test_a_bad_row_of_the_teacher_moves_nothing_on_rollouts(form: str, kernel: str) -> None:
    view = view_of(5)
    signal: Any = teacher_of(view)
    bad = replace(signal, hidden=signal.hidden.clone())
    bad.hidden[2] = float("nan")
    if form == "union":
        signal, bad = (union_answers(one, student_tops(view), 4, 1.0) for one in (signal, bad))
    over = {"objectives.kd.top_k": 6 if form == "top-k" else 0, "objectives.kernel": kernel}
    loss, slope, score = scored(bad, is_own=True, **over)
    assert torch.isfinite(loss) and torch.isfinite(slope).all()
    assert int(score.counters["bad_teacher_rows"]) == 1 and "fallback_loss" not in score.counters
    assert float(slope[: 5 * D].reshape(5, D)[2].abs().max()) == 0.0, "the row itself is not moved"
    fallen = scored(bad, is_own=False, **over)
    assert float(fallen[1][: 5 * D].reshape(5, D)[2].abs().max()) > 0.0, "on the data its label teaches"
    # All other rows are taught as if it were not there.
    kept = [0, 1, 3, 4]
    sound = scored(signal, is_own=True, **over)[1][: 5 * D].reshape(5, D)
    assert torch.equal(slope[: 5 * D].reshape(5, D)[kept], sound[kept])


def test_without_a_teacher_rollouts_weigh_nothing() -> None:
    """A suspended teacher: the data is learned from its labels, the student's own text not at all."""
    loss, slope, _score = scored(None, is_own=True)
    assert loss == 0.0 and slope.abs().max() == 0.0
    assert scored(None, is_own=False)[0] > 0.0


def test_rows_without_labels_have_no_cross_entropy() -> None:
    view = view_of(3)
    with pytest.raises(ConfigError):
        score_head(
            view, teacher_of(view), torch.zeros(3, dtype=torch.long), kd_weight=1.0, ce_weight=0.5,
            divergence=divergences.make("forward_kl"), falls_back=False,
        )  # fmt: skip


def test_a_union_serves_as_a_top_k_answer() -> None:
    view = view_of(3)
    assert isinstance(union_answers(teacher_of(view), student_tops(view), 4, 1.0), TopKSignal)
