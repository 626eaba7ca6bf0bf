"""Moments in eight bits: against float64, block by block, and what they do to AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stillroom.config.schema import PrecisionConfig, TrainConfig
from stillroom.precision import ParameterGroup, resolve
from stillroom.precision.storage import BF16_BITS, BLOCK, Coded, Moment, Working, make_moment, random_bits

FIRST, SECOND = 0.045, 0.095  # how far a number is off, of itself: half a code to nearest, a code at random


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept(values: Tensor, *, is_second: bool, seed: int = 0) -> Tensor:
    """Values after they were written and read."""
    moment = Coded(values, is_second=is_second)
    write(moment, values, torch.Generator().manual_seed(seed))
    return moment.read()


def write(moment: Coded, values: Tensor, generator: torch.Generator) -> None:
    flat = torch.zeros(moment.values.numel())
    flat[: values.numel()] = values.flatten()
    bits = random_bits(moment.draws, BF16_BITS, generator, values.device) if moment.draws else None
    Coded.write_all([moment], Working([], flat), bits)


@pytest.mark.parametrize("shape", [(16, 32), (3, 100), (1, 7), (2, 5, 60)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_numbers_are_off_by_a_share_of_themselves_in_any_shape_and_size(shape: tuple[int, ...], size: float) -> None:
    first = size * drawn(*shape)
    second = first.square() if size < 1e10 else first.abs()
    assert float(((kept(first, is_second=False) - first) / first).abs().max()) < FIRST
    positive = second[second > 0]
    off = (kept(second, is_second=True)[second > 0] - positive) / positive
    assert not off.numel() or float(off.abs().max()) < SECOND


@pytest.mark.parametrize("ratio", [1e2, 3e4])
def test_one_huge_value_leaves_its_neighbours_as_exact_as_they_were(ratio: float) -> None:
    """Down to 2^-16 of it in the first moment and 2^-32 in the second, which is the same for its root."""
    values = drawn(1, BLOCK).sign() * (1 + drawn(1, BLOCK, seed=1).abs() / 10)
    values[0, 7] = ratio
    assert float(((kept(values, is_second=False) - values) / values).abs().max()) < FIRST
    squares = values.square()
    assert float(((kept(squares, is_second=True) - squares) / squares).abs().max()) < SECOND


def test_what_is_further_below_is_zero_in_the_first_and_never_in_the_second() -> None:
    values = torch.full((1, BLOCK), 1e-12)
    values[0, 0] = 1.0
    assert int((kept(values, is_second=False) != 0).sum()) == 1
    squares = kept(values, is_second=True)
    assert bool((squares > 0).all()) and float(squares[0, 1]) < 1e-9, "divided by, so larger and not zero"


def test_zero_stays_zero() -> None:
    for is_second in (False, True):
        assert not kept(torch.zeros(5, 100), is_second=is_second).any()
        one = torch.zeros(2, BLOCK)
        one[0, 3] = 4.0
        assert torch.equal(kept(one, is_second=is_second), one), "and a block's largest value is exact"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_second", [False, True])
def test_what_is_not_finite_shows_in_its_block_alone(value: float, is_second: bool) -> None:
    values = drawn(3, BLOCK).abs()
    values[1, 9] = value
    moment = Coded(values, is_second=is_second)
    write(moment, values, torch.Generator().manual_seed(0))
    assert torch.isfinite(moment.scales).flatten().tolist() == [True, False, True]
    assert torch.isfinite(moment.read()).all(1).tolist() == [True, False, True]


def test_the_second_moment_is_right_in_the_mean() -> None:
    values = drawn(1, BLOCK).square()
    mean = torch.stack([kept(values, is_second=True, seed=seed) for seed in range(400)]).mean(0)
    assert float(((mean - values) / values).abs().max()) < 0.01


@pytest.mark.parametrize("decay", [0.95, 0.999])
def test_a_second_moment_decays_next_to_one_that_does_not(decay: float) -> None:
    """To nearest, 0.999 times a code is the same code for ever."""
    moment, generator = Coded(torch.ones(8, BLOCK), is_second=True), torch.Generator().manual_seed(0)
    values, steps = torch.ones(8, BLOCK), round(0.7 / (1 - decay))
    write(moment, values, generator)
    for _ in range(steps):
        values = moment.read()
        values[:, 1:] *= decay
        write(moment, values, generator)
    assert float(moment.read()[:, 1:].mean()) == pytest.approx(decay**steps, rel=0.05)


def test_vectors_stay_in_fp32() -> None:
    gain = make_moment(torch.ones(300), torch.int8, is_second=True)
    assert type(gain) is Moment and gain.values.dtype == torch.float32
    assert type(make_moment(torch.ones(4, 4), torch.int8, is_second=True)) is Coded


def adamw(weight: Tensor, gradients: list[Tensor], rate: float, betas: tuple[float, float]) -> Tensor:
    """In float64, without decay."""
    weight, first, second = weight.double().clone(), torch.zeros(()), torch.zeros(())
    for number, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient.double()
        second = betas[1] * second + (1 - betas[1]) * gradient.double() ** 2
        weight -= rate * first / (1 - betas[0] ** number) / ((second / (1 - betas[1] ** number)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("scales", ["alike", "of all sizes"])
def test_updates_go_the_way_of_float64(beta2: float, scales: str) -> None:
    """A hundred updates end within 6 % of the way, and as far along it."""
    weight = nn.Parameter(0.02 * drawn(32, 96))
    start = weight.detach().clone()
    sizes = torch.exp(1.5 * drawn(32, 96, seed=5)) if scales == "of all sizes" else 1.0
    gradients = [(drawn(32, 96, seed=step) + 0.3) * sizes for step in range(100)]
    precision = resolve("fp32", config=PrecisionConfig(moments="int8"))
    train = TrainConfig(weight_decay=0.0, beta2=beta2)
    optimizer = precision.optimizer([ParameterGroup("student", 1e-3, (("matrix", weight),))], train)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step(1.0, {"student": 1.0})
    way, expected = weight.detach() - start, adamw(start, gradients, 1e-3, (0.9, beta2)) - start
    assert float((way - expected).norm() / expected.norm()) < 0.06
    assert float((way * expected).sum() / expected.square().sum()) == pytest.approx(1.0, abs=0.02)


def learned(moments: str) -> tuple[float, float]:
    """The share that is left of a quadratic of badly scaled curvature, and of what a small net has to learn."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-3, 1, 16 * 32).view(16, 32)
    point = nn.Parameter(drawn(16, 32))
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    wanted = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for seed, parameter in enumerate((*net.parameters(), *wanted.parameters())):
            parameter.copy_(0.4 * drawn(*parameter.shape, seed=seed))
    named = (("point", point), *net.named_parameters())
    precision = resolve("fp32", config=PrecisionConfig(moments=moments))  # type: ignore[arg-type]
    optimizer = precision.optimizer([ParameterGroup("student", 3e-2, named)], TrainConfig(weight_decay=0.0))
    losses = []
    for step in range(300):
        x = torch.randn(32, 8, generator=generator)
        bowl, miss = (curvature * point.square()).mean(), (net(x) - wanted(x).detach()).square().mean()
        (bowl + miss).backward()  # type: ignore[no-untyped-call]
        optimizer.step(1.0 - step / 300, {"student": 1.0})
        optimizer.zero_grad()
        losses.append((bowl.item(), miss.item()))
    return losses[-1][0] / losses[0][0], losses[-1][1] / losses[0][1]


def test_a_quadratic_and_a_small_net_are_learned_as_with_fp32() -> None:
    exact, coded = learned("float32"), learned("int8")
    assert exact[0] < coded[0] < 1e-3, "without noise FP32 continues to the last digit"
    assert coded[1] < 1.2 * exact[1] < 0.01
