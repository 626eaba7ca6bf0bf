"""Where trl's generalised Jensen-Shannon and our family are defined alike, they give the same numbers in FP32.

Known differences: theirs has no T^2, is a mean over the labelled positions, and vanishes like beta (1 - beta) at its
ends (where it switches to a KL), while ours is divided by that.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from stillroom.losses.head.loss import DenseTeacher, fused_head_loss

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def generalized_jsd_loss():  # type: ignore[no-untyped-def]
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_generalised_jsd_of_trl_is_ours_times_its_factors(
    generalized_jsd_loss, beta: float, temperature: float
) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    hidden, weight, teacher_hidden, teacher_weight = draw(24, 16), draw(101, 16), draw(24, 12), draw(101, 12)
    labels = torch.randint(101, (24,), generator=generator)
    labels[::5] = -100
    mine, theirs = (hidden.clone().requires_grad_() for _ in range(2))
    loss = fused_head_loss(
        mine,
        weight,
        DenseTeacher(teacher_hidden, teacher_weight),
        labels,
        kd_weight=1.0,
        ce_weight=0.0,
        divergence="jsd",
        beta=beta,
        temperature=temperature,
        chunk_tokens=7,
    ).loss
    expected = generalized_jsd_loss(
        (theirs @ weight.T)[None],
        (teacher_hidden @ teacher_weight.T)[None],
        labels=labels[None],
        beta=beta,
        temperature=temperature,
    )
    factor = temperature**2 / (beta * (1 - beta) if 0 < beta < 1 else 1.0)
    loss.backward()
    (expected * factor).backward()
    torch.testing.assert_close(loss, expected * factor, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-4, atol=1e-6)
