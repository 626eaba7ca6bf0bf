"""Divergences with a setting are continuous and exact over all of [0, 1], the ends and their neighbourhoods included.

The reference is the formula of the papers in decimal arithmetic of 60 digits, differentiated by central differences:
near an end float64 itself loses the digits that are at stake.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from decimal import Decimal

import pytest
import torch
from refusals import refused
from torch import Tensor

from stillroom.config.schema import KdConfig, ObjectivesConfig, Ramp
from stillroom.core.errors import ConfigError
from stillroom.losses import divergences
from stillroom.losses.head.kernel import KernelName, choose_kernel
from stillroom.losses.head.loss import DenseTeacher, TopKTeacher, fused_head_loss
from stillroom.losses.head.rows import keep_top_k
from stillroom.losses.mix import Mix
from stillroom.training.schedule import value_at

CHOICE = choose_kernel("auto")
both_kernels = pytest.mark.parametrize(
    "kernel",
    ["plain", pytest.param("compiled", marks=pytest.mark.skipif(CHOICE.name != "compiled", reason=CHOICE.reason))],
)
LOW = (1e-12, 2.5e-8, 1e-7, 1e-4, 0.02, 0.3, 0.5)
HIGH = (0.5 + 1e-9, 0.7, 0.9, 0.97, 1 - 1e-4, 1 - 1e-7, 1 - 2.5e-8, 1 - 1e-12, 1 - 2.0**-53)
NUM_TOKENS = 6
Row = list[Decimal]


def draw(seed: int, spread: float) -> Tensor:
    return torch.randn(1, NUM_TOKENS, generator=torch.Generator().manual_seed(seed)) * spread


def softmax(logits: Row) -> Row:
    exps = [z.exp() for z in logits]
    return [e / sum(exps) for e in exps]


def kl(one: Row, other: Row) -> Decimal:
    return sum((a * (a / b).ln() for a, b in zip(one, other, strict=True)), Decimal(0))


def mix(one: Row, other: Row, share: Decimal) -> Row:
    return [share * a + (1 - share) * b for a, b in zip(one, other, strict=True)]


def jsd(p: Row, q: Row, b: Decimal) -> Decimal:
    return (b * kl(p, mix(p, q, b)) + (1 - b) * kl(q, mix(p, q, b))) / (b * (1 - b))


def alpha_beta(p: Row, q: Row, a: Decimal, b: Decimal) -> Decimal:
    s = a + b
    return sum((a * x**s + b * y**s - s * x**a * y**b for x, y in zip(p, q, strict=True)), Decimal(0)) / (s * a * b)


def exact(law: Callable[[Row, Row], Decimal], student: Tensor, teacher: Tensor) -> tuple[float, list[float]]:
    """Value and gradient in the student's logits."""
    with decimal.localcontext(decimal.Context(prec=60)):
        z = [Decimal(x) for x in student[0].tolist()]
        p, step = softmax([Decimal(x) for x in teacher[0].tolist()]), Decimal("1e-16")

        def at(place: int, sign: int) -> Decimal:
            return law(p, softmax([x + sign * step * (index == place) for index, x in enumerate(z)]))

        gradient = [(at(place, 1) - at(place, -1)) / (2 * step) for place in range(NUM_TOKENS)]
        return float(law(p, softmax(z))), [float(slope) for slope in gradient]


def ours(
    student: Tensor, teacher: Tensor, kernel: KernelName, divergence: divergences.Divergence
) -> tuple[Tensor, Tensor]:
    """The same through the public function: with a head of ones, hidden states are logits."""
    hidden, head = student.clone().requires_grad_(), torch.eye(NUM_TOKENS)
    out = fused_head_loss(
        hidden, head, DenseTeacher(teacher, head), torch.zeros(1, dtype=torch.long),
        kd_weight=1.0, ce_weight=0.0, divergence=divergence, temperature=1.0, kernel=kernel,
    )  # fmt: skip
    out.loss.backward()
    assert hidden.grad is not None
    return out.loss.detach(), hidden.grad[0]


def assert_exact(
    name: str, settings: dict[str, float], law: Callable[[Row, Row], Decimal], kernel: KernelName, spread: float
) -> None:
    student, teacher = draw(1, spread), draw(2, spread)
    loss, gradient = ours(student, teacher, kernel, divergences.make(name, settings))
    value, slopes = exact(law, student, teacher)
    assert float(loss) == pytest.approx(value, rel=1e-5, abs=1e-6)
    expected = torch.tensor(slopes, dtype=torch.float64)
    error = (gradient.double() - expected).abs().max() / expected.abs().max()
    assert error < 5e-6, f"gradient {gradient.tolist()} instead of {slopes}"


@both_kernels
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("place", LOW + HIGH)
def test_jsd_is_exact_over_the_whole_interval(place: float, spread: float, kernel: KernelName) -> None:
    assert_exact("jsd", {"beta": place}, lambda p, q: jsd(p, q, Decimal(place)), kernel, spread)


@both_kernels
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("place", LOW + HIGH)
def test_skewed_divergences_are_exact_over_the_whole_interval(place: float, spread: float, kernel: KernelName) -> None:
    alpha = {"alpha": place}
    assert_exact("skew_forward_kl", alpha, lambda p, q: kl(p, mix(p, q, Decimal(place))), kernel, spread)
    assert_exact("skew_reverse_kl", alpha, lambda p, q: kl(q, mix(q, p, Decimal(place))), kernel, spread)


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [(1.0, 1e-12), (1.0, 2.5e-8), (0.3, 1e-4), (0.2, 0.7), (1e-4, 0.3), (2.5e-8, 1.0), (1e-12, 0.5), (0.03, 0.03),
     (1e-3, 1e-3), (1e-5, 1e-6), (1e-9, 2e-6)],
)  # fmt: skip
def test_alpha_beta_is_exact_near_its_special_points(alpha: float, beta: float) -> None:
    def law(p: Row, q: Row) -> Decimal:
        return alpha_beta(p, q, Decimal(alpha), Decimal(beta))

    assert_exact("alpha_beta", {"alpha": alpha, "beta": beta}, law, "plain", 1.0)


@pytest.mark.parametrize("settings", [(0.0, 0.4), (0.4, 0.0)])
def test_alpha_beta_with_a_power_of_zero_is_its_limit(settings: tuple[float, float]) -> None:
    student, teacher = draw(1, 1.0), draw(2, 1.0)
    at_zero, near = (
        ours(student, teacher, "plain", divergences.make("alpha_beta", {"alpha": a, "beta": b}))
        for a, b in (settings, (max(settings[0], 1e-9), max(settings[1], 1e-9)))
    )
    torch.testing.assert_close(at_zero, near, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", [0.0, 1e-12, 2.5e-8, 1e-4, 0.05, 0.0999, 0.1, 0.5, 1 - 1e-7, 1.0])
def test_taid_is_exact_over_the_whole_interval(place: float) -> None:
    student, teacher = draw(1, 1.0), draw(2, 1.0)
    loss, gradient = ours(student, teacher, "plain", divergences.make("taid", {"interpolation": place}))
    with decimal.localcontext(decimal.Context(prec=60)):
        z, t = ([Decimal(x) for x in row[0].tolist()] for row in (student, teacher))
        target, q = softmax(mix(t, z, Decimal(place))), softmax(z)
        value, slopes = float(kl(target, q)), [float(a - b) for a, b in zip(q, target, strict=True)]
    assert float(loss) == pytest.approx(value, rel=1e-5, abs=1e-6)
    expected = torch.tensor(slopes, dtype=torch.float64)
    assert (gradient.double() - expected).abs().max() <= 5e-6 * expected.abs().max()


@both_kernels
@pytest.mark.parametrize("end", ["start", "end"])
def test_a_long_cosine_ramp_of_beta_never_leaves_the_numbers(end: str, kernel: KernelName) -> None:
    """The first and the last steps of 100,000 lie nearer to 0 and 1 than FP32 can say beside 1."""
    ramp = Ramp(start=0.0, end=1.0, until=1.0, shape="cosine")
    student, teacher = draw(1, 2.0), draw(2, 2.0)
    limit = ours(student, teacher, kernel, divergences.make("forward_kl" if end == "start" else "reverse_kl"))
    for step in range(8):
        beta = value_at(ramp, (step if end == "start" else 100_000 - step) / 100_000)
        found = ours(student, teacher, kernel, divergences.make("jsd", {"beta": beta}))
        torch.testing.assert_close(found, limit, rtol=2e-5, atol=2e-6)


@both_kernels
@pytest.mark.parametrize("place", [1e-12, 0.3, 1 - 1e-12])
@pytest.mark.parametrize("name", ["jsd", "skew_forward_kl", "skew_reverse_kl"])
def test_tokens_that_one_side_rules_out_stay_finite_near_the_ends(name: str, place: float, kernel: KernelName) -> None:
    student = torch.tensor([[0.0, -1e4, 1.0, -200.0, 3.0, -math.inf]])
    teacher = torch.tensor([[-1e4, 0.0, 1.0, -math.inf, -200.0, -math.inf]])
    divergence = divergences.make(name, {"beta": place, "alpha": place})
    head = torch.zeros(NUM_TOKENS, 1)  # -inf comes by the bias: a product with it would be NaN
    hidden, bias = torch.zeros(1, 1), student[0].clone().requires_grad_()
    out = fused_head_loss(
        hidden, head, DenseTeacher(hidden, head, teacher[0]), torch.zeros(1, dtype=torch.long), student_bias=bias,
        kd_weight=1.0, ce_weight=0.0, divergence=divergence, temperature=1.0, kernel=kernel,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.isfinite() and out.loss >= 0
    assert bias.grad is not None and bias.grad.isfinite().all()


# -- a tail that stands for no token -----------------------------------------------------------------------------


@both_kernels
@pytest.mark.parametrize("tail", [1e-9, 1e-7, -1e-9, 0.0])
@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl"])
def test_a_tail_of_no_tokens_has_no_mass(name: str, tail: float, kernel: KernelName) -> None:
    """Keeping every token leaves no tail: what 1 - sum says of it is rounding, also where that is negative."""
    student, teacher = draw(1, 2.0), draw(2, 2.0)
    signal = keep_top_k(teacher, NUM_TOKENS, torch.ones(1))
    stored = TopKTeacher(signal.ids, signal.log_probs, torch.tensor([tail]).log())
    head = torch.eye(NUM_TOKENS)
    found = []
    for answer in (stored, DenseTeacher(teacher, head)):
        hidden = student.clone().requires_grad_()
        out = fused_head_loss(
            hidden, head, answer, torch.zeros(1, dtype=torch.long),
            kd_weight=1.0, ce_weight=0.0, divergence=name, temperature=1.0, kernel=kernel,
        )  # fmt: skip
        out.loss.backward()
        found.append((out.loss.detach(), hidden.grad))
        assert out.counters["bad_teacher_rows"] == 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: divergences.JensenShannon(0.0),
        lambda: divergences.JensenShannon(math.nan),
        lambda: divergences.SkewForwardKL(1.0),
        lambda: divergences.SkewReverseKL(-0.1),
        lambda: divergences.AlphaBeta(0.0, 0.0),
        lambda: divergences.AlphaBeta(1.5, 0.5),
        lambda: divergences.make("taid", {"interpolation": 2.0}),
        lambda: divergences.make("jsd", {"beta": "half"}),  # type: ignore[dict-item]
    ],
)
def test_a_setting_outside_its_interval_is_refused_with_advice(build: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert error.value.advice


def test_a_ramp_whose_end_is_no_divergence_is_refused_when_the_run_is_built() -> None:
    ramp = Ramp(start=0.1, end=1.0, until=1.0)
    with refused(ConfigError, "", "alpha"):
        Mix(ObjectivesConfig(kd=KdConfig(divergence="skew_forward_kl", alpha=ramp)))
