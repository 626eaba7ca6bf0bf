"""Laws of the comparison of logits: a divergence is never below zero, and is that of the textbook."""

from __future__ import annotations

import math

import pytest
import torch

from stillroom.export.folder import difference


def logits(seed: int, rows: int = 16, size: int = 300) -> torch.Tensor:
    return 4 * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-6, 1e-4, 1e-2, 1.0, 30.0])
def test_the_mean_kl_is_never_below_zero(scale: float) -> None:
    for seed in range(40):
        wanted = logits(seed)
        found = wanted + scale * logits(seed + 1000)
        made = difference([wanted], [found])
        assert made.kl >= 0 and (made.kl > 0) == bool((wanted != found).any())


def test_it_is_the_kl_of_the_textbook() -> None:
    wanted, found = logits(1), logits(2)
    p, q = torch.softmax(wanted.double(), -1), torch.softmax(found.double(), -1)
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert difference([wanted[:5], wanted[5:]], [found]).kl == pytest.approx(expected, rel=1e-12)
    assert difference([wanted], [found]).tokens == 16


def test_half_precision_differs_by_what_float64_says() -> None:
    wanted = logits(3)
    found = wanted.half().float()
    p, q = torch.softmax(wanted.double(), -1), torch.softmax(found.double(), -1)
    assert difference([wanted], [found]).kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_an_infinite_difference(value: float) -> None:
    found = logits(4)
    found[0, 0] = value
    assert difference([logits(4)], [found]).largest == math.inf


def test_rows_of_padding_are_not_compared() -> None:
    wanted = logits(5)
    padded = torch.cat([wanted, torch.full((16, 4), 9.0)], 1)
    assert difference([wanted], [padded]) == difference([padded], [wanted]) == difference([wanted], [wanted])
