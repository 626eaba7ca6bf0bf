"""Laws of choosing a token: seeds, temperature and the nucleus."""

from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

from stillroom.errors import ConfigError
from stillroom.models.sampling import Sampling, choose, nucleus


def draws(logits: torch.Tensor, sampling: Sampling, count: int = 50) -> list[list[int]]:
    generators = sampling.generators(len(logits))
    return [choose(logits, sampling, generators) for _ in range(count)]


def test_a_seed_repeats_and_another_seed_differs() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    assert draws(logits, Sampling(1.0, seed=3)) == draws(logits, Sampling(1.0, seed=3))
    assert draws(logits, Sampling(1.0, seed=3)) != draws(logits, Sampling(1.0, seed=4))


def test_a_row_gets_what_it_gets_alone() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    together = draws(logits, Sampling(1.0, seed=3))
    for row in range(3):
        assert [chosen[row] for chosen in together] == [
            one for (one,) in draws(logits[row : row + 1], Sampling(1.0, seed=3))
        ]


def test_the_nucleus_is_that_of_transformers() -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    for share in (0.1, 0.5, 0.9, 0.999):
        ours = nucleus(torch.softmax(logits, -1), share)
        theirs = torch.softmax(TopPLogitsWarper(share)(None, logits), -1)
        assert torch.equal(ours > 0, theirs > 0)
        assert torch.allclose(ours / ours.sum(-1, keepdim=True), theirs)


def test_a_tiny_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert set(map(tuple, draws(logits, Sampling(1e-40)))) == {(1,)}
    assert draws(logits, Sampling(0.0), 1) == [[1]]
    assert {chosen for (chosen,) in draws(logits, Sampling(1.0, top_p=0.01))} == {1}


def test_large_half_precision_logits_are_drawn_in_fp32() -> None:
    logits = torch.full((1, 5), -6e4, dtype=torch.float16)
    logits[0, 2] = 6e4
    assert {chosen for (chosen,) in draws(logits, Sampling(0.5))} == {2}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(**wrong)
    assert refused.value.advice and refused.value.where
