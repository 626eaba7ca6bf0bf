"""Half operands with FP32 results: the head's gradients are those of float64 to the rounding of one operand.

A CPU has no such product. Its half operands are upcast and multiplied in FP32, which gives the values of the card.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from half_cases import distance, exact, gradients, near_convergence
from head_cases import FORWARD_KL, Case, grads_of, make_case, reference_rows, run
from torch import Tensor

from stillroom.core.types import HeadWeights
from stillroom.losses.head import products
from stillroom.losses.head.products import HalfMultiplier, WideMultiplier, choose_multiplier

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as a card does."""
    monkeypatch.setattr(products, "multiplies_half", lambda device: True)


# -- the bar -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, -20.0, -100.0])
@pytest.mark.parametrize(("teacher_dtype", "bar"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_gradients_near_convergence_are_those_of_float64(
    teacher_dtype: torch.dtype, bar: float, mean: float, temperature: float
) -> None:
    case = near_convergence(mean, teacher_dtype, temperature)
    divergence, expected = exact(case, temperature)
    assert divergence == pytest.approx(1e-3, rel=0.4)
    for name, gradient in gradients(case, temperature=temperature).items():
        assert distance(gradient, expected[name]) < bar, name


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize(("teacher_dtype", "bar"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
def test_logits_rounded_to_half_miss_that_bar(
    teacher_dtype: torch.dtype, bar: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounded(self: HalfMultiplier, hidden: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(torch.mm(hidden.float(), weight.float().t()).to(hidden.dtype))

    monkeypatch.setattr(HalfMultiplier, "logits", rounded)
    case = near_convergence(-20.0, teacher_dtype, 1.0)
    _, expected = exact(case, 1.0)
    assert distance(gradients(case, temperature=1.0)["weight"], expected["weight"]) > 5 * bar


@pytest.mark.usefixtures("on_card")
def test_a_bf16_student_keeps_its_bar_too() -> None:
    case = near_convergence(-100.0, torch.bfloat16, 1.0)
    case = replace(case, hidden=case.hidden.detach().bfloat16().requires_grad_(),
                   head=replace(case.head, weight=case.head.weight.detach().bfloat16().requires_grad_()))  # fmt: skip
    goal = case.teacher.head.weight.double() + 0.05 * torch.randn(4096, 64, dtype=torch.float64)
    case = replace(case, teacher=replace(case.teacher, head=HeadWeights(goal.bfloat16())))
    _, expected = exact(case, 1.0)
    for name, gradient in gradients(case, temperature=1.0).items():
        assert distance(gradient, expected[name]) < 1e-2, name


# -- range -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [1e-18, 1e-12, 1e-4, 1.0, 1e8])
def test_gradients_of_any_size_keep_their_digits(dtype: torch.dtype, size: float) -> None:
    case = make_case(3, 24, 301, widths=(16, 16)).copy(dtype)
    wide = case.copy(torch.float64)
    kd, ce = reference_rows(wide, FORWARD_KL, 2.0)
    ((kd.sum() + ce.sum()) * size).backward()
    found = gradients(case, kd_weight=size, ce_weight=size, chunk_tokens=7)
    for name, gradient in found.items():
        assert distance(gradient, grads_of(wide)[name]) < 2.0 ** -(10 if dtype == torch.float16 else 7), name


@pytest.mark.usefixtures("on_card")
def test_rows_of_very_different_size_share_a_chunk() -> None:
    """The label of a row that weighs a hundred-millionth of its neighbour still gets that row's gradient."""
    num_rows, num_tokens, width = 6, 40, 16
    case = make_case(5, num_rows, num_tokens, widths=(width, width))
    weights = torch.tensor([1.0, 1e-6, 1.0, 1e-5, 1e2, 1.0])
    logits = torch.full((num_rows, num_tokens), 0.0, dtype=torch.float64)
    logits[:, 7] = -60.0  # hardly anybody says token 7 ...
    targets = torch.tensor([1, 7, 2, 3, 4, 5])  # ... and one row is asked for it
    hidden = torch.eye(num_rows, width, dtype=torch.float64) * 4
    weight = torch.zeros(num_tokens, width, dtype=torch.float64)
    weight[:, :num_rows] = logits.T / 4
    weight = weight + 0.1 * case.head.weight * (weight == 0)
    leaf = Case(hidden.half().requires_grad_(), HeadWeights(weight.half().requires_grad_()), case.teacher, targets)
    wide = leaf.copy(torch.float64)
    _, ce = reference_rows(wide, FORWARD_KL, 1.0)
    (ce * weights.double()).sum().backward()
    found = gradients(leaf, kd_weight=0.0, ce_weight=1.0, token_weights=weights, chunk_tokens=num_rows)
    expected = grads_of(wide)
    each_token = (found["weight"].double() - expected["weight"]).norm(dim=1) / expected["weight"].norm(dim=1)
    each_row = (found["hidden"].double() - expected["hidden"]).norm(dim=1) / expected["hidden"].norm(dim=1)
    assert each_token.max() < 2e-3
    assert each_row.max() < 2e-3


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_seen_and_leaves_the_others_alone(spoil: float) -> None:
    case = make_case(6, 6, 33, widths=(8, 8)).copy(torch.float16)
    sound = gradients(case, kd_weight=0.0, ce_weight=1.0)["hidden"]
    spoiled = case.hidden.detach().clone()
    spoiled[2, 0] = spoil
    found = gradients(replace(case, hidden=spoiled.requires_grad_()), kd_weight=0.0, ce_weight=1.0)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found["hidden"][others], sound[others])
    assert not found["hidden"][2].isfinite().any()
    assert not found["weight"].isfinite().all()


@pytest.mark.usefixtures("on_card")
def test_a_gradient_of_zeros_is_zero() -> None:
    case = make_case(6, 6, 33, widths=(8, 8)).copy(torch.float16)
    for gradient in gradients(case, kd_weight=0.0, ce_weight=1.0, token_weights=torch.zeros(6)).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert products.power_of_two(exponents).tolist() == [math.ldexp(1.0, int(e)) for e in exponents]


def test_the_exponent_of_a_row_is_that_of_its_largest_magnitude() -> None:
    rows = torch.tensor([[0.0, -0.0], [1.0, -3.9], [-0.25, 0.1], [65504.0, 1.0], [0.0, -1e-20]])
    expected = [-127, 1, -2, 15, math.frexp(1e-20)[1] - 1]
    assert products._exponents(rows).tolist() == expected
    assert products._exponents(torch.tensor([[math.nan, 1.0], [-math.inf, 1.0]])).tolist() == [128, 128]


# -- which products, and how -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cpu_multiplies_half_inputs_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight = torch.zeros(2, 3, dtype=dtype), torch.zeros(4, 3, dtype=dtype)
    assert isinstance(choose_multiplier(hidden, HeadWeights(weight), torch.float32), WideMultiplier)
    mixed = HeadWeights(weight.float(), product_dtype=dtype)
    assert isinstance(choose_multiplier(hidden.float(), mixed, torch.float32), WideMultiplier)


@pytest.mark.usefixtures("on_card")
def test_half_operands_are_for_half_inputs_and_mixed_modes() -> None:
    half, single = torch.zeros(4, 3, dtype=torch.float16), torch.zeros(4, 3)
    assert isinstance(choose_multiplier(half, HeadWeights(half), torch.float32), HalfMultiplier)
    assert isinstance(choose_multiplier(single, HeadWeights(single), torch.float32), WideMultiplier)
    assert isinstance(choose_multiplier(half, HeadWeights(single), torch.float32), WideMultiplier)
    mixed = HeadWeights(single, product_dtype=torch.float16)
    assert isinstance(choose_multiplier(single, mixed, torch.float32), HalfMultiplier)
    double = HeadWeights(single.double(), product_dtype=torch.float16)
    assert isinstance(choose_multiplier(single.double(), double, torch.float64), WideMultiplier)


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_mixed_mode_is_the_half_model_with_fp32_gradients(dtype: torch.dtype) -> None:
    half = make_case(8, 9, 50, widths=(8, 8)).copy(dtype)
    single = half.copy(torch.float32)
    mixed = replace(single, head=replace(single.head, product_dtype=dtype), teacher=half.teacher)
    assert torch.equal(run(mixed).loss, run(half).loss)
    for one, other in zip(gradients(mixed).values(), gradients(half).values(), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.usefixtures("on_card")
def test_operands_are_cast_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    cast = HalfMultiplier.operand

    def count(self: HalfMultiplier, tensor: Tensor) -> Tensor:
        asked.append(tuple(tensor.shape))
        return cast(self, tensor)

    monkeypatch.setattr(HalfMultiplier, "operand", count)
    run(make_case(8, 9, 50, widths=(8, 6)).copy(torch.float16), chunk_tokens=2).loss.backward()
    assert sorted(asked) == [(9, 6), (9, 8), (50, 6), (50, 8)]


@pytest.mark.usefixtures("on_card")
def test_every_product_of_a_card_has_half_operands_and_an_fp32_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two logits products a chunk, and two pulled back from it, each asked of torch with its FP32 result."""
    asked: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
    real = torch.mm

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        asked.append((left.dtype, right.dtype, out_dtype))
        return real(left.float(), right.float(), out=out)

    monkeypatch.setattr(products, "_has_wide_results", lambda device, dtype: True)
    monkeypatch.setattr(torch, "mm", mm)
    run(make_case(8, 9, 50, widths=(8, 6)).copy(torch.float16), chunk_tokens=5).loss.backward()
    assert asked == [(torch.float16, torch.float16, torch.float32)] * 8


@pytest.mark.usefixtures("on_card")
@pytest.mark.parametrize("dtype", HALVES)
def test_a_chunk_may_add_to_the_weight_gradient_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(8, 9, 50, widths=(8, 6)).copy(dtype)
    whole = gradients(case, chunk_tokens=4)["weight"]
    monkeypatch.setattr(products, "_SHARE_TOKENS", 17)
    torch.testing.assert_close(gradients(case, chunk_tokens=4)["weight"], whole, rtol=1e-5, atol=1e-7)
