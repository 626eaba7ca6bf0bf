"""The loss at full size: a large vocabulary, FP16 logits, padding of -inf, and any length."""

from __future__ import annotations

import pytest
import torch

from stillroom.losses import divergences
from stillroom.losses.head.loss import DenseTeacher, fused_head_loss

VOCABULARY = 151_936
FAMILY = ["forward_kl", "reverse_kl", "jsd"]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("temperature", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_half_logits_of_a_large_vocabulary_give_the_float64_loss(name: str, temperature: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (spread * torch.randn(2, VOCABULARY, generator=generator).half() for _ in range(2))
    member = divergences.make(name)
    got = divergences.on_logits(member, student, teacher, temperature=temperature)
    exact = divergences.on_logits(member, student.double(), teacher.double(), temperature=temperature)
    assert torch.allclose(got.double(), exact, rtol=1e-3)


def test_the_gradient_of_half_hidden_states_is_not_flushed_to_zero() -> None:
    """A mean over many tokens makes logit gradients that FP16 cannot hold: here they never pass through FP16."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 16, generator=generator).half().requires_grad_()
    weight = torch.randn(20_000, 16, generator=generator).half().requires_grad_()
    teacher = DenseTeacher(torch.randn(64, 16, generator=generator), torch.randn(20_000, 16, generator=generator))
    labels = torch.randint(0, 20_000, (64,), generator=generator)
    out = fused_head_loss(hidden, weight, teacher, labels, temperature=4.0)
    (out.loss * 1024).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_teacher = DenseTeacher(teacher.hidden.double(), teacher.weight.double())
    exact = fused_head_loss(exact_hidden, weight.detach().double(), exact_teacher, labels, temperature=4.0)
    (exact.loss * 1024).backward()
    assert exact_hidden.grad is not None and hidden.grad is not None
    error = (hidden.grad.double() - exact_hidden.grad).norm() / exact_hidden.grad.norm()
    assert float(error) < 2e-3


@pytest.mark.parametrize("length", [64, 128, 512])
def test_the_loss_of_a_repeated_batch_does_not_depend_on_its_length(length: int) -> None:
    """`batchmean` over [batch, time, vocabulary] grows with time; a mean over scored tokens does not."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(32, 8, generator=generator), torch.randn(50, 8, generator=generator)
    teacher, teacher_weight = torch.randn(32, 8, generator=generator), torch.randn(50, 8, generator=generator)
    labels = torch.randint(0, 50, (32,), generator=generator)
    short = fused_head_loss(hidden, weight, DenseTeacher(teacher, teacher_weight), labels)
    times = length // 32
    long = fused_head_loss(
        hidden.repeat(times, 1), weight, DenseTeacher(teacher.repeat(times, 1), teacher_weight), labels.repeat(times)
    )
    assert torch.allclose(short.loss, long.loss, rtol=1e-6)
