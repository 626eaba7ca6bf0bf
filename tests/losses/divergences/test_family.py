"""Laws of the divergence family. p is the teacher, q the student."""

from __future__ import annotations

import math

import pytest
import textbook
import torch
from divergence_cases import every_member, value_of
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from torch import Tensor

from stillroom.core.errors import ConfigError
from stillroom.losses import divergences
from stillroom.losses.divergences import Divergence

seeds = st.integers(0, 2**31 - 1)
spreads = st.sampled_from([0.1, 1.0, 8.0])
temperatures = st.sampled_from([0.5, 1.0, 2.0, 4.0])


def rows(
    seed: int, spread: float = 1.0, shape: tuple[int, int] = (3, 11), dtype: torch.dtype = torch.float64
) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(spread).to(dtype)


@every_member
@given(seed=seeds, spread=spreads)
def test_a_distribution_is_at_distance_zero_from_itself(member: Divergence, seed: int, spread: float) -> None:
    logits = rows(seed, spread).requires_grad_()
    value = divergences.on_logits(member, logits, logits.detach())
    value.sum().backward()
    assert value.abs().max() < 1e-12
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


@every_member
@given(seed=seeds, spread=spreads)
def test_distance_is_positive_between_different_distributions(member: Divergence, seed: int, spread: float) -> None:
    student = rows(seed, spread)
    teacher = rows(seed + 1, spread)
    assert (divergences.on_logits(member, student, teacher) > 0).all()


@every_member
@given(seed=seeds, spread=st.sampled_from([0.1, 1.0, 3.0]), temperature=temperatures)
def test_value_and_both_gradients_equal_autograd_of_the_textbook(
    member: Divergence, seed: int, spread: float, temperature: float
) -> None:
    ours = [rows(seed, spread).requires_grad_(), rows(seed + 1, spread).requires_grad_()]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    upstream = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    value = divergences.on_logits(member, ours[0], ours[1], temperature)
    expected = textbook.divergence(member, theirs[0], theirs[1], temperature)
    value.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-8, atol=1e-12)


@every_member
@given(seed=seeds, shift=st.floats(-100, 100))
def test_a_constant_added_to_logits_changes_nothing(member: Divergence, seed: int, shift: float) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    value = divergences.on_logits(member, student, teacher)
    torch.testing.assert_close(
        divergences.on_logits(member, student + shift, teacher - shift), value, rtol=1e-9, atol=1e-12
    )


@every_member
@given(seed=seeds)
def test_renaming_tokens_changes_nothing(member: Divergence, seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    order = torch.randperm(student.shape[-1], generator=torch.Generator().manual_seed(seed))
    value = divergences.on_logits(member, student, teacher)
    torch.testing.assert_close(divergences.on_logits(member, student[:, order], teacher[:, order]), value)


@every_member
@given(seed=seeds, temperature=temperatures)
def test_temperature_is_division_of_logits_and_a_factor(member: Divergence, seed: int, temperature: float) -> None:
    student, teacher = rows(seed, 3.0), rows(seed + 1, 3.0)
    tempered = divergences.on_logits(member, student, teacher, temperature)
    by_hand = divergences.on_logits(member, student / temperature, teacher / temperature) * temperature**2
    torch.testing.assert_close(tempered, by_hand)


@every_member
@given(seed=seeds)
def test_impossible_tokens_equal_a_smaller_vocabulary(member: Divergence, seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    padding = torch.full((3, 4), -math.inf, dtype=torch.float64)
    short = student.clone().requires_grad_()
    long = torch.cat((student, padding), -1).requires_grad_()
    divergences.on_logits(member, short, teacher).sum().backward()
    value = divergences.on_logits(member, long, torch.cat((teacher, padding), -1))
    value.sum().backward()
    torch.testing.assert_close(value, divergences.on_logits(member, student, teacher))
    assert short.grad is not None
    assert long.grad is not None
    torch.testing.assert_close(long.grad[:, :11], short.grad)
    assert (long.grad[:, 11:] == 0).all()


@every_member
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_extreme_logits_give_finite_values_and_gradients(member: Divergence, dtype: torch.dtype) -> None:
    wide = torch.tensor([[1e4, 0.0, -1e4, 5.0], [0.0, 0.0, 0.0, 0.0], [-3e4, 3e4, 0.0, 1.0]], dtype=dtype)
    teacher = torch.tensor([[-1e4, 1e4, 0.0, 2.0], [0.0, -math.inf, -math.inf, -math.inf], [1.0, 2.0, 3e4, -math.inf]])
    student = wide.clone().requires_grad_()
    value = divergences.on_logits(member, student, teacher.to(dtype))
    value.sum().backward()
    assert value.dtype == torch.float32
    assert value.isfinite().all()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    exact = wide.double().requires_grad_()
    expected = divergences.on_logits(member, exact, teacher.to(dtype).double())
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)


def test_reverse_kl_reads_an_impossible_token_as_fifty_nats() -> None:
    student = torch.zeros(1, 2, dtype=torch.float64)
    teacher = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    expected = 0.5 * (math.log(0.5) - 0.0) + 0.5 * (math.log(0.5) + 50.0)
    assert value_of("reverse_kl", student, teacher).item() == pytest.approx(expected)


@given(seed=seeds)
def test_jsd_runs_into_forward_and_reverse_kl(seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(
        value_of("jsd", student, teacher, beta=1e-5), value_of("forward_kl", student, teacher), **close
    )
    torch.testing.assert_close(
        value_of("jsd", student, teacher, beta=1 - 1e-5), value_of("reverse_kl", student, teacher), **close
    )
    assert torch.equal(value_of("jsd", student, teacher, beta=0.0), value_of("forward_kl", student, teacher))
    assert torch.equal(value_of("jsd", student, teacher, beta=1.0), value_of("reverse_kl", student, teacher))


@given(seed=seeds, spread=spreads)
def test_total_variation_is_between_zero_and_one(seed: int, spread: float) -> None:
    value = value_of("total_variation", rows(seed, spread), rows(seed + 1, spread))
    assert ((value >= 0) & (value <= 1)).all()


@given(seed=seeds)
def test_alpha_beta_runs_into_forward_and_reverse_kl(seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    for near, exact in (({"alpha": 1.0, "beta": 1e-5}, "forward_kl"), ({"alpha": 1e-5, "beta": 1.0}, "reverse_kl")):
        value = divergences.on_logits(divergences.make("alpha_beta", near), student, teacher)
        torch.testing.assert_close(
            value, divergences.on_logits(divergences.make(exact), student, teacher), rtol=1e-3, atol=1e-5
        )


@given(seed=seeds)
def test_taid_goes_from_nothing_to_forward_kl(seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    forward = value_of("forward_kl", student, teacher)
    places = [
        divergences.on_logits(divergences.make("taid", {"interpolation": t}), student, teacher)
        for t in (0.01, 0.5, 0.99)
    ]
    assert (places[0] < 1e-2 * forward + 1e-6).all()
    assert (places[0] < places[1]).all() and (places[1] < places[2]).all()
    assert torch.equal(
        divergences.on_logits(divergences.make("taid", {"interpolation": 1.0}), student, teacher), forward
    )


@given(seed=seeds)
def test_todi_has_the_value_of_jeffreys(seed: int) -> None:
    student, teacher = rows(seed), rows(seed + 1)
    jeffreys = value_of("forward_kl", student, teacher) + value_of("reverse_kl", student, teacher)
    torch.testing.assert_close(divergences.on_logits(divergences.make("todi"), student, teacher), jeffreys)


def test_unknown_names_and_places_outside_the_unit_interval_are_refused() -> None:
    with refused(ConfigError, "", "cosine"):
        divergences.make("cosine")
    with refused(ConfigError, "", "beta", "1.5"):
        divergences.make("jsd", {"beta": 1.5})
