"""Laws of the fused head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from divergence_cases import MEMBERS, SMOOTH, every_member, every_smooth_member
from head_cases import Case, grads_of, make_case, reference_rows, relative_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from stillroom.core.errors import ConfigError
from stillroom.core.types import HeadWeights
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence
from stillroom.losses.head import products
from stillroom.losses.head.loss import DenseTeacher, fused_head_loss, score_head

FORWARD_KL = divergences.make("forward_kl")
HEADS: dict[str, dict[str, Any]] = {
    "bare": {},
    "bias": {"has_bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "padded": {"padding": (3, 6)},
    "all": {"has_bias": True, "scale": 0.5, "softcap": 2.0, "padding": (5, 0)},
}


# Each divergence under the head that has everything, each head under one divergence. Every pair of them is compared
# with autograd of the textbook below.
@pytest.mark.parametrize(("member", "head"), [*((one, "all") for one in SMOOTH), *((FORWARD_KL, one) for one in HEADS)])
def test_gradcheck_in_float64(member: Divergence, head: str) -> None:
    case = make_case(num_rows=5, num_tokens=7, spread=0.7, **HEADS[head]).copy(trains_teacher=True)
    leaves = case.leaves()

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(leaves, tensors, strict=True))
        moved = Case(
            named["hidden"],
            replace(case.head, weight=named["weight"], bias=named.get("bias")),
            replace(case.teacher, hidden=named["teacher"]),
            case.targets,
        )
        result: torch.Tensor = run(moved, member, chunk_tokens=2).loss
        return result

    assert torch.autograd.gradcheck(loss, tuple(leaves.values()))


@every_member
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_fp32_equals_float64_autograd(member: Divergence, head: dict[str, Any]) -> None:
    case = make_case(3, 33, 101, widths=(16, 24), spread=0.6, dtype=torch.float32, **head)
    ours, exact = case.copy(trains_teacher=True), case.copy(torch.float64, trains_teacher=True)
    scored = run(ours, member, chunk_tokens=10)
    scored.loss.backward()
    kd, ce = reference_rows(exact, member, 2.0)
    expected = 0.7 * kd.sum() + 0.3 * ce.sum()
    expected.backward()
    assert scored.loss.dtype == torch.float32
    assert relative_error(scored.loss, expected) < 1e-6
    # A small divergence is what is left of large terms of both signs: its value keeps fewer digits than its slope.
    assert relative_error(scored.terms["kd"].total, kd.sum()) < 2e-5
    assert relative_error(scored.terms["ce"].total, ce.sum()) < 1e-6
    for name, gradient in grads_of(exact).items():
        assert relative_error(grads_of(ours)[name], gradient) < 1e-6 * (10 if member.name == "jsd" else 2), name


@given(seed=st.integers(0, 999), chunk=st.integers(1, 40), num_rows=st.integers(1, 19))
def test_chunk_size_does_not_matter(seed: int, chunk: int, num_rows: int) -> None:
    case = make_case(seed, num_rows)
    whole, parts = case.copy(trains_teacher=True), case.copy(trains_teacher=True)
    one, many = run(whole, chunk_tokens=1000), run(parts, chunk_tokens=chunk)
    one.loss.backward()
    many.loss.backward()
    torch.testing.assert_close(one.loss, many.loss)
    torch.testing.assert_close(grads_of(whole), grads_of(parts))


@given(seed=st.integers(0, 999))
def test_unscored_rows_do_not_matter(seed: int) -> None:
    case = make_case(seed, 9)
    is_scored = torch.rand(9, generator=torch.Generator().manual_seed(seed)) < 0.6
    labels = torch.where(is_scored, case.targets, torch.full_like(case.targets, -100))
    spoiled = torch.where(is_scored[:, None], case.hidden, torch.full_like(case.hidden, math.nan))
    some = spoiled.clone().requires_grad_()
    masked = fused_head_loss(
        some, case.head.weight, DenseTeacher(case.teacher.hidden, case.teacher.head.weight), labels
    )
    masked.loss.backward()
    kept = case.hidden[is_scored].clone().requires_grad_()
    short = fused_head_loss(
        kept,
        case.head.weight,
        DenseTeacher(case.teacher.hidden[is_scored], case.teacher.head.weight),
        labels[is_scored],
    )
    short.loss.backward()
    torch.testing.assert_close(masked.loss, short.loss)
    assert some.grad is not None
    assert kept.grad is not None
    torch.testing.assert_close(some.grad[is_scored], kept.grad)
    assert (some.grad[~is_scored] == 0).all()
    assert int(masked.terms["kd"].count) == int(is_scored.sum())


def test_loss_is_the_mean_over_scored_tokens_of_the_weighted_sum() -> None:
    case = make_case(1, 8)
    labels = case.targets.clone()
    labels[[2, 5]] = -100
    out = fused_head_loss(
        case.hidden,
        case.head.weight,
        DenseTeacher(case.teacher.hidden, case.teacher.head.weight),
        labels,
        kd_weight=0.25,
        ce_weight=0.75,
        temperature=3.0,
    )
    kd, ce = reference_rows(case, FORWARD_KL, 3.0)
    is_scored = labels != -100
    torch.testing.assert_close(out.terms["kd"].total, kd[is_scored].sum())
    torch.testing.assert_close(out.terms["ce"].total, ce[is_scored].sum())
    torch.testing.assert_close(out.loss, (0.25 * kd + 0.75 * ce)[is_scored].mean())
    assert out.terms["kd"].count == 6


def test_nothing_scored_gives_zero_loss_and_zero_gradients() -> None:
    case = make_case(0, 4).copy(torch.float32)
    labels = torch.full((4,), -100)
    out = fused_head_loss(
        case.hidden, case.head.weight, DenseTeacher(case.teacher.hidden.detach(), case.teacher.head.weight), labels
    )
    out.loss.backward()
    assert out.loss == 0
    assert out.terms["kd"].count == 0
    assert out.terms["ce"].count == 0
    assert case.head.weight.grad is not None
    assert (case.head.weight.grad == 0).all()
    assert case.hidden.grad is not None
    assert (case.hidden.grad == 0).all()


class _Untouchable:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"touched: {name}")


def test_a_term_of_weight_zero_is_not_computed() -> None:
    case = make_case()
    scored = score_head(
        case.view,
        _Untouchable(),
        case.targets,
        kd_weight=0.0,
        ce_weight=1.0,
        divergence=FORWARD_KL,  # type: ignore[arg-type]
    )
    assert set(scored.terms) == {"ce"}
    only_kd = run(case, ce_weight=0.0)
    assert set(only_kd.terms) == {"kd"}


def test_without_grad_no_gradient_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case().copy(torch.float32)
    trained = run(case)
    monkeypatch.setattr("stillroom.losses.head.products.Products.pull_back", lambda *_: pytest.fail("worked in vain"))
    with torch.no_grad():
        scored = run(case)
    assert not scored.loss.requires_grad
    assert torch.equal(scored.loss, trained.loss.detach())


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_bad_teacher_row_falls_back_to_cross_entropy(spoil: float, softcap: float | None) -> None:
    case = make_case(2, 6, softcap=softcap, has_bias=True)
    broken = case.teacher.hidden.clone()
    broken[[1, 4]] = math.nan if softcap else spoil
    ours = replace(case, teacher=replace(case.teacher, hidden=broken)).copy(trains_teacher=True)
    exact = case.copy(trains_teacher=True)
    scored = run(ours)
    kd, ce = reference_rows(exact, FORWARD_KL, 2.0)
    is_bad = torch.tensor([False, True, False, False, True, False])
    expected = torch.where(is_bad, (0.7 + 0.3) * ce, 0.7 * kd + 0.3 * ce).sum()
    torch.testing.assert_close(scored.loss, expected)
    assert scored.counters["bad_teacher_rows"] == 2
    assert scored.terms["kd"].count == 4
    torch.testing.assert_close(scored.terms["kd"].total, kd[~is_bad].sum())
    scored.loss.backward()
    expected.backward()
    torch.testing.assert_close(grads_of(ours), grads_of(exact))


def test_bad_rows_are_taught_by_labels_even_without_a_ce_term() -> None:
    case = make_case(2, 3)
    case.teacher.hidden[1] = math.nan
    ours = case.copy()
    run(ours, ce_weight=0.0).loss.backward()
    assert ours.hidden.grad is not None
    assert ours.hidden.grad.isfinite().all()
    assert ours.hidden.grad[1].abs().sum() > 0


@every_member
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_with_logits_near_the_limit_of_fp16(member: Divergence, dtype: torch.dtype) -> None:
    case = make_case(5, 6, 17, widths=(8, 8))
    grown = replace(case, hidden=case.hidden * 40, teacher=replace(case.teacher, hidden=case.teacher.hidden * 40))
    stretch = 6e4 / float((grown.hidden @ grown.head.weight.T).abs().max())
    grown = replace(grown, head=replace(grown.head, weight=grown.head.weight * stretch)).copy(dtype)
    exact = grown.copy(torch.float64)
    scored = run(grown, member, temperature=1.0)
    kd, ce = reference_rows(exact, member, 1.0)
    (0.7 * kd.sum() + 0.3 * ce.sum()).backward()
    (scored.loss * 2.0**-20).backward()  # keeps FP16 gradients of a sum of such rows in range
    assert scored.loss.dtype == torch.float32
    assert scored.loss.isfinite()
    assert relative_error(scored.loss, 0.7 * kd.sum() + 0.3 * ce.sum()) < 1e-3
    for name, gradient in grads_of(exact).items():
        assert relative_error(grads_of(grown)[name].double() * 2.0**20, gradient) < 1e-2, name


def test_the_loss_scale_reaches_fp16_gradients_before_the_cast() -> None:
    case = make_case(7, 6).copy(torch.float16)
    tiny = run(case, kd_weight=1e-9, ce_weight=1e-9)
    (tiny.loss * 2.0**24).backward()
    assert case.hidden.grad is not None
    assert (case.hidden.grad != 0).float().mean() > 0.9


@pytest.mark.parametrize("member", MEMBERS[:3], ids=repr)
def test_impossible_tokens_equal_a_smaller_vocabulary(member: Divergence) -> None:
    case = make_case(4, 6, has_bias=True)
    assert case.teacher.head.bias is not None
    assert case.head.bias is not None
    minus = torch.full((4,), -math.inf, dtype=torch.float64)
    longer = Case(
        case.hidden,
        HeadWeights(
            torch.cat((case.head.weight, torch.ones(4, 4, dtype=torch.float64))), torch.cat((case.head.bias, minus))
        ),
        replace(
            case.teacher,
            head=HeadWeights(
                torch.cat((case.teacher.head.weight, torch.ones(4, 5, dtype=torch.float64))),
                torch.cat((case.teacher.head.bias, minus)),
            ),
        ),
        case.targets,
    )
    short, long = case.copy(), longer.copy()
    one, other = run(short, member), run(long, member)
    torch.testing.assert_close(one.loss, other.loss)
    one.loss.backward()
    other.loss.backward()
    torch.testing.assert_close(short.hidden.grad, long.hidden.grad)


@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_each_token_may_have_its_own_weight_and_temperature(seed: int) -> None:
    case = make_case(seed, 6)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(6, generator=generator, dtype=torch.float64)
    temperatures = 0.5 + 3 * torch.rand(6, generator=generator, dtype=torch.float64)
    ours, exact = case.copy(), case.copy()
    scored = run(ours, token_weights=weights, token_temperature=temperatures)
    kd, ce = reference_rows(exact, FORWARD_KL, temperatures)
    expected = (weights * (0.7 * kd + 0.3 * ce)).sum()
    torch.testing.assert_close(scored.loss, expected)
    scored.loss.backward()
    expected.backward()
    torch.testing.assert_close(grads_of(ours), grads_of(exact))


def test_a_teacher_may_be_trained_against_a_frozen_student() -> None:
    case = make_case(3, dtype=torch.float32).copy(trains_teacher=True)
    frozen = replace(case, hidden=case.hidden.detach(), head=replace(case.head, weight=case.head.weight.detach()))
    run(case).loss.backward()
    expected = grads_of(case)["teacher"]
    case.teacher.hidden.grad = None
    run(frozen).loss.backward()
    assert torch.equal(grads_of(case)["teacher"], expected)


def test_weights_may_live_on_the_device() -> None:
    case = make_case()
    on_device = run(case, kd_weight=torch.tensor(0.7), ce_weight=torch.tensor(0.3))
    torch.testing.assert_close(on_device.loss, run(case).loss, rtol=1e-6, atol=0)


def test_backward_twice_gives_the_same_gradient() -> None:
    case = make_case().copy()
    loss = run(case).loss
    first = torch.autograd.grad(loss, case.hidden, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(loss * 1.0, case.hidden)[0], first)


def test_autocast_around_the_head_does_not_lower_it() -> None:
    case = make_case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = run(case).loss
    assert torch.equal(inside, run(case).loss)


@every_smooth_member
def test_gradcheck_with_a_teacher_that_is_not_trained(member: Divergence) -> None:
    case = make_case(num_rows=5, num_tokens=7, spread=0.7).copy()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        moved = replace(case, hidden=hidden, head=replace(case.head, weight=weight))
        result: torch.Tensor = run(moved, member, chunk_tokens=2).loss
        return result

    assert torch.autograd.gradcheck(loss, (case.hidden, case.head.weight))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_temperature_is_refused_with_advice(temperature: float) -> None:
    with refused(ConfigError, "temperature") as error:
        run(make_case(), temperature=temperature)
    assert error.value.advice


def test_vocabularies_of_different_size_are_refused_with_advice() -> None:
    case = make_case()
    with refused(ConfigError, "teacher.weight, student_weight", "13", "12") as error:
        run(replace(case, head=replace(case.head, vocab_size=12)))
    assert error.value.advice


@every_member
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_frozen_head_gets_no_gradient_and_hidden_states_keep_theirs(
    member: Divergence, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under an adapter the head is frozen: the product for its weight is not made, and nothing else changes."""
    case = make_case(3, 33, 101, widths=(16, 24), spread=0.6, dtype=torch.float32, **head)
    ours, exact = case.copy(), case.copy(torch.float64)
    bias = ours.head.bias
    frozen = replace(ours.head, weight=ours.head.weight.detach(), bias=None if bias is None else bias.detach())
    ours = replace(ours, head=frozen)
    monkeypatch.setattr(products.WideMultiplier, "to_weight", None)  # an attempt to call it raises
    run(ours, member, chunk_tokens=10).loss.backward()
    kd, ce = reference_rows(exact, member, 2.0)
    (0.7 * kd.sum() + 0.3 * ce.sum()).backward()
    assert ours.head.weight.grad is None
    bound = 1e-6 * (10 if member.name == "jsd" else 2)
    assert relative_error(grads_of(ours)["hidden"], grads_of(exact)["hidden"]) < bound
