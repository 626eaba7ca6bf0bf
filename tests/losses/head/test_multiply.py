"""Half operands with FP32 results: the head's gradients are those of float64 to the rounding of one operand.

torch has no such product on a CPU. There half operands are upcast and multiplied in FP32, which gives the values of the
card, and where the CPU has BF16 units a kernel of ours multiplies BF16 parts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from half_cases import distance, exact, gradients, near_convergence, with_fp32_digits
from head_cases import FORWARD_KL, Case, grads_of, make_case, reference_rows, run
from torch import Tensor

from stillroom.core.types import HeadWeights
from stillroom.losses.head import products
from stillroom.losses.head.kernel import Bf16Products, bf16_products
from stillroom.losses.head.products import HalfMultiplier, SplitMultiplier, WideMultiplier, choose_multiplier
from stillroom.losses.head.rows import GradientRows
from stillroom.models.anatomy import head_logits

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


@pytest.mark.usefixtures("on_card")
def test_one_power_is_taken_back_by_the_products_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device adds to an FP32 matrix in place, the power is a factor of the product."""
    generator = torch.Generator().manual_seed(0)
    values, weight, hidden = (torch.randn(shape, generator=generator).half() for shape in ((6, 50), (50, 8), (6, 8)))
    rows = GradientRows(values, lost=torch.randn(6, generator=generator), lift=9)
    asked: list[tuple[float, float]] = []

    def addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float, **options: Any) -> Tensor:
        asked.append((beta, alpha))
        kept = added.clone() if beta else 0.0  # without beta nothing is read: it may be NaN
        out: Tensor = options["out"]
        return out.copy_(kept + alpha * (left.float() @ right.float()))

    def pulled() -> tuple[Tensor, Tensor]:
        made, to_hidden, to_weight = (
            HalfMultiplier(torch.float16),
            torch.full((6, 8), math.nan),
            torch.full((50, 8), math.nan),
        )
        made.to_hidden(rows, weight, to_hidden)
        for adds in (False, True):
            made.to_weight(rows, hidden, to_weight, adds=adds)
        return to_hidden, to_weight

    plain = pulled()
    monkeypatch.setattr(products, "_has_wide_sums", lambda device, dtype: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    for one, other in zip(pulled(), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert asked == [(0, 2.0**-9), (0, 2.0**-9), (1, 2.0**-9)]


@pytest.mark.usefixtures("on_card")
def test_some_rows_of_the_weight_say_what_all_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    case = near_convergence(-100.0, torch.float16, 1.0)
    _, expected = exact(case, 1.0)
    errors = []
    for num_rows in (4096, 64):
        monkeypatch.setattr(products, "_MEAN_ROWS", num_rows)
        errors.append(distance(gradients(case, temperature=1.0)["hidden"], expected["hidden"]))
    monkeypatch.setattr(HalfMultiplier, "gradient", _without_sums)
    without = distance(gradients(case, temperature=1.0)["hidden"], expected["hidden"])
    assert errors[1] < 1.1 * errors[0] < 0.4 * without


def _without_sums(self: HalfMultiplier, gradient: Tensor) -> GradientRows:
    lifts = products.lifts_of(gradient)
    return GradientRows((gradient * products.power_of_two(lifts)[:, None]).half(), lifts)


# -- BF16 parts on a CPU that has the units ----------------------------------------------------------------


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Bf16Products:
    """The compiled products, for heads of any size."""
    made = bf16_products()
    if made is None:
        pytest.skip("this CPU has no BF16 units, or there is no C++ compiler")
    monkeypatch.setattr(products, "LEAST_BF16_WEIGHTS", 0)
    return made


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, -20.0, -100.0])
@pytest.mark.parametrize("teacher_dtype", [torch.float32, torch.bfloat16])
def test_gradients_from_bf16_parts_are_those_of_float64(
    teacher_dtype: torch.dtype, mean: float, temperature: float
) -> None:
    case = with_fp32_digits(near_convergence(mean, teacher_dtype, temperature), torch.bfloat16)
    divergence, expected = exact(case, temperature)
    if teacher_dtype == torch.float32:
        assert divergence == pytest.approx(1e-3, rel=0.4)
    for name, gradient in gradients(case, temperature=temperature).items():
        assert distance(gradient, expected[name]) < 5e-3, name


@pytest.mark.usefixtures("units")
def test_operands_rounded_once_miss_that_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PARTS", 1)
    case = with_fp32_digits(near_convergence(0.0, torch.float32, 1.0), torch.bfloat16)
    _, expected = exact(case, 1.0)
    assert distance(gradients(case, temperature=1.0)["weight"], expected["weight"]) > 5e-2


def _parts(tensor: Tensor, count: int) -> list[Tensor]:
    """The rounded value and, of two, the rounded rest, in float64."""
    high = tensor.bfloat16()
    return [high.double(), (tensor.float() - high.float()).bfloat16().double()][:count]


@pytest.mark.parametrize(("num_rows", "num_tokens", "width"), [(1, 1, 1), (7, 33, 101), (13, 1000, 48), (530, 777, 65)])
@pytest.mark.parametrize("parts", [1, 2])
def test_compiled_products_are_those_of_the_parts(
    units: Bf16Products, num_rows: int, num_tokens: int, width: int, parts: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_rows, width + 3, generator=generator)[:, :width]  # rows have a stride
    weight = torch.randn(num_tokens, width, generator=generator)
    room = torch.full((num_rows, num_tokens + 5), math.pi)
    units.logits(hidden, weight, room[:, :num_tokens], parts=parts)
    high_hidden, high_weight = _parts(hidden, 1)[0], _parts(weight, 1)[0]
    expected = high_hidden @ high_weight.t()
    if parts == 2:
        expected += high_hidden @ _parts(weight, 2)[1].t() + _parts(hidden, 2)[1] @ high_weight.t()
    assert distance(room[:, :num_tokens], expected) < 1e-6
    assert (room[:, num_tokens:] == math.pi).all()

    gradient = torch.randn(num_rows, num_tokens, generator=generator)
    to_hidden, to_weight = torch.empty(num_rows, width), torch.ones(num_tokens, width)
    units.to_weight(gradient, hidden, to_weight, adds=True)
    assert distance(to_weight, 1 + gradient.bfloat16().double().t() @ high_hidden) < 1e-6
    units.to_weight(gradient, hidden, to_weight, adds=False)
    assert distance(to_weight, gradient.bfloat16().double().t() @ high_hidden) < 1e-6
    units.to_hidden(gradient, weight, to_hidden)
    assert distance(to_hidden, gradient.double() @ weight.double()) < 5e-3


def test_compiled_products_of_no_rows_are_nothing(units: Bf16Products) -> None:
    none, weight, to_weight = torch.empty(0, 48), torch.randn(100, 48), torch.ones(100, 48)
    units.logits(none, weight, torch.empty(0, 100), parts=2)
    units.to_hidden(torch.empty(0, 100), weight, torch.empty(0, 48))
    units.to_weight(torch.empty(0, 100), none, to_weight, adds=True)
    assert (to_weight == 1).all()
    units.to_weight(torch.empty(0, 100), none, to_weight, adds=False)
    assert (to_weight == 0).all()


def test_compiled_products_repeat_and_do_not_depend_on_the_threads(units: Bf16Products) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight, gradient = (torch.randn(shape, generator=generator) for shape in ((40, 64), (1500, 64), (40, 1500)))
    threads, answers = torch.get_num_threads(), []
    try:
        for count in (1, 3, 3):
            torch.set_num_threads(count)
            logits, to_hidden, to_weight = torch.empty(40, 1500), torch.empty(40, 64), torch.empty(1500, 64)
            units.logits(hidden, weight, logits, parts=2)
            units.to_hidden(gradient, weight, to_hidden)
            units.to_weight(gradient, hidden, to_weight, adds=False)
            answers.append((logits, to_hidden, to_weight))
    finally:
        torch.set_num_threads(threads)
    for one, three, again in zip(*answers, strict=True):
        assert torch.equal(three, again)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_seen_in_bf16_parts_too(spoil: float) -> None:
    case = with_fp32_digits(near_convergence(0.0, torch.float32, 1.0), torch.bfloat16)
    sound = gradients(case, kd_weight=0.0, ce_weight=1.0)["hidden"]
    spoiled = case.hidden.detach().clone()
    spoiled[2, 0] = spoil
    found = gradients(replace(case, hidden=spoiled.requires_grad_()), kd_weight=0.0, ce_weight=1.0)
    others = [row for row in range(len(spoiled)) if row != 2]
    assert torch.equal(found["hidden"][others], sound[others])
    assert not found["hidden"][2].isfinite().any()
    assert not found["weight"].isfinite().all()


def test_products_of_shapes_that_do_not_fit_are_refused(units: Bf16Products) -> None:
    with pytest.raises(ValueError, match="products of the head"):
        units.logits(torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(2, 6), parts=2)
    with pytest.raises(ValueError, match="products of the head"):
        units.to_hidden(torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5, 4), torch.zeros(2, 4))


@pytest.mark.usefixtures("units")
def test_logits_of_a_bf16_head_have_fp32_digits() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(rows, 24, generator=generator).bfloat16() for rows in (5, 70))
    head = HeadWeights(weight, torch.randn(70, generator=generator).bfloat16(), 0.5, 30.0, vocab_size=66)
    found = products.logits_from_bf16(hidden, head)
    assert found is not None
    torch.testing.assert_close(found, head_logits(head, hidden), rtol=1e-5, atol=1e-5)
    assert products.logits_from_bf16(hidden[:0], head).shape == (0, 66)
    assert products.logits_from_bf16(hidden.float(), replace(head, weight=weight.float())) is None


def test_only_large_heads_in_bf16_have_bf16_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Units:
        pass

    monkeypatch.setattr(products, "bf16_products", Units)
    large, small = torch.zeros(1 << 15, 128), torch.zeros(1 << 10, 128)
    hidden = torch.zeros(2, 128)

    def kind(weight: Tensor, asked: torch.dtype | None) -> type:
        return type(choose_multiplier(hidden, HeadWeights(weight, product_dtype=asked), torch.float32))

    assert kind(large, torch.bfloat16) is SplitMultiplier
    assert kind(small, torch.bfloat16) is WideMultiplier
    assert kind(large, torch.float16) is WideMultiplier
    assert kind(large, None) is WideMultiplier
    monkeypatch.setattr(products, "bf16_products", lambda: None)
    assert kind(large, torch.bfloat16) is WideMultiplier
